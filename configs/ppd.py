"""PPD (Chen, 2024) with the settings of the thesis (section 6.1.2), and for the default model.

Prompt tokens learn the distributions of the base along its own text (4.3.2). The released code cuts each conversation
of ShareGPT at one random place within an answer and lets the base go on from there for a few tokens. Here the base
writes whole answers to the same turns, and prompt tokens stand at 64 places of each: an answer costs more to make and
teaches more often. Held-out answers are written by the base too, so accuracies, and with them the tree, are those of
decoding. Trees have the rows of Table 6.1 and are found exactly; `stripped` in place of `dynamic` builds them as the
thesis does. The thesis trains on a base in 4 bits. Clipping at 1 is the default of the trainer that its code uses.
"""

import dataclasses

from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import TrainConfig
from jaxspec.training.sources import SHAREGPT


def paper_run(model: str, rows: int, remat: bool) -> RunConfig:
    """A run as the thesis describes it, with a tree of so many rows; `remat` saves memory where the base is large."""
    return RunConfig(
        model=model,
        method=PPD(),
        tree=f"dynamic:{rows}",
        data=dataclasses.replace(SHAREGPT, max_prompt_tokens=512, template="vicuna", regenerate=True),
        train=TrainConfig(
            steps=2 * SHAREGPT.answers // 4,
            batch_size=4,
            sequence_length=1024,
            insertions=64,
            learning_rate=1e-2,
            clip=1.0,
            remat=remat,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "ppd_vicuna_7b": paper_run("lmsys/vicuna-7b-v1.3", rows=105, remat=True),
    "ppd_vicuna_13b": paper_run("lmsys/vicuna-13b-v1.3", rows=60, remat=True),
    "ppd_mobilellama_1_4b": paper_run("mtgv/MobileLLaMA-1.4B-Chat", rows=285, remat=False),
    # Trains on a laptop. The adapter that ships was made with it from the answers to 2,000 other prompts; then
    # `jaxspec tune` chose its tree.
    "ppd_smollm2": RunConfig(
        model="smollm2-135m",
        method=PPD(),
        train=TrainConfig(steps=500, batch_size=4, insertions=64, learning_rate=3e-2, eval_every=50),
    ),
}
