"""BiTA for Vicuna-33B v1.3 with the paper's settings (4.1), questions of one of its five sets."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import BiTA
from jaxspec.model.shapes import LLAMA_33B
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="lmsys/vicuna-33b-v1.3",
    shapes=LLAMA_33B,
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
        template="vicuna",
    ),
    train=TrainConfig(
        steps=9375, batch_size=128, microbatch=4, sequence_length=1024, insertions=64, learning_rate=3e-2, remat=True
    ),
)
