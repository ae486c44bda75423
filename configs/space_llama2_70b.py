"""SPACE for LLaMA-2-70B, full fine-tuning as in the paper (4.1, A.1), two epochs of one of its sets."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import SPACE
from jaxspec.model.shapes import LLAMA2_70B
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="meta-llama/Llama-2-70b-hf",
    shapes=LLAMA2_70B,
    method=SPACE(tuning="full", weighting="tokens"),
    tree="chain:5",
    data=DataConfig(
        prompts="garage-bAInd/Open-Platypus",
        column="instruction",
        context_column="input",
        answer_column="output",
        answers=25000,
        max_prompt_tokens=2048,
        max_answer_tokens=2048,
        held_out_tokens=2048,
    ),
    train=TrainConfig(
        steps=390,
        batch_size=128,
        microbatch=4,
        sequence_length=4096,
        insertions=1,
        learning_rate=5e-5,
        clip=1.0,
        remat=True,
    ),
)
