"""Hidden Transfer for the embedded SmolLM2-135M-Instruct: trains on a laptop, all maps at once.

The adapter that ships was made with it from the answers to 2,000 other prompts; `tune.py` then chose its tree.
"""

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import HiddenTransfer
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.shapes import SMOLLM2_135M

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=SMOLLM2_135M,
    method=HiddenTransfer(layers=(10, 14, 18), training="joint"),
    data=DataConfig(),
    train=TrainConfig(
        steps=1000, batch_size=2, insertions=128, learning_rate=7e-3, warmup=20, clip=1.0, eval_every=100
    ),
)
