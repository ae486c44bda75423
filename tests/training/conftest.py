"""A tiny model, a short run of it, and what that run leaves."""

import pytest

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from jaxspec.training.trainer import Trainer
from tests.helpers.tiny import make_text_model
from tests.helpers.training import write_jsonl


@pytest.fixture(scope="session")
def model():
    return make_text_model()


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """Its answers are made once."""
    folder = tmp_path_factory.mktemp("text")
    prompts = write_jsonl(folder / "prompts.jsonl", ({"prompt": f"question {i}"} for i in range(12)))
    return RunConfig(
        model="tiny-text",
        method=PPD(ensemble=2),
        data=DataConfig(
            prompts=prompts, answers=8, held_out=3, max_prompt_tokens=16, max_answer_tokens=24,
            held_out_tokens=24, batch_size=4, cache=str(folder / "cache"),
        ),
        train=TrainConfig(
            steps=12, batch_size=2, sequence_length=40, insertions=8, save_every=4, eval_every=5, learning_rate=3e-2
        ),
    )  # fmt: skip


@pytest.fixture(scope="session")
def whole(config, model, tmp_path_factory):
    """The folder of the undisturbed run, not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    Trainer(config, model, folder, resume=False).run()
    return folder
