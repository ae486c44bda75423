"""Figures from answer files alone: tokens per step, speedup, and whether the text is the same.

Questions are compared in pairs: the same question, answered in turn in the same run, by a method and by autoregressive
decoding. Intervals are bootstrapped over questions. Where several questions are answered together, the batch was timed,
and it takes the place of a question in all times.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_RESAMPLES = 2000
FEWEST = 6  # values for an interval; the extremes of fewer contain a median with less than 95%


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with the interval that holds it with a confidence of 95%.

    Attributes:
      value: the figure.
      low: lower end; None where there are too few values.
      high: upper end, likewise.
    """

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Figures:
    """The result of a method on some questions.

    Attributes:
      questions: number of questions, each counted once however often it was repeated.
      tokens_per_step: emitted by all steps together over the number of all steps, the bonus included.
      tokens_per_second: median over questions, of decoding without prefill.
      speedup: of decoding, in pairs: the median over questions.
      mean_speedup: the mean.
      with_prefill: as Spec-Bench defines speedup: the mean over questions of tokens per second, prefill included, over
        that of autoregressive decoding. Its script tokenizes the reference's texts again to count their tokens, less
        one per turn; here the tokens that were made are counted on both sides. Of questions whose answers have more
        than one token, as all other times.
      step_milliseconds: median over questions.
      step_cost: a step's time over that of an autoregressive step, in pairs, median over questions.
      acceptance: per depth, how many of the steps that offered a candidate there accepted one.
      acceptance_rate: accepted candidates over all that were drafted, wherever they stood in the drafts; None where
        none were, or answers of an earlier version do not say how many.
      identical: answers that are autoregressive decoding's, token by token.
      answers: how many answers that is of; turns after one that differs answer something else and do not count.
      run_speedups: the median speedup of every run.
      run_tokens_per_step: tokens per step of every run.
    """

    questions: int
    tokens_per_step: float
    tokens_per_second: float
    speedup: Estimate
    mean_speedup: Estimate
    with_prefill: float
    step_milliseconds: float
    step_cost: float
    acceptance: tuple[float, ...]
    acceptance_rate: float | None
    identical: int
    answers: int
    run_speedups: tuple[float, ...]
    run_tokens_per_step: tuple[float, ...]


Row = dict[str, Any]


class _Work(NamedTuple):
    """Speeds of all turns of the questions that were answered together in one run: one question, or a batch."""

    speed: float  # tokens per second of decoding
    step_seconds: float
    whole_speed: float  # tokens per second, prefill included


def _works(rows: Sequence[Row]) -> dict[tuple, _Work]:
    """The work of one run, by the questions that were answered together, without answers that take no step.

    Tokens of a batch add up, its times are the same, and the longest answer says how many steps.
    """
    batches: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        batches.setdefault(tuple(map(tuple, row["batch"])), []).append(row["choices"][0])
    works = {}
    for batch, choices in batches.items():
        if steps := sum(map(max, zip(*(choice["decoding_steps"] for choice in choices), strict=True))):
            counts = [count for choice in choices for count in choice["new_tokens"]]
            seconds, whole_seconds = (sum(choices[0][name]) for name in ("decode_seconds", "wall_time"))
            decoded = sum(counts) - len(counts)  # prefill makes the first token of every turn
            works[batch] = _Work(decoded / seconds, seconds / steps, sum(counts) / whole_seconds)
    return works


def figures(runs: Sequence[Sequence[Row]], plain: Sequence[Sequence[Row]]) -> Figures | None:
    """A method's figures.

    Args:
      runs: rows of the method's answer files, run by run.
      plain: those of autoregressive decoding, of the same questions.

    Returns:
      None where no question has an answer of more than one token.
    """
    found: dict[tuple, list[list[float]]] = {}  # by what was answered together, run by run
    run_speedups = []
    for rows, references in zip(runs, plain, strict=True):
        theirs, ratios = _works(references), []
        for batch, work in _works(rows).items():
            if batch in theirs:
                other = theirs[batch]
                ratios.append(work.speed / other.speed)
                cost = work.step_seconds / other.step_seconds
                found.setdefault(batch, []).append([ratios[-1], cost, *work, other.whole_speed])
        run_speedups += [float(np.median(ratios))] if ratios else []
    if not found:
        return None
    means = np.array([np.mean(values, axis=0) for values in found.values()])
    speedups, costs, speeds, step_seconds, whole_speeds, plain_speeds = means.T
    choices = [row["choices"][0] for rows in runs for row in rows]
    lengths = [[length for row in rows for length in row["choices"][0]["accept_lengths"]] for rows in runs]
    compared = [divergence for choice in choices for divergence in choice["divergence"]]
    return Figures(
        questions=len({(row["data"], row["question_id"]) for rows in runs for row in rows}),
        tokens_per_step=float(np.mean(list(itertools.chain.from_iterable(lengths)))),
        tokens_per_second=float(np.median(speeds)),
        speedup=estimate(speedups, np.median),
        mean_speedup=estimate(speedups, np.mean),
        with_prefill=float(np.mean(whole_speeds) / np.mean(plain_speeds)),
        step_milliseconds=float(1e3 * np.median(step_seconds)),
        step_cost=float(np.median(costs)),
        acceptance=_acceptance(choices),
        acceptance_rate=_acceptance_rate(choices),
        identical=sum(divergence is None for divergence in compared),
        answers=len(compared),
        run_speedups=tuple(run_speedups),
        run_tokens_per_step=tuple(float(np.mean(values)) for values in lengths if values),
    )


def _acceptance(choices: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Accepted over offered candidates, for every depth with candidates."""
    offered, accepted = (
        np.sum([turn for choice in choices for turn in choice[name]], axis=0) for name in ("offered", "accepted")
    )
    return tuple(float(a / o) for o, a in zip(offered, accepted, strict=True) if o)


def _acceptance_rate(choices: Sequence[dict[str, Any]]) -> float | None:
    """Accepted over drafted candidates."""
    drafted = sum(sum(choice.get("candidates", ())) for choice in choices)
    accepted = sum(sum(turn) for choice in choices for turn in choice["accepted"])
    return accepted / drafted if drafted else None


def estimate(values: np.ndarray, statistic: Callable[..., Any]) -> Estimate:
    """A statistic with its bootstrap interval, always the same one; none for too few values.

    Args:
      values: [n], or [k, n] for a statistic of k figures of each of n things.
      statistic: takes k arrays, and along which `axis` to go.
    """
    samples = np.atleast_2d(values)
    value = float(statistic(*samples, axis=-1))
    if samples.shape[1] < FEWEST:
        return Estimate(value, None, None)
    from scipy import stats  # slow to import

    found = stats.bootstrap(samples, statistic, paired=True, n_resamples=_RESAMPLES, method="percentile", rng=0)
    return Estimate(value, *map(float, found.confidence_interval))
