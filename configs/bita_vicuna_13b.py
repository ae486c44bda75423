"""BiTA for Vicuna-13B v1.3 with the paper's settings (4.1).

Its 150,000 questions come from five sets, of which this is one, and each is asked under two templates, of which this
is one: with as many updates the answers are repeated more often.
"""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import BiTA
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import PLATYPUS
from jaxspec.weights.shapes import LLAMA_13B

CONFIG = RunConfig(
    model="lmsys/vicuna-13b-v1.3",
    shapes=LLAMA_13B,
    method=BiTA(distances=3),
    tree="efficient:5",
    data=dataclasses.replace(PLATYPUS, answers=300000, template="vicuna"),
    train=TrainConfig(
        steps=9375, batch_size=128, microbatch=4, sequence_length=1024, insertions=64, learning_rate=3e-2, remat=True
    ),
)
