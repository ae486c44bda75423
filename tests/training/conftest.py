"""Tiny models, a short run of it, and what that run leaves."""

import dataclasses

import pytest

from jaxspec.methods import PPD
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.training.trainer import Trainer
from jaxspec.weights.shapes import SHAPES
from tests.helpers.files import write_jsonl
from tests.helpers.tiny import TINY, TINY_TEXT, make_tiny, make_tokenizer

SHAPES["shallow-text"] = dataclasses.replace(TINY_TEXT, num_layers=2)  # which compiles faster


@pytest.fixture(scope="session")
def tiny():
    """Over a vocabulary of 16."""
    return make_tiny(dataclasses.replace(TINY, num_layers=2), seed=1)


@pytest.fixture(scope="session")
def model():
    """With a tokenizer."""
    tokenizer = make_tokenizer()
    base = make_tiny(SHAPES["shallow-text"], (tokenizer.eos_token_id,))
    return dataclasses.replace(base, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """Its answers are made once."""
    folder = tmp_path_factory.mktemp("text")
    prompts = write_jsonl(folder / "prompts.jsonl", ({"prompt": f"question {i}"} for i in range(12)))
    return RunConfig(
        model="shallow-text",
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
