"""A benchmark that is ready to begin, and bench.json: the setting that a folder's answers depend on.

Only a benchmark of the same setting may add answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxspec.bench.config import BenchConfig, check_bench
from jaxspec.bench.questions import Question, read_questions, stratified
from jaxspec.bench.ways import Way, load_ways
from jaxspec.drafters import parse_drafter
from jaxspec.errors import UserError, differences
from jaxspec.files import display_name, read_json, write_json
from jaxspec.machine import device_name
from jaxspec.versions import code_version
from jaxspec.weights.model import Model

_FILE = "bench.json"
_CALLED = {"asked": "questions", "questions": "number of questions", "left_out": "questions left out"}
_WRITTEN = ("model", "fingerprint", "dtype", "device", "settings", "ways", "questions", "asked", "left_out", "jax")
_WRITTEN += ("code", "began")
_TEMPLATE = 32  # tokens that a chat template may put around a turn


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Questions, and the ways to decode that answer them.

    Attributes:
      config: the user's settings.
      model: the base.
      ways: the ways to decode by name, autoregressive decoding first.
      questions: the questions to ask.
      left_out: questions that do not fit the base's context.
    """

    config: BenchConfig
    model: Model
    ways: dict[str, Way]
    questions: Sequence[Question]
    left_out: Sequence[Question]


def prepare(config: BenchConfig, model: Model) -> Benchmark:
    """Load what is asked for. Raises UserError for settings that make no sense or do not fit the base."""
    check_bench(config)
    return Benchmark(config, model, load_ways(config, model), *select_questions(config, model))


def select_questions(config: BenchConfig, model: Model) -> tuple[list[Question], list[Question]]:
    """The questions to ask, and those of the files that do not fit the base's context.

    Raises:
      UserError: an unreadable file, or no question that fits.
    """
    fit, long = [], []
    how = (config.wording, config.shots, config.skip_placeholders)
    files = (read_questions(file, *how) for file in config.data.split(","))
    for question in itertools.chain.from_iterable(files):
        spoken = [text for turn in question.turns for text in (turn, "")][:-1]
        room = (config.max_new_tokens + _TEMPLATE) * len(question.turns)
        fits = len(model.encode(spoken, config.chat)) + room <= model.config.max_positions
        (fit if fits else long).append(question)
    if not fit:
        raise UserError(f"no question fits the {model.config.max_positions} positions of {model.name!r}")
    return stratified(fit, config.limit), long


def read_setting(folder: Path) -> dict[str, Any]:
    """Read bench.json. Raises UserError where there is none, or one of another version."""
    file = folder / _FILE
    if not file.exists():
        raise UserError(f"{folder}: no benchmark there ({_FILE} is missing)")
    setting = read_json(file, _WRITTEN)
    if not isinstance(setting["settings"], dict):
        raise UserError(f"{file}: not what a benchmark writes (settings is {setting['settings']!r})")
    known, found = (flatten_dict(s, sep=".").keys() for s in (dataclasses.asdict(BenchConfig()), setting["settings"]))
    if known != found:
        raise UserError(f"{file}: of another version of this program ({', '.join(sorted(known ^ found))})")
    return setting


def claim_folder(benchmark: Benchmark, folder: Path, complete: bool) -> None:
    """Write bench.json, or check that it is the same, except for a smaller limit where questions are asked one by one.

    Args:
      benchmark: the benchmark.
      folder: its folder.
      complete: whether all answers are there, so that the version of the code no longer matters.

    Raises:
      UserError: the folder holds another benchmark, or some answers of other code.
    """
    now, file = describe(benchmark), folder / _FILE
    if not file.exists():
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(f"{folder} holds other files; give another --output")
        write_json(file, now | {"began": time.strftime("%Y-%m-%d")})
        return
    before = read_setting(folder)
    limit = before["settings"]["limit"]
    # A smaller choice of questions is part of every larger one.
    wider = 0 < limit < (benchmark.config.limit or math.inf)
    if wider and benchmark.config.batch_size > 1:
        raise UserError(
            f"{folder} holds {limit} questions, in batches that more questions would change: give another --output"
        )
    narrowed = benchmark
    if wider:
        config = dataclasses.replace(benchmark.config, limit=limit)
        questions = select_questions(config, benchmark.model)[0]
        narrowed = dataclasses.replace(benchmark, config=config, questions=questions)
    different = _differences(before, describe(narrowed))
    if different.keys() == {"code"} and not complete:
        raise UserError(
            f"{folder} holds answers of another version of the code ({before['code']}): resume with that version, or "
            "give another --output"
        )
    if not different.keys() <= {"code"}:
        raise UserError(f"{folder} holds another benchmark ({'; '.join(different.values())}); give another --output")
    if wider:
        (folder / "perplexity.json").unlink(missing_ok=True)  # of fewer answers
        kept = {name: before[name] for name in ("began", "code")}
        write_json(file, now | kept)


def describe(benchmark: Benchmark) -> dict[str, Any]:
    """The settings that answers depend on, as plain values for JSON; files and folders by name only."""
    config, model = benchmark.config, benchmark.model
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(BenchConfig)}
    settings |= {
        "runs": [parse_drafter(text).text for text in config.runs],
        "data": ",".join(Path(file).name for file in config.data.split(",")),
        "model": display_name(config.model),
        "mesh": dataclasses.asdict(config.mesh),
    }
    asked = json.dumps([[q.data, q.id, q.turns] for q in benchmark.questions]).encode()
    found = {
        "model": display_name(model.name),
        "fingerprint": model.fingerprint,
        "dtype": model.precision,
        "device": device_name(),
        "settings": settings,
        "ways": {name: way.info for name, way in benchmark.ways.items()},
        "questions": len(benchmark.questions),
        "asked": hashlib.sha256(asked).hexdigest()[:16],
        "left_out": [[q.data, q.id] for q in benchmark.left_out],
        "jax": jax.__version__,
        "code": code_version(),
    }
    return json.loads(json.dumps(found))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The differences of two settings in words, by name; accuracies, which only the report shows, are ignored."""
    before, now = (
        setting | {"ways": {name: way | {"accuracy": None} for name, way in setting["ways"].items()}}
        for setting in (before, now)
    )
    if before["settings"] != now["settings"]:  # the rest follows from them
        return {"settings": "; ".join(differences(before["settings"], now["settings"]))}
    return {name: f"other {_CALLED.get(name, name)}" for name in now if before.get(name) != now[name]}
