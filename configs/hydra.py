"""Hydra++ (Ankner et al., 2024).

For Vicuna v1.3 it trains for 4 epochs at 1e-3, as in section 4.1 of the Amphista paper; batch and warm-up are our own.
"""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import Hydra
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT


def vicuna_run(model: str) -> RunConfig:
    """A run as that section describes it."""
    return RunConfig(
        model=model,
        method=Hydra(lm_head="full", prefix_attention=True, blocks=4, alignment=1.0, labels=0.0),
        tree="sparse:64",
        data=dataclasses.replace(SHAREGPT, answers=70000, template="vicuna"),
        train=TrainConfig(
            steps=35000,
            batch_size=8,
            microbatch=1,
            sequence_length=1024,
            insertions=512,
            learning_rate=1e-3,
            warmup=1000,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "hydra_vicuna_7b": vicuna_run("lmsys/vicuna-7b-v1.3"),
    "hydra_vicuna_13b": vicuna_run("lmsys/vicuna-13b-v1.3"),
    "hydra_vicuna_33b": vicuna_run("lmsys/vicuna-33b-v1.3"),
    # Trains on a laptop, on the base's own projection; 3 blocks.
    "hydra_smollm2": RunConfig(
        model="smollm2-135m",
        method=Hydra(heads=3, prefix_attention=True, blocks=3, alignment=1.0, labels=0.0),
        draft_vocabulary=8192,
        train=TrainConfig(
            steps=400,
            batch_size=4,
            microbatch=2,
            insertions=128,
            learning_rate=1e-3,
            warmup=20,
            clip=1.0,
            adapter_dtype="int8",
        ),
    ),
}
