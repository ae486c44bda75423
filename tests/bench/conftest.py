"""A tiny model, questions and adapters, and a whole benchmark of them."""

import json

import jax
import pytest

from jaxspec.bench.run import run_bench
from jaxspec.drafting.adapter import Adapter, save_adapter
from jaxspec.methods import PPD, Medusa
from tests.helpers.bench import config_of
from tests.helpers.tiny import make_text_model

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "math", "turns": ["2+2", "3+3"]},
    {"question_id": 3, "category": "qa", "turns": ["Who?"]},
    {"question_id": 4, "category": "rag", "turns": ["Where is it?"]},
    {"question_id": 5, "category": "qa", "turns": ["Why " * 80]},
]


@pytest.fixture(scope="session")
def model():
    return make_text_model()


@pytest.fixture(scope="session")
def files(tmp_path_factory, model):
    """A question file, and adapters of two methods."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    info = {"accuracy": [[0.3, 0.2, 0.1]] * 4, "tree": [[0], [1], [0, 0]]}
    for method in (PPD(), Medusa()):
        trainable = method.init(jax.random.key(0), model.base)
        save_adapter(folder / method.name, Adapter(method, trainable, model.fingerprint, info))
    return folder


@pytest.fixture(scope="session")
def finished(files, model, tmp_path_factory):
    """A folder with a whole benchmark, and what was said."""
    folder, said = tmp_path_factory.mktemp("finished") / "bench", []
    run_bench(config_of(files), model, folder, said.append)
    return folder, said
