"""The benchmark: every method answers the same questions in turn, and every answer is kept on disk at once.

Answers are lines of JSON in Spec-Bench's own format, with more fields beside; what is computed from them, tables and
plots, is made from the files alone (see `jaxspec.bench.metrics`). A killed benchmark, or one that is asked for
more questions than before, goes on with the first question that not every method has answered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.bench.answers import Answers, answer_row
from jaxspec.bench.config import BenchConfig, check_bench, read_setting, read_written
from jaxspec.bench.overhead import measure_overhead
from jaxspec.bench.quality import score_answers
from jaxspec.bench.questions import Question, group_of, read_questions, stratified
from jaxspec.bench.ways import MethodWay, Way, parse_adapter, parse_ways
from jaxspec.decoding.divergence import Divergence, first_divergence
from jaxspec.decoding.generate import Generation
from jaxspec.errors import UserError, differences
from jaxspec.files import alone_in, known_as, writable, write_atomically
from jaxspec.machine import device_name
from jaxspec.progress import Progress
from jaxspec.training.data import Answer
from jaxspec.training.evaluate import answer_entropies, perplexity
from jaxspec.tuning.race import in_turn
from jaxspec.versions import code_version
from jaxspec.weights.load import Model

_TEMPLATE = 32  # tokens that a chat template may put around a turn


def select_questions(config: BenchConfig, model: Model) -> tuple[list[Question], list[Question]]:
    """The questions to ask, and those of the files that do not fit the base's context.

    Raises:
      UserError: an unreadable file, or no question that fits.
    """
    fit, long = [], []
    files = (read_questions(file, config.wording, config.shots) for file in config.data.split(","))
    for question in itertools.chain.from_iterable(files):
        spoken = [text for turn in question.turns for text in (turn, "")][:-1]
        room = (config.max_new_tokens + _TEMPLATE) * len(question.turns)
        fits = len(model.encode(spoken, config.chat)) + room <= model.config.max_positions
        (fit if fits else long).append(question)
    if not fit:
        raise UserError(f"no question fits the {model.config.max_positions} positions of {model.name!r}")
    return stratified(fit, config.limit), long


def converse(model: Model, way: Way, questions: Sequence[Question], config: BenchConfig, seed: int) -> list[Generation]:
    """Answer questions of as many turns and one temperature together: all first turns, then all second ones, ..."""
    sampling = config.sampling(config.temperature_of(questions[0]))
    talks: list[list[str]] = [[] for _ in questions]
    answers: list[Generation] = []
    for turn in range(len(questions[0].turns)):
        for talk, question in zip(talks, questions, strict=True):
            talk.append(question.turns[turn])
        new = way.answer(model, [model.encode(talk, config.chat) for talk in talks], config, sampling, seed)
        for talk, answer in zip(talks, new, strict=True):
            talk.append(answer.text)
        answers += new
    return answers


def batches(questions: Sequence[Question], config: BenchConfig) -> Iterator[list[Question]]:
    """Questions that can be answered together: of one group, as many turns, one temperature, at most `batch_size`."""
    groups: dict[tuple, list[Question]] = {}
    for question in questions:
        kind = (group_of(question.category), len(question.turns), config.temperature_of(question))
        group = groups.setdefault(kind, [])
        group.append(question)
        if len(group) == config.batch_size:
            yield group[:]
            group.clear()
    yield from (group for group in groups.values() if group)


def partings(
    model: Model, config: BenchConfig, question: Question, ours: Sequence[Generation], plain: Sequence[Generation],
    seed: int,
) -> list[Divergence | None]:  # fmt: skip
    """Per turn, where answers part from autoregressive decoding's, if they do, up to the first turn where they do.

    Behind it the conversations differ, and nothing that follows says anything: no entry.
    """
    talk: list[str] = []
    found: list[Divergence | None] = []
    sampling = config.sampling(config.temperature_of(question))
    for text, a, b in zip(question.turns, ours, plain, strict=True):
        talk.append(text)
        prompt = model.encode(talk, config.chat)
        found.append(first_divergence(model, prompt, a.tokens, b.tokens, sampling, seed))
        if found[-1]:
            break
        talk.append(b.text)
    return found


def run_bench(
    config: BenchConfig,
    model: Model,
    output: Path,
    say: Callable[[str], None],
    run_code: bool = False,
    perplexities: bool = False,
) -> None:
    """Ask all questions that have no answers yet, and score the answers where a question says what is right.

    Args:
      config: what and how.
      model: the base.
      output: folder for bench.json, answers/, overhead.json, scores.jsonl and perplexity.json.
      say: told what is worth a line.
      run_code: run the programs that answers to HumanEval hold.
      perplexities: of every way's answers under the base.

    Raises:
      UserError: settings that make no sense, a folder that holds another benchmark, or another process in it.
    """
    check_bench(config)
    ways = parse_ways(config, model)
    questions, long = select_questions(config, model)
    answers = Answers(output, list(ways))
    with alone_in(writable(output)):
        runs = range(1, config.repeats + 1)
        complete = all(len(rows) == len(questions) for run in runs for rows in answers.read(run).values())
        describe_bench(config, model, ways, questions, long, output, complete)
        for line in (way.info["note"] for way in ways.values() if "note" in way.info):
            say(line)
        if long:
            say(f"left out, too long for the base: {', '.join(f'{q.data} {q.id}' for q in long)}")
        _answer_all(config, model, questions, ways, answers, output)
        talks: dict[str, dict[tuple, list[list[str]]]] = {name: {} for name in ways}
        for run in runs:
            for name, rows in answers.read(run).items():
                for row in rows:
                    key = (row["data"], row["question_id"])
                    talks[name].setdefault(key, []).append(row["choices"][0]["turns"])
        if not (output / "overhead.json").exists():
            drafting = {name: way.drafter for name, way in ways.items() if isinstance(way, MethodWay) and way.drafts}
            found = {"code": code_version(), "ways": measure_overhead(model, drafting, config.batch_size)}
            write_atomically(output / "overhead.json", json.dumps(found).encode())
        texts = {way: {key: [turns[-1] for turns in runs] for key, runs in f.items()} for way, f in talks.items()}
        score_answers(texts, questions, output / "scores.jsonl", run_code, say)
        if perplexities:
            found = {way: _perplexity(model, config, questions, talks[way]) for way in ways}
            write_atomically(output / "perplexity.json", json.dumps(found).encode())


def _answer_all(
    config: BenchConfig, model: Model, questions: Sequence[Question], ways: dict[str, Way], answers: Answers,
    output: Path,
) -> None:  # fmt: skip
    """Ask every question that not every way has answered."""
    done = {run: answers.restore(run) for run in range(1, config.repeats + 1)}
    finished, total = sum(map(len, done.values())), config.repeats * len(questions)
    numbers = itertools.count(finished)
    with Progress("questions", total, "questions", finished) as progress:
        for run, before in done.items():
            left = [question for question in _shuffled(questions) if (question.data, question.id) not in before]
            for batch in batches(left, config):
                _ask(model, config, batch, ways, answers, next(numbers), run)
                finished += len(batch)
                progress.update(finished)
                _note_memory(output, ways)


def _shuffled(questions: Sequence[Question]) -> list[Question]:
    """In an order of their own, always the same: no category has a slow quarter of an hour of the machine to itself."""
    return sorted(questions, key=lambda q: hashlib.sha256(f"{q.data} {q.id}".encode()).digest())


def _perplexity(
    model: Model, config: BenchConfig, questions: Sequence[Question], talks: dict[tuple, list[list[str]]]
) -> float:
    """Of the last turns of one way's answers, under the base: {(data, id): answers by turn, one list per run}."""
    spoken = []
    for question in questions:
        for turns in talks[question.data, question.id]:
            said = [text for pair in zip(question.turns, turns, strict=True) for text in pair]
            answer = model.tokenizer.encode(said.pop(), add_special_tokens=False)
            spoken.append(Answer(model.encode(said, config.chat), answer))
    return perplexity(answer_entropies(model.base, spoken))


