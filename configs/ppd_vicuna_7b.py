"""PPD for Vicuna-7B v1.3 with the settings of the thesis (section 6.1.2)."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.model.shapes import LLAMA_7B
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="lmsys/vicuna-7b-v1.3",
    shapes=LLAMA_7B,
    method=PPD(),
    data=DataConfig(
        prompts="Aeala/ShareGPT_Vicuna_unfiltered",
        column="conversations",
        answers=50000,
        max_prompt_tokens=512,
        max_answer_tokens=512,
        held_out_tokens=512,
        template="vicuna",
    ),
    train=TrainConfig(steps=25000, batch_size=4, sequence_length=1024, insertions=64, learning_rate=1e-2, remat=True),
)
