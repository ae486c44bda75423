"""Hidden Transfer (Wu et al., 2024) with the paper's settings as far as they are published, and for the default model.

Maps are trained as in 3.3: at every position of prompt and answer, where pseudo states see real ones. The direction of
its divergence is open (see `HiddenTransfer`); it is the default. Section 4.2 makes one epoch of ShareGPT, here one per
map. Length, learning rate, batch and tree are not published: the length is that of the other papers on ShareGPT, the
others are ours.
"""

import dataclasses

from jaxspec.methods import HiddenTransfer
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import TrainConfig
from jaxspec.training.sources import SHAREGPT

LAYERS_7B = (15, 20, 25)  # section 4.4; the third is our own
LAYERS_13B = (25, 30, 35)  # section 4.1


def paper_run(model: str, layers: tuple[int, ...], template: str = "") -> RunConfig:
    """A run as sections 3.3 and 4 describe it, with maps before these layers."""
    return RunConfig(
        model=model,
        method=HiddenTransfer(layers=layers, train_visibility="real"),
        tree="sparse:64",
        data=dataclasses.replace(SHAREGPT, template=template),
        train=TrainConfig(
            steps=len(layers) * SHAREGPT.answers // 4,
            batch_size=4,
            microbatch=1,
            sequence_length=2048,
            insertions=2048,
            positions="text",
            learning_rate=1e-3,
            remat=True,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "hidden_transfer_llama2_7b": paper_run("meta-llama/Llama-2-7b-chat-hf", LAYERS_7B),
    "hidden_transfer_llama2_13b": paper_run("meta-llama/Llama-2-13b-chat-hf", LAYERS_13B),
    "hidden_transfer_vicuna_7b": paper_run("lmsys/vicuna-7b-v1.3", LAYERS_7B, template="vicuna"),
    "hidden_transfer_vicuna_13b": paper_run("lmsys/vicuna-13b-v1.3", LAYERS_13B, template="vicuna"),
    # Trains on a laptop, all maps at once. The adapter that ships was made with it from the answers to 2,000 other
    # prompts; `jaxspec tune` then chose its tree.
    "hidden_transfer_smollm2": RunConfig(
        model="smollm2-135m",
        method=HiddenTransfer(layers=(10, 14, 18), training="joint"),
        train=TrainConfig(
            steps=1000, batch_size=2, insertions=128, learning_rate=7e-3, warmup=20, clip=1.0, eval_every=100
        ),
    ),
}
