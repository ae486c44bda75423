"""SPACE for Qwen2-7B, full fine-tuning as in the paper (4.1, A.1), two epochs of one of its sets."""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import SPACE
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import ANSWERED_PLATYPUS
from jaxspec.weights.shapes import QWEN2_7B

CONFIG = RunConfig(
    model="Qwen/Qwen2-7B",
    shapes=QWEN2_7B,
    method=SPACE(tuning="full", weighting="tokens"),
    tree="chain:5",
    data=dataclasses.replace(ANSWERED_PLATYPUS, answers=25000),
    train=TrainConfig(
        steps=1562,
        batch_size=32,
        microbatch=4,
        sequence_length=4096,
        insertions=1,
        learning_rate=5e-5,
        clip=1.0,
        remat=True,
    ),
)
