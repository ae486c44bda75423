"""Hydra++ for Vicuna-7B v1.3, 4 epochs at 1e-3 as in section 4.1 of the Amphista paper; batch and warm-up our own."""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import Hydra
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT
from jaxspec.weights.shapes import LLAMA_7B

CONFIG = RunConfig(
    model="lmsys/vicuna-7b-v1.3",
    shapes=LLAMA_7B,
    method=Hydra(lm_head="full", prefix_attention=True, blocks=4, alignment=1.0, labels=0.0),
    tree="sparse:64",
    data=dataclasses.replace(SHAREGPT, answers=70000, template="vicuna"),
    train=TrainConfig(
        steps=35000, batch_size=8, microbatch=1, sequence_length=1024, insertions=512, learning_rate=1e-3, warmup=1000
    ),
)
