"""PPD (Chen, 2024) with the settings of the thesis (section 6.1.2), and for the embedded model."""

import dataclasses

from jaxspec.config import TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from jaxspec.training.sources import SHAREGPT


def paper_run(model: str, remat: bool) -> RunConfig:
    """A run as the thesis describes it; `remat` saves memory where the base is large."""
    return RunConfig(
        model=model,
        method=PPD(),
        data=dataclasses.replace(SHAREGPT, answers=50000, template="vicuna"),
        train=TrainConfig(
            steps=25000, batch_size=4, sequence_length=1024, insertions=64, learning_rate=1e-2, remat=remat
        ),
    )


RUNS: dict[str, RunConfig] = {
    "ppd_vicuna_7b": paper_run("lmsys/vicuna-7b-v1.3", remat=True),
    "ppd_vicuna_13b": paper_run("lmsys/vicuna-13b-v1.3", remat=True),
    "ppd_mobilellama_1_4b": paper_run("mtgv/MobileLLaMA-1.4B-Chat", remat=False),
    # Trains on a laptop. The adapter that ships was made with it from the answers to 2,000 other prompts; `tune.py`
    # then chose its tree.
    "ppd_smollm2": RunConfig(
        model="smollm2-135m",
        method=PPD(),
        train=TrainConfig(steps=500, batch_size=4, insertions=64, learning_rate=3e-2, eval_every=50),
    ),
}
