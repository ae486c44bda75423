"""Comparing drafters by tokens per step: paired answers, the spread between seeds, and several claims at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.05  # of false claims, over all claims that are tested together
POWER = 0.8  # the chance with which a detectable difference is seen


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far trainings of a method that differ in the seed alone lie apart, in tokens per step.

    Attributes:
      deviation: standard deviation, pooled over methods; 0 where it was not measured.
      freedom: degrees of freedom of that estimate; 0 where no method has several seeds.
    """

    deviation: float = 0.0
    freedom: int = 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference of tokens per step, tested against none.

    Attributes:
      value: of the first drafter's tokens per step less the second's.
      error: its standard error, over answers and, where the spread is measured, over seeds.
      freedom: degrees of freedom of the error.
      p_value: two-sided.
    """

    value: float
    error: float
    freedom: float
    p_value: float

    def half_width(self) -> float:
        """Half the width of the 95% interval."""
        return float(stats.t.ppf(0.975, self.freedom) * self.error)

    def detectable(self, level: float) -> float:
        """The smallest difference that a two-sided test at `level` sees with a chance of `POWER`."""
        return float((stats.t.ppf(1 - level / 2, self.freedom) + stats.t.ppf(POWER, self.freedom)) * self.error)

    def tolerated_spread(self, level: float, seeds: Sequence[int]) -> float:
        """How far seeds may lie apart, as a standard deviation, before a test at `level` sees no difference.

        For an error over answers alone; `seeds` has how many each drafter was trained with. 0 where none is seen.
        """
        seen = (abs(self.value) / stats.t.ppf(1 - level / 2, self.freedom)) ** 2
        return float(np.sqrt(max(seen - self.error**2, 0) / sum(1 / count for count in seeds)))


def tokens_per_step(score: Mapping[str, Any], label: str) -> float:
    """Of all answers together; `score` is the result of a score job, `label` one of its drafts."""
    return sum(score["tokens"]) / sum(score["drafts"][label]["steps"])


def pooled_spread(entries: Iterable[Sequence[Mapping[str, Any]]], label: str) -> Spread:
    """The spread between seeds, pooled over entries; each is its scores, one per seed."""
    groups = [[tokens_per_step(score, label) for score in entry if label in score["drafts"]] for entry in entries]
    squares = sum(len(values) * float(np.var(values)) for values in groups if len(values) > 1)
    freedom = sum(len(values) - 1 for values in groups if len(values) > 1)
    return Spread(float(np.sqrt(squares / freedom)), freedom) if freedom else Spread()


def compare(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], label: str, spread: Spread
) -> Difference:
    """Test whether two drafters make the same number of tokens per step.

    Where both were scored on the same answers these are paired: what makes an answer easy for both cancels. Other
    answers, those of a tuned base, are independent. Degrees of freedom are by Welch and Satterthwaite.

    Args:
      first: scores of one drafter, one per seed.
      second: scores of the other.
      label: the draft that is compared.
      spread: between seeds.
    """
    ours, theirs = _influences(first, label), _influences(second, label)
    if first[0]["tokens"] == second[0]["tokens"]:
        variances = [_of_mean(ours - theirs)]
    else:
        variances = [_of_mean(ours), _of_mean(theirs)]
    variances = [(variance, len(ours) - 1) for variance in variances]
    if spread.freedom:
        variances.append((spread.deviation**2 * (1 / len(first) + 1 / len(second)), spread.freedom))
    value = _mean(first, label) - _mean(second, label)
    variance = sum(part for part, _ in variances)
    if variance == 0:  # no answer differs from another, nor any seed
        return Difference(value, 0.0, len(ours) - 1, 0.0 if value else 1.0)
    freedom = variance**2 / sum(part**2 / count for part, count in variances)
    error = float(np.sqrt(variance))
    return Difference(value, error, freedom, float(2 * stats.t.sf(abs(value) / error, freedom)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the same order: those below a level hold together at that level."""
    order, adjusted, so_far = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = so_far
    return adjusted


def shown(p_value: float) -> str:
    """A p value as a cell."""
    return "< .001" if p_value < 0.001 else f"{p_value:.3f}".lstrip("0") if p_value < 1 else "1"


def _mean(scores: Sequence[Mapping[str, Any]], label: str) -> float:
    return float(np.mean([tokens_per_step(score, label) for score in scores]))


def _influences(scores: Sequence[Mapping[str, Any]], label: str) -> np.ndarray:
    """[answers], how much each answer moves the ratio of tokens to steps, to first order; the mean over seeds."""
    parts = []
    for score in scores:
        tokens, steps = np.array(score["tokens"]), np.array(score["drafts"][label]["steps"])
        parts.append((tokens - tokens_per_step(score, label) * steps) / steps.mean())
    return np.mean(parts, axis=0)


def _of_mean(values: np.ndarray) -> float:
    return float(np.var(values, ddof=1) / len(values))
