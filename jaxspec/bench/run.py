"""The benchmark: all ways answer the same questions in turn, and every answer is written to disk at once.

Tables and plots are made from these files alone (see `jaxspec.bench.results`). An interrupted benchmark, or one with
more questions than before, resumes with the first question that not all ways have answered.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.answers import Answers, answer_row, question_of
from jaxspec.bench.config import BenchConfig
from jaxspec.bench.quality import Talks, score_answers
from jaxspec.bench.questions import Question, group_of
from jaxspec.bench.setting import Benchmark, claim_folder, prepare
from jaxspec.bench.ways import Way
from jaxspec.drafters.drafter import Drafter
from jaxspec.files import display_name, exclusive, read_json, writable, write_json
from jaxspec.generation.divergence import Divergence, first_divergence
from jaxspec.generation.generate import Generation
from jaxspec.machine import make_room_for_programs
from jaxspec.progress import Progress
from jaxspec.training.data import AnsweredPrompt
from jaxspec.training.evaluate import answer_entropies, perplexity
from jaxspec.tuning.latency import bare, step_times
from jaxspec.tuning.memory import peak_memory
from jaxspec.tuning.race import in_turn
from jaxspec.versions import code_version
from jaxspec.weights.model import Model

CACHE, ROUNDS = 512, 9  # slots and measurements, where the parts of a step are timed


def run_bench(
    config: BenchConfig,
    model: Model,
    output: Path,
    say: Callable[[str], None],
    run_code: bool = False,
    perplexities: bool = False,
) -> None:
    """Ask all questions that have no answers yet, and score the answers to questions that can be scored.

    Args:
      config: the settings.
      model: the base.
      output: folder for bench.json, answers/, overhead.json, scores.jsonl and perplexity.json.
      say: called with a line about each event.
      run_code: run the programs that answers to HumanEval hold.
      perplexities: also measure the perplexity of every way's answers under the base.

    Raises:
      UserError: settings that make no sense, or a folder that holds another benchmark or is in use.
    """
    benchmark = prepare(config, model)
    answers, runs = Answers(output, list(benchmark.ways)), range(1, config.repeats + 1)
    with exclusive(writable(output)):
        complete = all(len(rows) == len(benchmark.questions) for run in runs for rows in answers.read(run).values())
        claim_folder(benchmark, output, complete)
        for name, way in benchmark.ways.items():
            if "note" in way.info:
                say(f"{name}: {way.info['note']}")
        if benchmark.left_out:
            say(f"left out, too long for the base: {', '.join(f'{q.data} {q.id}' for q in benchmark.left_out)}")
        _ask_all(benchmark, answers, output)
        _write_overhead(benchmark, output / "overhead.json")
        talks = _read_talks(benchmark, answers)
        score_answers(talks, benchmark.questions, output / "scores.jsonl", run_code, say)
        if perplexities:
            found = {way: _perplexity(benchmark, talks[way]) for way in benchmark.ways}
            write_json(output / "perplexity.json", found)


def shuffled(questions: Sequence[Question]) -> list[Question]:
    """Questions in a fixed random order: a slow phase of the machine hits all categories alike."""
    return sorted(questions, key=lambda q: hashlib.sha256(f"{q.data} {q.id}".encode()).digest())


def _ask_all(benchmark: Benchmark, answers: Answers, output: Path) -> None:
    """Ask every question that not all ways have answered."""
    config = benchmark.config
    done = {run: answers.restore(run) for run in range(1, config.repeats + 1)}
    finished, total = sum(map(len, done.values())), config.repeats * len(benchmark.questions)
    numbers = itertools.count(finished)
    with Progress("questions", total, "questions", finished) as progress:
        for run, answered in done.items():
            left = [q for q in shuffled(benchmark.questions) if (q.data, q.id) not in answered]
            for batch in batches(left, config):
                ask(benchmark, batch, answers, next(numbers), run)
                finished += len(batch)
                progress.update(finished)
                _note_memory(output / "memory.json", benchmark.ways)
                make_room_for_programs()


def ask(benchmark: Benchmark, batch: Sequence[Question], answers: Answers, number: int, run: int) -> None:
    """Answer a batch in every way, and write the answers once all are complete.

    Args:
      benchmark: the ways and the settings.
      batch: questions that are answered together.
      answers: the files to write to.
      number: number of the batch, which decides the order of the ways.
      run: 1 for the first of several repeats.
    """
    config, ways = benchmark.config, benchmark.ways
    seed = config.seed + run - 1
    talks = {name: functools.partial(converse, way, batch, config, seed) for name, way in ways.items()}
    found = dict(in_turn(talks, number))
    for name, way in ways.items():
        rows = []
        for index, question in enumerate(batch):
            ours, plain = (found[side][index :: len(batch)] for side in (name, way.reference))
            compared = way.same_text(config.temperature_of(question))
            different = divergences(way, question, ours, plain, config, seed) if compared else []
            rows.append(answer_row(f"{display_name(benchmark.model.name)}-{name}", batch, question, ours, different))
        answers.append(name, run, rows)


def batches(questions: Sequence[Question], config: BenchConfig) -> Iterator[list[Question]]:
    """Batches of questions that can be answered together: at most `batch_size` of one group, one temperature and
    the same number of turns.
    """
    groups: dict[tuple, list[Question]] = {}
    for question in questions:
        kind = (group_of(question.category), len(question.turns), config.temperature_of(question))
        groups.setdefault(kind, []).append(question)
        if len(groups[kind]) == config.batch_size:
            yield groups.pop(kind)
    yield from groups.values()


def converse(way: Way, questions: Sequence[Question], config: BenchConfig, seed: int) -> list[Generation]:
    """Answer questions with the same number of turns and one temperature together.

    Returns:
      The answers to all first turns, then those to all second ones, and so on.
    """
    sampling = config.sampling(config.temperature_of(questions[0]))
    talks: list[list[str]] = [[] for _ in questions]
    answers: list[Generation] = []
    for turns in zip(*(question.turns for question in questions), strict=True):
        for talk, turn in zip(talks, turns, strict=True):
            talk.append(turn)
        said = way.answer(
            [way.model.encode(talk, config.chat) for talk in talks], config.max_new_tokens, sampling, seed
        )
        for talk, answer in zip(talks, said, strict=True):
            talk.append(answer.text)
        answers += said
    return answers


def divergences(
    way: Way,
    question: Question,
    ours: Sequence[Generation],
    plain: Sequence[Generation],
    config: BenchConfig,
    seed: int,
) -> list[Divergence | None]:
    """The first divergence of each turn from autoregressive decoding, up to the first turn that has one.

    After that turn the conversations differ, so later turns cannot be compared and have no entry.

    Args:
      way: the way that gave the answers.
      question: the question.
      ours: its answers, turn by turn.
      plain: those of autoregressive decoding on the same base.
      config: the benchmark's settings.
      seed: sampling seed of both.
    """
    talk: list[str] = []
    found: list[Divergence | None] = []
    sampling = config.sampling(config.temperature_of(question))
    for text, answer, reference in zip(question.turns, ours, plain, strict=True):
        talk.append(text)
        prompt = way.model.encode(talk, config.chat)
        decoded = (answer.tokens, reference.tokens)
        found.append(first_divergence(way.model, prompt, *decoded, sampling, seed, config.max_new_tokens))
        if found[-1]:
            break
        talk.append(reference.text)
    return found


def _note_memory(file: Path, ways: dict[str, Way]) -> None:
    """Write the peak memory of this benchmark's processes, and the bytes of each way in addition to the base."""
    before = read_json(file, ("peak_bytes",))["peak_bytes"] if file.exists() else 0
    memory = {"peak_bytes": max(before, peak_memory()), "method_bytes": {name: way.bytes for name, way in ways.items()}}
    write_json(file, memory)


