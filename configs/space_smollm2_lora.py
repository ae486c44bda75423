"""SPACE for the embedded SmolLM2-135M-Instruct: LoRA on its own answers, a small adapter; trains on a laptop.

The masks learn the base's whole distributions instead of the paper's hard labels (equation 3): each says more than one
token does, which counts where updates are few. For the same reason all masks weigh as much as all the text before them,
where the paper counts a mask as one token (`weighting`).
"""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import SPACE
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=SPACE(objective="distillation"),
    tree="sparse:3",
    data=DataConfig(),
    train=TrainConfig(
        steps=240, batch_size=2, insertions=48, learning_rate=1e-3, warmup=10, clip=1.0, adapter_dtype="float16"
    ),
)