def _ask(
    model: Model, config: BenchConfig, batch: list[Question], ways: dict[str, Way], answers: Answers,
    number: int, run: int,
) -> None:  # fmt: skip
    """Answer a batch every way, and write the answers down once all have."""
    seed = config.seed + run - 1
    results = dict(in_turn(list(ways), lambda name: converse(model, ways[name], batch, config, seed), number))
    for name, way in ways.items():
        rows, base = [], way.own or model
        for index, question in enumerate(batch):
            ours, plain = (results[side][index :: len(batch)] for side in (name, way.reference))
            owed = way.same_text(config, config.temperature_of(question))
            parted = partings(base, config, question, ours, plain, seed) if owed else []
            rows.append(answer_row(f"{known_as(model.name)}-{name}", batch, question, ours, parted))
        answers.append(name, run, rows)


def _note_memory(output: Path, ways: dict[str, Way]) -> None:
    """The most memory that any process of this benchmark has used, and what each method holds beside the base."""
    file = output / "memory.json"
    before = read_written(file, ("peak_bytes",))["peak_bytes"] if file.exists() else 0
    found = {"peak_bytes": max(before, peak_memory()), "method_bytes": {name: way.bytes for name, way in ways.items()}}
    write_atomically(file, json.dumps(found).encode())


