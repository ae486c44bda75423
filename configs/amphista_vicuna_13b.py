"""Amphista for Vicuna-13B v1.3, 4 epochs at 1e-3 as in section 4.1 of the Amphista paper; batch and warm-up our own."""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import Amphista
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT
from jaxspec.weights.shapes import LLAMA_13B

CONFIG = RunConfig(
    model="lmsys/vicuna-13b-v1.3",
    shapes=LLAMA_13B,
    method=Amphista(lm_head="full"),
    tree="sparse:64",
    data=dataclasses.replace(SHAREGPT, answers=70000, template="vicuna"),
    train=TrainConfig(
        steps=35000, batch_size=8, microbatch=1, sequence_length=1024, insertions=512, learning_rate=1e-3, warmup=1000
    ),
)
