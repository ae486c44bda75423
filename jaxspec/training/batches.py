"""Batches of answers of similar length, in an order that follows from seed and epoch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from jaxspec.config import TrainConfig
from jaxspec.decoding.method import Batch
from jaxspec.errors import UserError
from jaxspec.generation.prompts import pad_tokens
from jaxspec.training.data import AnsweredPrompt

_WINDOW = 16  # batches within which answers are sorted by length
ORDER = 2  # version of the order; a run resumes only with the order it began with


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
