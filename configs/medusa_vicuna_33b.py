"""Medusa-1 for Vicuna-33B v1.3, 4 epochs at 1e-3 as in section 4.1 of the Amphista paper; batch and warm-up our own."""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import Medusa
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT
from jaxspec.weights.shapes import LLAMA_33B

CONFIG = RunConfig(
    model="lmsys/vicuna-33b-v1.3",
    shapes=LLAMA_33B,
    method=Medusa(lm_head="full"),
    tree="sparse:64",
    data=dataclasses.replace(SHAREGPT, answers=70000, template="vicuna"),
    train=TrainConfig(
        steps=35000, batch_size=8, microbatch=1, sequence_length=1024, insertions=512, learning_rate=1e-3, warmup=1000
    ),
)
