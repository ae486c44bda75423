"""Answers to batches: a deterministic order from (seed, epoch), cut or padded to one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.config import TrainConfig
from jaxspec.errors import UserError
from jaxspec.methods.base import Batch
from jaxspec.training.data import Answer


def insertion_points(answer: Answer, length: int) -> np.ndarray:
    """Every token of an answer that may own probes: one that has a next next token within `length`."""
    end = min(len(answer.prompt_tokens) + len(answer.answer_tokens), length)
    return np.arange(len(answer.prompt_tokens), max(end - 2, len(answer.prompt_tokens)))


def make_batch(answers: Sequence[Answer], points: Sequence[np.ndarray], length: int, groups: int) -> Batch:
    """Stack answers as one batch.

    Args:
      answers: B of them.
      points: insertion points of each, at most `groups`.
      length: T.
      groups: G.
    """
    tokens = np.zeros((len(answers), length), np.int32)
    chosen = np.full((len(answers), groups), -1, np.int32)
    lengths = np.zeros(len(answers), np.int32)
    for row, (answer, at) in enumerate(zip(answers, points, strict=True)):
        text = (answer.prompt_tokens + answer.answer_tokens)[:length]
        tokens[row, : len(text)] = text
        lengths[row] = len(text)
        chosen[row, : len(at)] = at
    return Batch(tokens, lengths, np.array([len(a.prompt_tokens) for a in answers], np.int32), chosen)


class TrainingData:
    """Batches by number: the same (seed, step) gives the same batch, so that resuming is just counting on.

    Args:
      answers: training answers; those without an insertion point are left out.
      train: sizes and seed.

    Attributes:
      left_out: how many that are.

    Raises:
      UserError: no answer is long enough.
    """

    def __init__(self, answers: Sequence[Answer], train: TrainConfig):
        self._train = train
        self._answers = [a for a in answers if len(insertion_points(a, train.sequence_length))]
        self.left_out = len(answers) - len(self._answers)
        if not self._answers:
            raise UserError("none of the training answers is long enough to train on; give more or other prompts")

    def batch(self, step: int) -> Batch:
        """The batch of one step."""
        t = self._train
        chosen, points = [], []
        for item in range(step * t.batch_size, (step + 1) * t.batch_size):
            epoch, at = divmod(item, len(self._answers))
            order = np.random.default_rng((t.seed, epoch)).permutation(len(self._answers))
            answer = self._answers[order[at]]
            possible = insertion_points(answer, t.sequence_length)
            count = min(t.insertions, len(possible))
            rng = np.random.default_rng((t.seed, epoch, at))
            chosen.append(answer)
            points.append(np.sort(rng.choice(possible, count, replace=False)))
        return make_batch(chosen, points, t.sequence_length, t.insertions)