def describe_bench(
    config: BenchConfig, model: Model, ways: dict[str, Way], questions: Sequence[Question], long: Sequence[Question],
    output: Path, complete: bool,
) -> None:  # fmt: skip
    """Write bench.json, or check that it is the same, but for a smaller limit where questions are asked one by one.

    Args:
      config: what and how.
      model: the base.
      ways: by name.
      questions: to ask.
      long: left out.
      output: folder.
      complete: whether every answer is there, so that it no longer matters which code would give them.

    Raises:
      UserError: the folder holds another benchmark, or answers of other code and not all of them.
    """
    found, file = _description(config, model, ways, questions, long), output / "bench.json"
    if not file.exists():
        if any(not path.name.startswith(".") for path in output.iterdir()):
            raise UserError(f"{output} holds other files; give another --output")
        write_atomically(file, json.dumps(found | {"began": time.strftime("%Y-%m-%d")}, indent=1).encode())
        return
    before = read_setting(output)
    smaller = before["settings"]["limit"]
    wider = 0 < smaller < (config.limit or math.inf)  # a smaller choice of questions is part of every larger one
    if wider and config.batch_size > 1:
        raise UserError(
            f"{output} holds {smaller} questions, of batches that more questions would change: only a benchmark that "
            "asks one at a time goes on with a larger limit; give another --output"
        )
    compared = found
    if wider:
        narrow = dataclasses.replace(config, limit=smaller)
        compared = _description(narrow, model, ways, *select_questions(narrow, model))
    different = _different(_asked(before), _asked(compared))
    if different.keys() == {"code"} and not complete:
        raise UserError(
            f"{output} holds answers of another version of the code that decodes: go on with that version, or give "
            "another --output"
        )
    if not different.keys() <= {"code"}:
        raise UserError(f"{output} holds another benchmark ({'; '.join(different.values())}); give another --output")
    if wider:
        (output / "perplexity.json").unlink(missing_ok=True)  # of fewer answers
        found |= {"began": before["began"], "code": before["code"]}
        write_atomically(file, json.dumps(found, indent=1).encode())


def _description(
    config: BenchConfig, model: Model, ways: dict[str, Way], questions: Sequence[Question], long: Sequence[Question]
) -> dict[str, Any]:
    """All that answers depend on, as JSON holds it."""
    known = {field.name for field in dataclasses.fields(BenchConfig)}
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name in known}
    adapters = [parse_adapter(text) for text in config.adapters.split(",") if text]
    settings["adapters"] = ",".join(f"{method}={Path(folder).name}" for method, folder in adapters)
    settings["data"] = ",".join(Path(file).name for file in config.data.split(","))
    asked = hashlib.sha256(json.dumps([[q.data, q.id, q.turns] for q in questions]).encode()).hexdigest()[:16]
    settings["model"] = known_as(config.model)
    found = {
        "model": known_as(model.name),
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype),
        "device": device_name(),
        "settings": settings,
        "ways": {name: way.info for name, way in ways.items()},
        "questions": len(questions),
        "asked": asked,
        "left_out": [[q.data, q.id] for q in long],
        "jax": jax.__version__,
        "code": code_version(),
    }
    return json.loads(json.dumps(found))


_CALLED = {"asked": "questions", "questions": "number of questions", "left_out": "questions left out"}


def _different(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """What two descriptions differ in, in words; settings each by its name."""
    names = [name for name in now if before.get(name) != now[name]]
    words = {name: f"other {_CALLED.get(name, name)}" for name in names}
    if "settings" in words:
        words = {"settings": "; ".join(differences(before["settings"], now["settings"]))}  # the rest follows from them
    return words


def _asked(description: dict[str, Any]) -> dict[str, Any]:
    """Without what is kept for the report alone; an adapter's digest says which it is."""
    ways = {
        way: {name: v for name, v in info.items() if name != "accuracy"} for way, info in description["ways"].items()
    }
    return description | {"ways": ways}


def peak_memory() -> int:
    """Most bytes used so far: of the device where it tells, else of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
