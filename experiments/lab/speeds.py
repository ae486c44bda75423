"""Speeds computed from steps that were counted and from what steps cost, compared on the same answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.lab.row_costs import Costs
from experiments.lab.statistics import POWER
from jaxspec.bench.metrics import Estimate, estimate
from jaxspec.bench.report import CLOSE_SPEED


@dataclasses.dataclass(frozen=True)
class Counted:
    """Steps of several drafts of one method on the same answers.

    Attributes:
      method: its name.
      tokens: [A], of every answer, its first left out.
      drafts: by label `rows` of a step, `steps` [A], and tokens per step as `expected` by the adapter's accuracies and
        as `expected_here` by those on these answers.
    """

    method: str
    tokens: Sequence[int]
    drafts: Mapping[str, Mapping[str, Any]]

    def steps(self, label: str) -> np.ndarray:
        """Of every answer, [A]."""
        return np.array(self.drafts[label]["steps"], float)

    def rows(self, label: str) -> int:
        """Of a step."""
        return self.drafts[label]["rows"]

    def tokens_per_step(self, label: str) -> float:
        """Of all answers together."""
        return float(sum(self.tokens) / self.steps(label).sum())

    def seconds(self, label: str, costs: Costs) -> float:
        """Of a step."""
        return costs.seconds(self.method, self.rows(label))

    def longer(self, better: str, worse: str) -> Estimate:
        """The ratio of tokens per step of two drafts."""
        return _ratio(self.steps(worse), self.steps(better))

    def against_expected(self, label: str) -> Estimate:
        """The ratio of tokens per step to those expected by the accuracies on the same answers."""
        made = _ratio(np.array(self.tokens, float), self.steps(label))
        return _scaled(made, 1 / self.drafts[label]["expected_here"])

    def faster(self, better: str, worse: str, costs: Costs) -> Estimate:
        """The ratio of speeds of two drafts."""
        scale = self.seconds(worse, costs) / self.seconds(better, costs)
        return _scaled(self.longer(better, worse), scale)

    def speedup(self, label: str, costs: Costs) -> Estimate:
        """The speed over that of autoregressive decoding."""
        scale = costs.autoregressive() / self.seconds(label, costs)
        return _scaled(_ratio(np.array(self.tokens, float), self.steps(label)), scale)


def _ratio(above: np.ndarray, below: np.ndarray) -> Estimate:
    """Of two sums over the same answers."""
    return estimate(np.stack([above, below]), lambda a, b, axis: a.sum(axis) / b.sum(axis))


def _scaled(value: Estimate, scale: float) -> Estimate:
    if value.low is None:
        return Estimate(value.value * scale, None, None)
    return Estimate(value.value * scale, value.low * scale, value.high * scale)


def verdict(ratio: Estimate, least: float = 1.0, close: float = CLOSE_SPEED) -> str:
    """What is said of a claim that a ratio is above `least`, or of one that it is above 1, by more than `close`.

    An undecided one says from which ratio on the claim would have been seen to hold, with a chance of `POWER`.
    """
    if ratio.low is None:
        return "**undecided**; too few answers"
    margin = close if least == 1 else 0.0
    if ratio.low > least + margin:
        return "**holds**"
    if ratio.high <= least + margin:
        return "**no difference**" if margin and ratio.low >= 1 - margin else "**does not hold**"
    error = (ratio.high - ratio.low) / (2 * stats.norm.ppf(0.975))
    seen = least + margin + (stats.norm.ppf(0.975) + stats.norm.ppf(POWER)) * error
    return f"**undecided**; {seen:.2f} would have been seen"


def at_every_size(ratios: Sequence[Estimate]) -> str:
    """What is said of a claim that all of several ratios are above 1."""
    above = sum(ratio.low is not None and ratio.low > 1 for ratio in ratios)
    below = sum(ratio.high is not None and ratio.high < 1 for ratio in ratios)
    if above == len(ratios):
        return "**holds**"
    if above:
        return f"**in part**: above at {above}, below at {below} of {len(ratios)}"
    if all(ratio.low is not None and 1 - CLOSE_SPEED <= ratio.low <= ratio.high <= 1 + CLOSE_SPEED for ratio in ratios):
        return "**no difference**"
    return f"**does not hold**: below at {below} of {len(ratios)}" if below else "**undecided**"
