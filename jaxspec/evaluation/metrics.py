"""Figures from answer files alone: how many tokens a step makes, how much faster it is, and whether it is the same.

Questions are compared in pairs: the same question, answered in turn in the same run, by a method and by autoregressive
decoding. Intervals are bootstrapped over questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

_RESAMPLES = 2000
_CONFIDENCE = 95  # percent


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with the interval that holds it with a confidence of 95%.

    Attributes:
      value: the figure.
      low: lower end.
      high: upper end.
    """

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a method came to on some questions.

    Attributes:
      questions: how many, each counted once however often it was repeated.
      tokens_per_step: emitted by all steps together over the number of all steps, the bonus included.
      tokens_per_second: median over questions, of decoding without prefill.
      speedup: of decoding, in pairs: the median over questions.
      mean_speedup: the mean.
      spec_bench_speedup: as its script computes it, with prefill: the mean over questions of tokens per second, over
        that of autoregressive decoding.
      step_milliseconds: median over questions.
      step_cost: a step's time over that of an autoregressive step, in pairs, median over questions.
      acceptance: per depth, how many of the steps that offered a candidate there accepted one.
      identical: answers that are autoregressive decoding's, token by token.
      answers: how many answers that is of.
      run_speedups: the median speedup of every run.
    """

    questions: int
    tokens_per_step: float
    tokens_per_second: float
    speedup: Estimate
    mean_speedup: Estimate
    spec_bench_speedup: float
    step_milliseconds: float
    step_cost: float
    acceptance: tuple[float, ...]
    identical: int
    answers: int
    run_speedups: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Talk:
    """One question's answer in one run, its turns together."""

    tokens: int
    steps: int
    decode_seconds: float
    wall_seconds: float
    wall_tokens: int
    lengths: list[int]

    @property
    def speed(self) -> float:
        return self.tokens / self.decode_seconds

    @property
    def step_seconds(self) -> float:
        return self.decode_seconds / self.steps


def _talk(row: dict[str, Any]) -> _Talk:
    choice = row["choices"][0]
    return _Talk(
        tokens=sum(choice["new_tokens"]) - len(choice["new_tokens"]),  # prefill makes the first of every turn
        steps=sum(choice["decoding_steps"]),
        decode_seconds=sum(choice["decode_seconds"]),
        wall_seconds=sum(choice["wall_time"]),
        wall_tokens=sum(choice["new_tokens"]),
        lengths=choice["accept_lengths"],
    )


def figures(runs: Sequence[Sequence[dict[str, Any]]], plain: Sequence[Sequence[dict[str, Any]]]) -> Figures | None:
    """A method's figures.

    Args:
      runs: rows of its answer files, run by run.
      plain: those of autoregressive decoding, of the same questions.

    Returns:
      None where no question has an answer of more than one token.
    """
    pairs: dict[Any, list[tuple[_Talk, _Talk]]] = {}
    by_run: list[list[float]] = []
    for rows, references in zip(runs, plain, strict=True):
        reference = {_key(row): _talk(row) for row in references}
        by_run.append([])
        for row in rows:
            ours, theirs = _talk(row), reference[_key(row)]
            if ours.steps and theirs.steps:
                pairs.setdefault(_key(row), []).append((ours, theirs))
                by_run[-1].append(ours.speed / theirs.speed)
    if not pairs:
        return None
    talks = [ours for found in pairs.values() for ours, _ in found]
    mean = lambda value: np.array([np.mean([value(*pair) for pair in found]) for found in pairs.values()])  # noqa: E731
    speedups = mean(lambda a, b: a.speed / b.speed)
    turns = [same for rows in runs for row in rows for same in row["choices"][0]["identical"]]
    return Figures(
        questions=len(pairs),
        tokens_per_step=sum(sum(t.lengths) for t in talks) / sum(len(t.lengths) for t in talks),
        tokens_per_second=float(np.median(mean(lambda a, _: a.speed))),
        speedup=estimate(speedups, np.median),
        mean_speedup=estimate(speedups, np.mean),
        spec_bench_speedup=float(
            np.mean(mean(lambda a, _: a.wall_tokens / a.wall_seconds))
            / np.mean(mean(lambda _, b: b.wall_tokens / b.wall_seconds))
        ),
        step_milliseconds=float(1e3 * np.median(mean(lambda a, _: a.step_seconds))),
        step_cost=float(np.median(mean(lambda a, b: a.step_seconds / b.step_seconds))),
        acceptance=_acceptance([row for rows in runs for row in rows]),
        identical=sum(turns),
        answers=len(turns),
        run_speedups=tuple(float(np.median(values)) for values in by_run if values),
    )


def _key(row: dict[str, Any]) -> tuple[str, int | str]:
    return row["data"], row["question_id"]


def _acceptance(rows: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Accepted over offered at every depth that was offered anything."""
    offered, accepted = (
        np.sum([turn for row in rows for turn in row["choices"][0][name]], axis=0) for name in ("offered", "accepted")
    )
    return tuple(float(a / o) for o, a in zip(offered, accepted, strict=True) if o)


def estimate(values: np.ndarray, statistic: Any) -> Estimate:
    """A statistic of values [n] with its bootstrap interval; always the same for the same values."""
    picks = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    spread = statistic(values[picks], axis=1)
    low, high = np.percentile(spread, [50 - _CONFIDENCE / 2, 50 + _CONFIDENCE / 2])
    return Estimate(float(statistic(values)), float(low), float(high))
