"""Training data: the base's greedy answers to prompts, or given answers, and batches of them.

A method learns to predict its base, so the base writes the training text (BiTA 3.3, PPD 4.3.2), once: the cache is a
JSONL file; an interrupted run continues after its last complete line. A batch holds answers of similar length, in an
order that follows from seed and epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from jaxspec.decoding.method import Batch
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.files import drop_half_line, locked, read_whole_lines
from jaxspec.generation.generate import generate_many
from jaxspec.generation.prompts import pad_tokens
from jaxspec.parallel.processes import as_leader, check_alike, is_leader, leader_in
from jaxspec.progress import Progress
from jaxspec.training.examples import SHIPPED_PROMPTS, Selected
from jaxspec.training.settings import DataConfig, TextSource, TrainConfig
from jaxspec.weights.model import Model

MOST_DRAFTS = 32768  # tokens whose order by frequency goes with an adapter
_BLOCK = 512  # prompts sorted by length together
_WINDOW = 16  # batches within which answers are sorted by length
ORDER = 2  # version of the order; a run resumes only with the order it began with


@dataclasses.dataclass(frozen=True)
class AnsweredPrompt:
    """One training sequence.

    Attributes:
      prompt_tokens: ids of the prompt, chat template included.
      answer_tokens: ids of the answer, the base's or a given one, with the end-of-text token if it has one.
    """

    prompt_tokens: list[int]
    answer_tokens: list[int]


def cache_file(model: Model, data: DataConfig, limit: int) -> Path:
    """The cache file of the base's answers of at most `limit` tokens.

    There is one per base and form of its weights, prompts and settings of answers.
    """
    keys = [_key(source, data, limit) for source in data.text_sources]
    shares = repr([(key, float(source.weight)) for key, source in zip(keys, data.text_sources, strict=True)])
    key = keys[0] if len(keys) == 1 else _digest(shares.encode())
    base = "-".join(filter(None, (model.fingerprint, model.weights)))  # in few bits it answers otherwise
    return Path(data.cache) / f"{base}-{key}.jsonl"


def _key(source: TextSource, data: DataConfig, limit: int) -> str:
    """A key for the answers to one source: its prompts, and the settings that answers depend on."""
    file = Path(source.prompts) if source.prompts else SHIPPED_PROMPTS
    content = file.read_bytes() if file.is_file() else source.prompts.encode()
    split = source.split if source.split != TextSource.split else ""
    named = {"context_column": source.context_column, "regenerate": source.regenerate, "split": split}
    named |= {"templates": data.templates}
    shaping = (
        *(source.column, data.held_out_seed, data.max_prompt_tokens, data.chat, limit),
        *filter(None, (source.answer_column, data.template)),
        *(setting for setting in named.items() if setting[1]),
    )
    return _digest(content + repr(shaping).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def prepare_answers(
    model: Model, data: DataConfig, prompts: Sequence[Selected]
) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt]]:
    """Held-out and training answers to `select_prompts`: given ones, or cached ones and the missing ones generated now.

    Raises:
      UserError: the cache cannot be written, or another run is writing it.
    """
    numbered = dict(enumerate(prompts))
    held_out = {i: numbered.pop(i) for i in range(data.held_out)}
    try:
        return (
            _answers(model, data, held_out, data.held_out_tokens, "held-out answers"),
            _answers(model, data, numbered, data.max_answer_tokens, "training answers"),
        )
    except OSError as error:
        raise UserError(f"{data.cache}: answers cannot be cached there ({error.strerror})") from None


def _answers(
    model: Model, data: DataConfig, prompts: dict[int, Selected], limit: int, label: str
) -> list[AnsweredPrompt]:
    """Answers to numbered prompts, in order, cut at the limit."""
    given = [p for p in prompts.values() if p.answer_tokens is not None]
    if given:
        if cut := sum(len(p.answer_tokens) > limit for p in given):
            print(f"cut at {limit} tokens: {cut} of {len(given)} answers", file=sys.stderr)
        return [AnsweredPrompt(p.prompt_tokens, p.answer_tokens[:limit]) for p in given]
    path = cache_file(model, data, limit)
    done = _cached(path, prompts)
    if len(done) < len(prompts):
        with _opened(path) as file:
            done = _cached(path, prompts)  # another run may have added to them
            missing = {i: prompt for i, prompt in prompts.items() if i not in done}
            began, generated = time.monotonic(), 0
            with Progress(label, len(prompts), "answers", len(done)) as progress:
                for i, answer in _make(model, data, missing, limit):
                    done[i] = answer
                    row = {"index": i, "prompt": prompts[i].text, "answer": model.decode(answer.answer_tokens)}
                    file.write(json.dumps(row | dataclasses.asdict(answer), ensure_ascii=False) + "\n")
                    file.flush()
                    generated += len(answer.answer_tokens)
                    progress.update(len(done), f"{generated / (time.monotonic() - began):.0f} tokens/s")
    return [done[i] for i in prompts]


def _cached(path: Path, prompts: dict[int, Selected]) -> dict[int, AnsweredPrompt]:
    """Cached answers by index, without those that belong to another prompt because `held_out` has changed."""
    rows = read_whole_lines(path, ("index", "prompt_tokens", "answer_tokens"))
    answers = {row["index"]: AnsweredPrompt(row["prompt_tokens"], row["answer_tokens"]) for row in rows}
    done = {i: answers[i] for i, p in prompts.items() if i in answers and answers[i].prompt_tokens == p.prompt_tokens}
    check_alike(json.dumps(sorted(done)).encode(), str(path.parent))
    return done


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The cache, open for new answers and locked against other runs; only the first process writes to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"{path}: another run is making these answers; start this one when it is done"
    with leader_in(locked(path.with_name(f".{path.name}.lock"), refusal)):
        as_leader(functools.partial(drop_half_line, path))  # left by an interrupted run
        with (path if is_leader() else Path(os.devnull)).open("a", encoding="utf-8") as file:
            yield file


def _make(
    model: Model, data: DataConfig, missing: dict[int, Selected], limit: int
) -> Iterator[tuple[int, AnsweredPrompt]]:
    """The base's answers to numbered prompts, as they are finished."""
    plain, numbers = autoregressive(model), list(missing)
    for first in range(0, len(numbers), _BLOCK):
        # prompts of similar length are prefilled together, to pad little
        block = sorted(numbers[first : first + _BLOCK], key=lambda i: len(missing[i].prompt_tokens))
        ids = [missing[i].prompt_tokens for i in block]
        for at, tokens in generate_many(plain, ids, limit, batch_size=data.batch_size):
            yield block[at], AnsweredPrompt(ids[at], tokens)


