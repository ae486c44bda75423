"""Medusa for the embedded SmolLM2-135M-Instruct: trains on a laptop, on the base's own projection."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import Medusa
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=Medusa(heads=3),
    draft_vocabulary=8192,
    data=DataConfig(),
    train=TrainConfig(
        steps=400,
        batch_size=4,
        microbatch=2,
        insertions=128,
        learning_rate=3e-3,
        warmup=20,
        clip=1.0,
        adapter_dtype="float16",
    ),
)
