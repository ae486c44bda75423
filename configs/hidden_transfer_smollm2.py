"""Hidden Transfer for the embedded SmolLM2-135M-Instruct: trains on a laptop, all maps at once."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import HiddenTransfer
from jaxspec.model.shapes import SMOLLM2_135M
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=HiddenTransfer(layers=(10, 14, 18), training="joint"),
    data=DataConfig(),
    train=TrainConfig(steps=640, batch_size=2, insertions=128, learning_rate=7e-3),
)