def frequent_tokens(answers: Sequence[AnsweredPrompt], vocab_size: int) -> np.ndarray:
    """Token ids by how often answers hold them, [at most MOST_DRAFTS] int32.

    Tokens that do not occur follow by id: tokenizers number frequent ones first.
    """
    tokens = np.fromiter(itertools.chain.from_iterable(answer.answer_tokens for answer in answers), int)
    counts = np.bincount(tokens, minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:MOST_DRAFTS].astype(np.int32)


def insertion_points(
    answer: AnsweredPrompt, length: int, positions: Literal["answer", "text"] = "answer"
) -> np.ndarray:
    """Indices of the tokens that may own probes, in an answer or its text: their next next token is within `length`."""
    start = len(answer.prompt_tokens)
    end = min(start + len(answer.answer_tokens), length)
    return np.arange(start if positions == "answer" else 0, end - 2)


def make_batch(
    answers: Sequence[AnsweredPrompt], points: Sequence[np.ndarray], length: int, groups: int, seeds: Sequence[int] = ()
) -> Batch:
    """Stack B answers, each with at most `groups` (G) insertion points, as one batch of `length` (T) tokens."""
    tokens, lengths = pad_tokens([(a.prompt_tokens + a.answer_tokens)[:length] for a in answers], length)
    chosen = np.full((len(answers), groups), -1, np.int32)
    for row, at in enumerate(points):
        chosen[row, : len(at)] = at
    starts = np.array([len(a.prompt_tokens) for a in answers], np.int32)
    return Batch(tokens, lengths, starts, chosen, np.array(seeds, np.uint32) if seeds else None)


class TrainingData:
    """Batches by number: the same (seed, step) gives the same batch, so that resuming is just counting on.

    Args:
      answers: training answers.
      train: sizes and seed.

    Attributes:
      given: the answers.
      usable: those that have an insertion point.

    Raises:
      UserError: no answer is long enough.
    """

    def __init__(self, answers: Sequence[AnsweredPrompt], train: TrainConfig):
        self._train = train
        self._shuffled = functools.lru_cache(maxsize=2)(self._shuffle)  # for the two epochs that a batch may touch
        self.given = answers
        self.usable = [a for a in answers if len(self._points(a))]
        if not self.usable:
            raise UserError("none of the training answers is long enough to train on; give more or other prompts")
        if left_out := len(answers) - len(self.usable):
            print(f"{left_out} answers are too short to train on and are left out", file=sys.stderr)

    def batch(self, step: int) -> Batch:
        """The batch of one step."""
        t = self._train
        chosen, points, seeds = [], [], []
        for epoch, at, answer in self._items(step):
            possible = self._points(answer)
            count = min(t.insertions, len(possible))
            rng = np.random.default_rng((t.seed, epoch, at))
            chosen.append(answer)
            points.append(np.sort(rng.choice(possible, count, replace=False)))
            seeds.append(rng.integers(2**32))
        return make_batch(chosen, points, self.length(step), t.insertions, seeds)

    def length(self, step: int) -> int:
        """T of the batch of one step: that of its longest answer, padded to one of few lengths."""
        t = self._train
        unit = -(-t.sequence_length // t.lengths)
        longest = max(self._length(answer) for *_, answer in self._items(step))
        return min(-(-longest // unit) * unit, t.sequence_length)

    def _items(self, step: int) -> Iterator[tuple[int, int, AnsweredPrompt]]:
        """For each row of a step's batch: the epoch, the row's number in the epoch, and the answer."""
        size = self._train.batch_size
        for item in range(step * size, (step + 1) * size):
            epoch, at = divmod(item, len(self.usable))
            yield epoch, at, self.usable[self._shuffled(epoch)[at]]

    def _points(self, answer: AnsweredPrompt) -> np.ndarray:
        return insertion_points(answer, self._train.sequence_length, self._train.positions)

    def _length(self, answer: AnsweredPrompt) -> int:
        return min(len(answer.prompt_tokens) + len(answer.answer_tokens), self._train.sequence_length)

    def _shuffle(self, epoch: int) -> np.ndarray:
        """The order of one epoch: random, but within a window each batch holds answers of similar length."""
        size, count = self._train.batch_size, len(self.usable)
        rng = np.random.default_rng((self._train.seed, epoch))
        order = rng.permutation(count)
        first = -epoch * count % size  # taken by the last batch of the epoch before
        ordered = [order[:first]]
        for begin in range(first, count, _WINDOW * size):
            window = order[begin : begin + _WINDOW * size]
            window = window[np.argsort([self._length(self.usable[i]) for i in window], kind="stable")]
            whole = len(window) // size
            batches = np.split(window, size * np.arange(1, whole + 1))  # the last one holds the rest, mostly nothing
            ordered += [batches[i] for i in [*rng.permutation(whole), whole]]
        return np.concatenate(ordered)
