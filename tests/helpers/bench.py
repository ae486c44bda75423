"""A small benchmark: its questions, adapters and settings, and what it holds."""

import jax
import pytest

import jaxspec.bench.run
from jaxspec.bench.answers import Answers
from jaxspec.bench.config import BenchConfig
from jaxspec.bench.results import load_results
from jaxspec.bench.run import run_bench
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.methods import PPD, Medusa
from tests.helpers.files import read_jsonl, write_jsonl
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
    return make_text_model(num_layers=1)


@pytest.fixture(scope="session")
def files(tmp_path_factory, model):
    """A question file, and adapters of two methods."""
    folder = tmp_path_factory.mktemp("bench")
    write_jsonl(folder / "questions.jsonl", QUESTIONS)
    for method in (PPD(), Medusa()):
        save_untrained(folder / method.name, method, model)
    return folder


@pytest.fixture(scope="session")
def finished(files, model, tmp_path_factory):
    """A folder with a whole benchmark, and what was said."""
    folder, said = tmp_path_factory.mktemp("finished") / "bench", []
    run_bench(config_of(files), model, folder, said.append)
    return folder, said


@pytest.fixture
def quickly(monkeypatch):
    """Without measuring what a step consists of, for which every drafter is compiled once more."""
    monkeypatch.setattr(jaxspec.bench.run, "measure_overhead", lambda *args: {})


def save_untrained(folder, method, model, shift=0.0):
    """An adapter as training begins with it, all of it moved by `shift`."""
    trainable = jax.tree.map(lambda x: x + shift, method.init(jax.random.key(0), model.base))
    info = {"accuracy": [[0.3, 0.2, 0.1]] * 4, "tree": [[0], [1], [0, 0]]}
    save_adapter(folder, Adapter(method, trainable, model.fingerprint, info))


def config_of(files, *runs, **changes):
    """Settings; methods take the adapters of `files`, where there are any."""
    runs = runs or ("ppd tree=chain:2", "medusa")
    folders = [files / run.split()[0] for run in runs]
    texts = [f"{run} adapter={at}" if at.exists() else run for run, at in zip(runs, folders, strict=True)]
    return BenchConfig(**({"runs": tuple(texts), "data": f"{files}/questions.jsonl", "max_new_tokens": 8} | changes))


def run(config, model, folder, **settings):
    """Ask, and read what there is then."""
    run_bench(config, model, folder, lambda line: None, **settings)
    return load_results(folder)


def texts_of(folder, way, run=1):
    """What a way said to every question, turn by turn."""
    rows = read_jsonl(Answers(folder, [way]).file(way, run))
    return {row["question_id"]: row["choices"][0]["turns"] for row in rows}


def answer_row(name, new_tokens, decode, wall, lengths, divergence=None, offered=(), accepted=(), batch=None):
    """As much of an answer's row as figures are made of.

    Args:
      name: of the question.
      new_tokens: per turn.
      decode: seconds per turn.
      wall: likewise, with prefill.
      lengths: per turn, tokens of every step.
      divergence: per turn.
      offered: per turn and depth.
      accepted: likewise.
      batch: names of the questions answered together.
    """
    choice = {
        "new_tokens": new_tokens,
        "decoding_steps": [len(turn) for turn in lengths],
        "decode_seconds": decode,
        "wall_time": wall,
        "accept_lengths": [length for turn in lengths for length in turn],
        "offered": list(offered) or [[0]] * len(new_tokens),
        "accepted": list(accepted) or [[0]] * len(new_tokens),
        "divergence": divergence or [None] * len(new_tokens),
    }
    batch = [["f", other] for other in batch or [name]]
    return {"data": "f", "question_id": name, "category": "qa", "choices": [choice], "batch": batch}
