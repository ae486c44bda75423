"""PPD for MobileLLaMA-1.4B with the settings of the thesis (section 6.1.2)."""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT
from jaxspec.weights.shapes import MOBILELLAMA_1_4B

CONFIG = RunConfig(
    model="mtgv/MobileLLaMA-1.4B-Chat",
    shapes=MOBILELLAMA_1_4B,
    method=PPD(),
    data=dataclasses.replace(SHAREGPT, answers=50000, template="vicuna"),
    train=TrainConfig(steps=25000, batch_size=4, sequence_length=1024, insertions=64, learning_rate=1e-2),
)
