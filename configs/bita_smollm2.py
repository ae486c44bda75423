"""BiTA for the embedded SmolLM2-135M-Instruct: trains on a laptop, by distillation; a tree for few cores."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import BiTA
from jaxspec.model.shapes import SMOLLM2_135M
from jaxspec.training.run_config import RunConfig

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=BiTA(objective="distillation"),
    data=DataConfig(),
    train=TrainConfig(steps=500, batch_size=2, insertions=128, learning_rate=3e-2, warmup=10, clip=1.0),
)
