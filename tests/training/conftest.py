"""A tiny model and a short run of it."""

import json

import pytest

from jaxspec.config import DataConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="module")
def model():
    return make_text_model()


@pytest.fixture
def config(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(12)))
    return RunConfig(
        model="tiny-text",
        method=PPD(ensemble=2),
        data=DataConfig(
            prompts=str(prompts), answers=8, held_out=3, max_prompt_tokens=16, max_answer_tokens=24,
            held_out_tokens=24, batch_size=4, cache=str(tmp_path / "cache"),
        ),
        train=TrainConfig(
            steps=12, batch_size=2, sequence_length=40, insertions=8, save_every=4, eval_every=6, learning_rate=3e-2
        ),
    )  # fmt: skip
