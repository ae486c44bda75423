"""Hidden Transfer for LLaMA-2-7B-chat, layers as in 4.4, the third our own.

Maps are trained as in 3.3, which lets pseudo states see real ones and prints KL(pseudo || base). As many turns of
ShareGPT per map as it has conversations, of which section 4.2 makes one epoch. Learning rate, batch, points per answer
and tree are not published; these are ours.
"""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import HiddenTransfer
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT
from jaxspec.weights.shapes import LLAMA2_7B

CONFIG = RunConfig(
    model="meta-llama/Llama-2-7b-chat-hf",
    shapes=LLAMA2_7B,
    method=HiddenTransfer(layers=(15, 20, 25), train_visibility="real", direction="reverse"),
    tree="sparse:64",
    data=dataclasses.replace(SHAREGPT, answers=70000),
    train=TrainConfig(steps=52500, batch_size=4, sequence_length=1024, insertions=256, learning_rate=1e-3, remat=True),
)
