"""Hydra++ with 3 blocks for the embedded SmolLM2-135M-Instruct: trains on a laptop, on the base's own projection."""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import Hydra
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=Hydra(heads=3, prefix_attention=True, blocks=3, alignment=1.0, labels=0.0),
    draft_vocabulary=8192,
    data=DataConfig(),
    train=TrainConfig(
        steps=400,
        batch_size=4,
        microbatch=2,
        insertions=128,
        learning_rate=1e-3,
        warmup=20,
        clip=1.0,
        adapter_dtype="float16",
    ),
)
