"""Amphista for Vicuna-13B v1.3, 4 epochs at 1e-3 as in section 4.1 of the Amphista paper; batch and warm-up our own."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import Amphista
from jaxspec.model.shapes import LLAMA_13B
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="lmsys/vicuna-13b-v1.3",
    shapes=LLAMA_13B,
    method=Amphista(lm_head="full"),
    tree="sparse:64",
    data=DataConfig(
        prompts="Aeala/ShareGPT_Vicuna_unfiltered",
        column="conversations",
        answers=70000,
        max_prompt_tokens=512,
        max_answer_tokens=512,
        held_out_tokens=512,
        template="vicuna",
    ),
    train=TrainConfig(
        steps=35000, batch_size=8, microbatch=1, sequence_length=1024, insertions=512, learning_rate=1e-3, warmup=1000
    ),
)
