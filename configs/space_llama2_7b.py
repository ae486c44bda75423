"""SPACE for LLaMA-2-7B, full fine-tuning as in the paper (4.1, A.1), two epochs of one of its sets.

Questions are asked in LLaMA-2's template, which goes with the tuned base; the paper says of none.
"""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import SPACE
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import ANSWERED_PLATYPUS
from jaxspec.weights.shapes import LLAMA2_7B

CONFIG = RunConfig(
    model="meta-llama/Llama-2-7b-hf",
    shapes=LLAMA2_7B,
    method=SPACE(tuning="full", weighting="tokens"),
    tree="chain:5",
    data=dataclasses.replace(ANSWERED_PLATYPUS, answers=25000, template="llama2-short"),
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
