"""The benchmark: every method answers the same questions in turn, and every answer is kept on disk at once.

Answers are lines of JSON in Spec-Bench's own format, with more fields beside; what is computed from them, tables and
plots, is made from the files alone (see `jaxspec.evaluation.metrics`). A killed benchmark goes on with the first
question that not every method has answered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, Match
from jaxspec.decoding.generate import Generation, generate
from jaxspec.decoding.loop import Drafter
from jaxspec.decoding.sampling import make_sampler
from jaxspec.errors import UserError
from jaxspec.evaluation.answers import Answers, answer_row
from jaxspec.evaluation.compare import Divergence, first_divergence
from jaxspec.evaluation.quality import score_answers
from jaxspec.evaluation.questions import MT_BENCH, Question, group_of, read_questions, stratified
from jaxspec.evaluation.race import in_turn
from jaxspec.files import writable, write_atomically
from jaxspec.machine import device_name
from jaxspec.methods import METHODS
from jaxspec.methods.adapter import adapter_plan, find_shipped, load_method, make_drafter, open_adapter, plain_drafter
from jaxspec.methods.tuned import load_tuned
from jaxspec.model.hf import read_json
from jaxspec.model.load import DEFAULT_MODEL, Model
from jaxspec.progress import Progress
from jaxspec.tree.plan import plan_to_json

REFERENCE = "autoregressive"
_TEMPLATE = 32  # tokens that a chat template may put around a turn
_WAY = re.compile(r"(?P<method>\w+)(=(?P<tree>[^@]+))?(@(?P<vocabulary>\d+))?")


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What to ask, and how.

    Attributes:
      methods: METHOD, METHOD=TREE or METHOD=TREE@DRAFT-VOCABULARY with commas between; a tree of `auto` is what
        tune.py chose. Autoregressive decoding always runs; named twice it races itself. Default: every method with an
        adapter that ships for the base.
      data: question files with commas between.
      adapters: METHOD=FOLDER with commas between, where not the adapters that ship.
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, a base that train.py or export.py made,
        or a GGUF file.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      limit: questions, as many of every category as of any other; 0 is all.
      max_new_tokens: per turn.
      batch_size: questions answered together.
      temperature: of sampling; 0 is greedy.
      mt_bench_temperatures: sample MT-Bench's categories each at its own temperature, 0 to 0.7.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens up to this probability.
      min_p: drop tokens less probable than this fraction of the best.
      accept: match, rejection or typical, as for decode.py: the same text, another of the same distribution, or lossy.
      seed: of the first run's sampling; every further run takes the next.
      repeats: runs over all questions.
      chat: ask inside the tokenizer's chat template, where it has one.
    """

    methods: str = ""
    data: str = ""
    adapters: str = ""
    model: str = DEFAULT_MODEL
    dtype: str = ""
    limit: int = 0
    max_new_tokens: int = 128
    batch_size: int = 1
    temperature: float = 0.0
    mt_bench_temperatures: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    accept: Literal["match", "rejection", "typical"] = "match"
    seed: int = 0
    repeats: int = 1
    chat: bool = True

    def sampling(self, temperature: float) -> SamplingConfig:
        """How answers are drawn at a temperature."""
        return SamplingConfig(temperature, self.top_k, self.top_p, self.min_p)

    def same_text(self, question: Question) -> bool:
        """Whether every method owes the text of autoregressive decoding."""
        return ACCEPTANCES[self.accept]().same_text(self.temperature_of(question))

    def temperature_of(self, question: Question) -> float:
        """The temperature a question is answered at."""
        return MT_BENCH.get(question.category, self.temperature) if self.mt_bench_temperatures else self.temperature


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
      name: as the user wrote it.
      drafter: method, adapter and tree.
      info: adapter, tree and draft vocabulary, as plain values; `reference`, the way it is compared with.
    """

    name: str
    drafter: Drafter
    info: dict[str, Any]

    @property
    def reference(self) -> str:
        """The way that decodes the same base autoregressively."""
        return self.info.get("reference", REFERENCE)


def check_bench(config: BenchConfig) -> None:
    """Raise UserError for settings that make no sense, before anything is loaded."""
    for name, least in {"limit": 0, "max_new_tokens": 2, "batch_size": 1, "repeats": 1}.items():
        if getattr(config, name) < least:
            raise UserError(f"{name.replace('_', '-')} must be at least {least}, got {getattr(config, name)}")
    make_sampler(config.sampling(config.temperature))
    if not config.data:
        raise UserError("give question files with --data FILE[,FILE]")
    names = [Path(file).name for file in config.data.split(",")]
    if len(set(names)) < len(names):
        raise UserError(f"question files must have different names, got {', '.join(names)}")


def parse_ways(config: BenchConfig, model: Model) -> dict[str, Way]:
    """The ways to compare by name, autoregressive decoding first.

    Raises:
      UserError: what `methods` or `adapters` say cannot be read or does not fit the base.
    """
    adapters = dict(_pair(text) for text in config.adapters.split(",") if text)
    shipped = [name for name in METHODS if name in adapters or find_shipped(name, model.fingerprint)]
    texts = re.split(r",\s*(?=[a-z_])", config.methods) if config.methods else shipped  # commas in a tree: numbers
    plain = load_method(REFERENCE, model)
    ways, used = {REFERENCE: Way(REFERENCE, plain, {})}, set()
    for text in map(str.strip, texts):
        match = _WAY.fullmatch(text)
        if not match:
            raise UserError(f"method {text!r}: expected METHOD, METHOD=TREE or METHOD=TREE@DRAFT-VOCABULARY")
        if text == REFERENCE in used:
            ways[f"{REFERENCE} again"] = Way(f"{REFERENCE} again", plain, {})
        elif text != REFERENCE:
            way = _way(text, model, config, adapters.get(match["method"]), **match.groupdict())
            if way.drafter.own:  # it owes the text of the base that it has tuned
                plain_own = Way(way.reference, plain_drafter(way.drafter.own), {"reference": way.reference})
                ways.setdefault(way.reference, plain_own)
            ways[text] = way
        used.add(match["method"])
    if adapters.keys() - used:
        raise UserError(f"adapters: {', '.join(sorted(adapters.keys() - used))} is not among the methods")
    return ways


def _pair(text: str) -> tuple[str, str]:
    method, equals, folder = text.partition("=")
    if not equals or method not in METHODS:
        raise UserError(f"adapters: expected METHOD=FOLDER, got {text!r}")
    return method, folder


def _way(
    name: str, model: Model, config: BenchConfig, folder: str | None, method: str, tree: str | None,
    vocabulary: str | None,
) -> Way:  # fmt: skip
    _, adapter = open_adapter(method, model, folder)
    if tree == "auto":
        if vocabulary:
            raise UserError(f"method {name!r}: a tree of auto brings its own draft vocabulary")
        tuning = {"batch_size": config.batch_size, "temperature": config.temperature}
        drafter, line = load_tuned(method, model, folder, **tuning)
        count = 0 if drafter.draft_vocabulary is None else len(drafter.draft_vocabulary.ids)
        info = {"tree": line, "note": f"{name}: {line}"}
    else:
        plan = adapter_plan(adapter, tree)
        count = adapter.info.get("draft_vocabulary", 0) if vocabulary is None else int(vocabulary)
        drafter, info = make_drafter(adapter, plan, model, count), {"tree": plan_to_json(plan)}
    info |= {"adapter": adapter.digest, "draft_vocabulary": count, "rows": drafter.num_rows}
    return Way(name, drafter, info | ({"reference": f"{REFERENCE}, base of {method}"} if drafter.own else {}))


def select_questions(config: BenchConfig, model: Model) -> tuple[list[Question], list[Question]]:
    """The questions to ask, and those of the files that do not fit the base's context.

    Raises:
      UserError: an unreadable file, or no question that fits.
    """
    fit, long = [], []
    for question in (question for file in config.data.split(",") for question in read_questions(file)):
        spoken = [text for turn in question.turns for text in (turn, "")][:-1]
        room = (config.max_new_tokens + _TEMPLATE) * len(question.turns)
        fits = len(model.encode(spoken, config.chat)) + room <= model.config.max_positions
        (fit if fits else long).append(question)
    if not fit:
        raise UserError(f"no question fits the {model.config.max_positions} positions of {model.name!r}")
    return stratified(fit, config.limit), long


def converse(
    model: Model, drafter: Drafter, questions: Sequence[Question], config: BenchConfig, seed: int
) -> list[Generation]:
    """Answer questions of as many turns and one temperature together: all first turns, then all second ones, ..."""
    # Who drafts nothing has nothing to accept, and its own text is the base's, whatever the rule.
    acceptance = ACCEPTANCES[config.accept]() if drafter.tree.max_depth else Match()
    sampling = config.sampling(config.temperature_of(questions[0]))
    talks: list[list[str]] = [[] for _ in questions]
    answers: list[Generation] = []
    for turn in range(len(questions[0].turns)):
        for talk, question in zip(talks, questions, strict=True):
            talk.append(question.turns[turn])
        prompts = [model.encode(talk, config.chat) for talk in talks]
        settings = {"sampling": sampling, "seed": seed, "acceptance": acceptance}
        new = generate(model, drafter, prompts, config.max_new_tokens, batch_size=len(prompts), **settings)
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
    config: BenchConfig, model: Model, output: Path, say: Callable[[str], None], run_code: bool = False
) -> None:
    """Ask all questions that have no answers yet, and score the answers where a question says what is right.

    Args:
      config: what and how.
      model: the base.
      output: folder for bench.json, answers/ and scores.jsonl.
      say: told what is worth a line.
      run_code: run the programs that answers to HumanEval hold.

    Raises:
      UserError: settings that make no sense, or a folder that holds another benchmark.
    """
    check_bench(config)
    ways = parse_ways(config, model)
    questions, long = select_questions(config, model)
    describe_bench(config, model, ways, questions, long, output)
    for line in (way.info["note"] for way in ways.values() if "note" in way.info):
        say(line)
    if long:
        say(f"left out, too long for the base: {', '.join(f'{q.data} {q.id}' for q in long)}")
    answers = Answers(output, list(ways))
    done = {run: answers.restore(run) for run in range(1, config.repeats + 1)}
    finished, total = sum(map(len, done.values())), config.repeats * len(questions)
    with Progress("questions", total, "questions", finished) as progress:
        for run, before in done.items():
            left = [question for question in questions if (question.data, question.id) not in before]
            for batch in batches(left, config):
                number = run * len(questions) + questions.index(batch[0])
                _ask(model, config, batch, ways, answers, number, run)
                finished += len(batch)
                progress.update(finished)
                _note_memory(output, ways)
    texts: dict[str, dict[tuple, list[str]]] = {name: {} for name in ways}
    for run in done:
        for name, rows in answers.read(run).items():
            for row in rows:
                key = (row["data"], row["question_id"])
                texts[name].setdefault(key, []).append(row["choices"][0]["turns"][-1])
    score_answers(texts, questions, output / "scores.jsonl", run_code, say)


def _ask(
    model: Model, config: BenchConfig, batch: list[Question], ways: dict[str, Way], answers: Answers,
    number: int, run: int,
) -> None:  # fmt: skip
    """Answer a batch every way, and write the answers down once all have."""
    seed = config.seed + run - 1
    results = dict(in_turn(list(ways), lambda name: converse(model, ways[name].drafter, batch, config, seed), number))
    for name, way in ways.items():
        rows, base = [], way.drafter.own or model
        for index, question in enumerate(batch):
            ours, plain = (results[side][index :: len(batch)] for side in (name, way.reference))
            parted = partings(base, config, question, ours, plain, seed) if config.same_text(question) else []
            rows.append(answer_row(f"{model.name}-{name}", batch, question, ours, parted))
        answers.append(name, run, rows)


def _note_memory(output: Path, ways: dict[str, Way]) -> None:
    """The most memory that any process of this benchmark has used, and what each method holds beside the base."""
    file = output / "memory.json"
    before = read_json(file)["peak_bytes"] if file.exists() else 0
    held = lambda drafter: jax.tree.leaves((drafter, drafter.own.params if drafter.own else None))  # noqa: E731
    sizes = {name: sum(leaf.nbytes for leaf in held(way.drafter)) for name, way in ways.items()}
    found = {"peak_bytes": max(before, peak_memory()), "method_bytes": sizes}
    write_atomically(file, json.dumps(found).encode())


def describe_bench(
    config: BenchConfig, model: Model, ways: dict[str, Way], questions: Sequence[Question], long: Sequence[Question],
    output: Path,
) -> None:  # fmt: skip
    """Write bench.json, or check that it is the same. Raises UserError where the folder holds another benchmark."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(BenchConfig)}
    adapters = [_pair(text) for text in config.adapters.split(",") if text]
    settings["adapters"] = ",".join(f"{method}={Path(folder).name}" for method, folder in adapters)
    settings["data"] = ",".join(Path(file).name for file in config.data.split(","))
    asked = hashlib.sha256(json.dumps([[q.data, q.id, q.turns] for q in questions]).encode()).hexdigest()[:16]
    found = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype),
        "device": device_name(),
        "settings": settings,
        "ways": {name: way.info for name, way in ways.items()},
        "questions": len(questions),
        "asked": asked,
        "left_out": [[q.data, q.id] for q in long],
        "jax": jax.__version__,
    }
    found, file = json.loads(json.dumps(found)), output / "bench.json"
    if file.exists():
        before = read_json(file)
        different = [name for name in found if before.get(name) != found[name]]
        if different:
            raise UserError(f"{output} holds another benchmark (other {', '.join(different)}); give another --output")
        return
    if any(writable(output).iterdir()):
        raise UserError(f"{output} holds other files; give another --output")
    write_atomically(file, json.dumps(found | {"began": time.strftime("%Y-%m-%d")}, indent=1).encode())


def peak_memory() -> int:
    """Most bytes used so far: of the device where it tells, else of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
