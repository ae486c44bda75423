"""PPD for MobileLLaMA-1.4B with the settings of the thesis (section 6.1.2)."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.model.shapes import MOBILELLAMA_1_4B
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="mtgv/MobileLLaMA-1.4B-Chat",
    shapes=MOBILELLAMA_1_4B,
    method=PPD(),
    data=DataConfig(
        prompts="Aeala/ShareGPT_Vicuna_unfiltered",
        column="conversations",
        answers=50000,
        max_prompt_tokens=512,
        max_answer_tokens=512,
        held_out_tokens=512,
    ),
    train=TrainConfig(steps=25000, batch_size=4, sequence_length=1024, insertions=64, learning_rate=1e-2),
)
