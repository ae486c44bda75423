"""Medusa-1 (Cai et al., 2024), as its released script trains it, and for the default model.

The script (README, `train_legacy.py`) trains three heads for two epochs (for ours see `training/sources.py`), with
warm-up over a tenth of the updates; clipping at 1 is the default of its trainer. It adds up the heads' losses, all
alike; here their mean is clipped, and later heads count less, as in section 2.2.1 of the paper. Medusa-2, which tunes
the base with the heads, is not here.
"""

import dataclasses

from jaxspec.methods import Medusa
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import TrainConfig
from jaxspec.training.sources import SHAREGPT


def vicuna_run(model: str) -> RunConfig:
    """A run as that script describes it."""
    steps = 2 * SHAREGPT.answers // 128
    return RunConfig(
        model=model,
        method=Medusa(heads=3, lm_head="full"),
        tree="sparse:64",
        data=dataclasses.replace(SHAREGPT, template="vicuna"),
        train=TrainConfig(
            steps=steps,
            batch_size=128,
            microbatch=1,
            sequence_length=2048,
            insertions=512,
            learning_rate=1e-3,
            warmup=steps // 10,
            clip=1.0,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "medusa_vicuna_7b": vicuna_run("lmsys/vicuna-7b-v1.3"),
    "medusa_vicuna_13b": vicuna_run("lmsys/vicuna-13b-v1.3"),
    "medusa_vicuna_33b": vicuna_run("lmsys/vicuna-33b-v1.3"),
    # Trains on a laptop, on the base's own projection.
    "medusa_smollm2": RunConfig(
        model="smollm2-135m",
        method=Medusa(heads=3),
        draft_vocabulary=8192,
        train=TrainConfig(
            steps=400,
            batch_size=4,
            microbatch=2,
            insertions=128,
            learning_rate=3e-3,
            warmup=20,
            clip=1.0,
        ),
    ),
}
