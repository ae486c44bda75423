"""Amphista (2024) with the settings of section 4.1, and for the default model.

The paper trains for four epochs (for ours see `training/sources.py`) at 1e-3 with Hugging Face's trainer, which by
default clips at 1, and drafts Medusa's tree (A.1). Batch, warm-up and length are not published: the length is that of
Medusa and Hydra, the others are ours.
"""

import dataclasses

from jaxspec.methods import Amphista
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import TrainConfig
from jaxspec.training.sources import SHAREGPT


def vicuna_run(model: str) -> RunConfig:
    """A run as that section describes it."""
    return RunConfig(
        model=model,
        method=Amphista(lm_head="full"),
        tree="medusa:64",
        data=dataclasses.replace(SHAREGPT, template="vicuna"),
        train=TrainConfig(
            steps=4 * SHAREGPT.answers // 8,
            batch_size=8,
            microbatch=1,
            sequence_length=2048,
            insertions=512,
            learning_rate=1e-3,
            warmup=1000,
            clip=1.0,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "amphista_vicuna_7b": vicuna_run("lmsys/vicuna-7b-v1.3"),
    "amphista_vicuna_13b": vicuna_run("lmsys/vicuna-13b-v1.3"),
    "amphista_vicuna_33b": vicuna_run("lmsys/vicuna-33b-v1.3"),
    # Trains on a laptop, on the base's own projection.
    "amphista_smollm2": RunConfig(
        model="smollm2-135m",
        method=Amphista(heads=3),
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
