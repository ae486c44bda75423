"""BiTA for LLaMA-2-70B-chat with the paper's settings (4.1), questions of one of its five sets."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import BiTA
from jaxspec.model.shapes import LLAMA2_70B
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="meta-llama/Llama-2-70b-chat-hf",
    shapes=LLAMA2_70B,
    method=BiTA(distances=4),
    tree="efficient:5",
    data=DataConfig(
        prompts="garage-bAInd/Open-Platypus",
        column="instruction",
        context_column="input",
        answers=300000,
        max_prompt_tokens=512,
        max_answer_tokens=512,
        held_out_tokens=512,
    ),
    train=TrainConfig(
        steps=9375, batch_size=128, microbatch=4, sequence_length=1024, insertions=64, learning_rate=3e-2, remat=True
    ),
)
