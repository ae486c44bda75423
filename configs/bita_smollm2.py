"""BiTA for the embedded SmolLM2-135M-Instruct: trains on a laptop, by distillation.

The adapter that ships was made with it from the answers to 2,000 other prompts, but its masks started as N(0, 0.02),
from which two of three short trainings lost some; `tune.py` then chose its tree.
"""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import BiTA
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=BiTA(objective="distillation", initial="text"),
    data=DataConfig(),
    train=TrainConfig(steps=800, batch_size=4, insertions=64, learning_rate=3e-2, warmup=20, clip=1.0, eval_every=100),
)
