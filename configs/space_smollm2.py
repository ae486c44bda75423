"""SPACE for the embedded SmolLM2-135M-Instruct: full fine-tuning on its own answers; a checkpoint of the whole base.

The loss is the paper's (equations 1 to 4). The text is half of the base's own answers, each seen once, where the paper
takes other people's answers, twice.
"""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import SPACE
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=SPACE(tuning="full", weighting="tokens"),
    tree="chain:5",
    data=DataConfig(),
    train=TrainConfig(steps=500, batch_size=2, insertions=64, learning_rate=5e-5, warmup=10, clip=1.0),
)