def _write_overhead(benchmark: Benchmark, file: Path) -> None:
    """Measure the parts of every method's step, once; not where steps have one of several sizes."""
    if not file.exists():
        drafters = {
            name: way.drafter
            for name, way in benchmark.ways.items()
            if way.drafter and way.drafter.drafts and way.drafter.device_shape.costs is None
        }
        measured = measure_overhead(benchmark.model, drafters, benchmark.config.batch_size)
        write_json(file, {"code": code_version(), "ways": measured})


def measure_overhead(model: Model, drafters: dict[str, Drafter], batch_size: int) -> dict[str, dict[str, float]]:
    """Time greedy steps of every method, of its tree's nodes without drafting, and of one node, in turn.

    Args:
      model: the base.
      drafters: the drafters by name, autoregressive decoding left out.
      batch_size: B.

    Returns:
      {name: {`nodes` and `rows` of the step, seconds of one node alone (`plain`), of all nodes without drafting
      (`verifying`), and of the step (`whole`)}}.
    """
    if not drafters:
        return {}
    steps: dict[Any, Drafter] = {"plain": bare(model, 1)}  # a base of a method's own is as fast
    for name, drafter in drafters.items():
        steps |= {(name, "whole"): drafter, (name, "verifying"): bare(drafter.model, drafter.num_nodes)}
    seconds = step_times(steps, CACHE, ROUNDS, batch_size)
    found = {}
    for name, drafter in drafters.items():
        parts = {"plain": seconds["plain"], "verifying": seconds[name, "verifying"], "whole": seconds[name, "whole"]}
        found[name] = {"nodes": drafter.num_nodes, "rows": drafter.num_rows} | parts
    return found


def _read_talks(benchmark: Benchmark, answers: Answers) -> dict[str, Talks]:
    """The answers of every way."""
    talks: dict[str, Talks] = {name: {} for name in benchmark.ways}
    for run in range(1, benchmark.config.repeats + 1):
        for name, rows in answers.read(run).items():
            for row in rows:
                talks[name].setdefault(question_of(row), []).append(row["choices"][0]["turns"])
    return talks


def _perplexity(benchmark: Benchmark, talks: Talks) -> float:
    """The perplexity of the last turns of one way's answers under the base."""
    model, spoken = benchmark.model, []
    for question in benchmark.questions:
        for turns in talks[question.data, question.id]:
            said = [text for pair in zip(question.turns, turns, strict=True) for text in pair]
            answer = model.encode_plain(said.pop())
            spoken.append(AnsweredPrompt(model.encode(said, benchmark.config.chat), answer))
    return perplexity(answer_entropies(model.base, spoken))
