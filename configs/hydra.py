"""Hydra++ (Ankner et al., 2024), as its released script trains it, and for the default model.

The script (README) trains for ten epochs (for ours see `training/sources.py`), down to 0.33 of the highest rate;
clipping at 1 is its trainer's default, of the sum of the heads' losses; here it is their mean. The later blocks of a
head share their weights there; here every block has its own.
"""

import dataclasses

from jaxspec.methods import Hydra
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import TrainConfig
from jaxspec.training.sources import SHAREGPT


def vicuna_run(model: str) -> RunConfig:
    """A run as that script describes it."""
    return RunConfig(
        model=model,
        method=Hydra(lm_head="full", prefix_attention=True, blocks=4, alignment=1.0, labels=0.0, dropout=0.2),
        tree="sparse:64",
        data=dataclasses.replace(SHAREGPT, template="vicuna"),
        train=TrainConfig(
            steps=10 * SHAREGPT.answers // 32,
            batch_size=32,
            microbatch=1,
            sequence_length=2048,
            insertions=512,
            learning_rate=5e-4,
            final_learning_rate=0.33,
            warmup=100,
            weight_decay=0.1,
            clip=1.0,
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
