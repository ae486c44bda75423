"""PPD for the embedded SmolLM2-135M-Instruct: trains on a laptop.

The adapter that ships was made with it from the answers to 2,000 other prompts; `tune.py` then chose its tree.
"""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=PPD(),
    data=DataConfig(),
    train=TrainConfig(steps=500, batch_size=4, insertions=64, learning_rate=3e-2, eval_every=50),
)
