"""SPACE (Yi et al., 2024): full fine-tuning as in the paper (4.1, A.1), and for the embedded model.

The paper trains on several sets of questions and answers. Here there is one of them, for two epochs.
"""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import SPACE
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import ANSWERED_PLATYPUS

# Questions are asked in LLaMA-2's template, which the tuned base then carries; the paper mentions none.
LLAMA2 = "llama2-short"


def paper_run(model: str, steps: int = 1562, batch_size: int = 32, template: str = "") -> RunConfig:
    """A run as sections 4.1 and A.1 describe it."""
    return RunConfig(
        model=model,
        method=SPACE(tuning="full", weighting="sums"),
        tree="chain:5",
        data=dataclasses.replace(ANSWERED_PLATYPUS, answers=25000, template=template),
        train=TrainConfig(
            steps=steps,
            batch_size=batch_size,
            microbatch=4,
            sequence_length=4096,
            insertions=1,
            learning_rate=5e-5,
            clip=1.0,
            remat=True,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "space_llama2_7b": paper_run("meta-llama/Llama-2-7b-hf", template=LLAMA2),
    "space_llama2_13b": paper_run("meta-llama/Llama-2-13b-hf", template=LLAMA2),
    "space_llama2_70b": paper_run("meta-llama/Llama-2-70b-hf", steps=390, batch_size=128, template=LLAMA2),
    "space_qwen2_7b": paper_run("Qwen/Qwen2-7B"),
    # Full fine-tuning that ends in a checkpoint of the whole base. The loss is the paper's (equations 1 to 4). The text
    # is half of the base's own answers, each seen once, where the paper takes other people's answers, twice.
    "space_smollm2": RunConfig(
        model="smollm2-135m",
        method=SPACE(tuning="full", weighting="sums"),
        tree="chain:5",
        train=TrainConfig(steps=500, batch_size=2, insertions=64, learning_rate=5e-5, warmup=10, clip=1.0),
    ),
    # LoRA on the base's own answers: a small adapter that trains on a laptop. The masks learn the base's whole
    # distributions instead of the paper's hard labels (equation 3): each says more than one token does, which counts
    # where updates are few. For the same reason all masks together weigh as much as all the text before them, where the
    # paper counts a mask as one token (`weighting`).
    "space_smollm2_lora": RunConfig(
        model="smollm2-135m",
        method=SPACE(objective="distillation"),
        tree="sparse:3",
        train=TrainConfig(
            steps=240, batch_size=2, insertions=48, learning_rate=1e-3, warmup=10, clip=1.0, adapter_dtype="int8"
        ),
    ),
}
