"""Whether what papers conclude from a table holds, and what two trainings must differ by to say so."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.studies import Conclusion
from jaxspec.bench.metrics import estimate
from jaxspec.bench.report import interval
from jaxspec.training.evaluate import lost_distances, top

BEST = (1, 5)  # how many candidates count as the best: every conclusion is judged by each
CLOSE = 0.01  # accuracies closer than this are called equal
Spreads = dict[tuple[int, bool], float]


def verdict(difference: float, close: float, gains: bool = True) -> str:
    """What a difference says of the claim that it is positive, or (no gains) of the claim that it is not."""
    if not gains:
        return "holds" if difference < close else "does not hold"
    if abs(difference) < close:
        return "undecided"
    return "holds" if difference > 0 else "does not hold"


def spreads(results: dict[str, dict[str, Any]]) -> Spreads:
    """How far two trainings that differ in the seed alone lie apart, twice the standard deviation of a difference.

    Args:
      results: of the study of seeds, "NAME, seed N": figures. Those that lost a probe do not count.

    Returns:
      {(candidates that count as the best, whether it is the mean over distances): accuracy}, at least `CLOSE`, which
      is all there is where nothing was repeated.
    """
    names = dict.fromkeys(label.partition(", seed")[0] for label in results)
    learnt = {label: r["accuracy"] for label, r in results.items() if not lost_distances(r["accuracy"])}
    methods = [[x for label, x in learnt.items() if label.partition(", seed")[0] == name] for name in names]
    repeated = [accuracies for accuracies in methods if len(accuracies) > 1]
    found = {(k, mean): CLOSE for k in BEST for mean in (True, False)}
    for k in BEST if repeated else ():
        tops = [np.array([top(accuracy, k) for accuracy in accuracies]) for accuracies in repeated]  # [seeds, M] each
        of_means = np.mean([x.mean(axis=1).var(ddof=1) for x in tops])
        of_distances = np.mean([x.var(axis=0, ddof=1).mean() for x in tops])
        for mean, variance in ((True, of_means), (False, of_distances)):
            found[k, mean] = max(CLOSE, 2 * float(np.sqrt(2 * variance)))
    return found


def by_accuracy(conclusion: Conclusion, one: dict[str, Any], other: dict[str, Any], close: Spreads) -> tuple[str, str]:
    """A verdict and the differences it rests on.

    Top-1 and top-5 must agree; a conclusion that holds by one of them alone holds `in part`.
    """
    if lost_distances(one["accuracy"]) or lost_distances(other["accuracy"]):
        return "not judged", "a probe was lost"
    both, words, figures = min(len(one["accuracy"]), len(other["accuracy"])), [], []
    mean = both > 1 and not conclusion.distance
    for k in BEST:
        gap = (top(one["accuracy"], k)[:both] - top(other["accuracy"], k)[:both]).tolist()
        difference = float(np.mean(gap)) if mean else gap[max(conclusion.distance - 1, 0)]
        words.append(verdict(difference, close[k, mean], conclusion.gains))
        figures.append((f"top-{k} {difference:+.3f}", words[-1]))
    agree = len(set(words)) == 1
    word = words[0] if agree else "in part" if "holds" in words else "undecided"
    where = "mean over distances" if mean else f"at distance {conclusion.distance or 1}"
    return word, ", ".join([where, *(figure if agree else f"{figure}: {each}" for figure, each in figures)])


def by_perplexity(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Whether a perplexity is no higher than another, on the same answers."""
    if not all("answer_entropies" in r for r in (one, other)):
        return "not judged", "without the answers' own"
    sums = np.hstack([r["answer_entropies"] for r in (one, other)])  # [n, 4]
    found = estimate(sums.T, _perplexity_ratio)
    word = "undecided"
    if found.low is not None and found.high < 1 + CLOSE:
        word = "holds"
    if found.low is not None and found.low > 1 + CLOSE:
        word = "does not hold"
    return word, f"{interval(found, 3)} times its perplexity, {len(sums)} answers"


def _perplexity_ratio(
    sums: np.ndarray, tokens: np.ndarray, other_sums: np.ndarray, other_tokens: np.ndarray, axis: int
) -> np.ndarray:
    """Of sums of -log P and numbers of tokens."""
    entropy, other = sums.sum(axis) / tokens.sum(axis), other_sums.sum(axis) / other_tokens.sum(axis)
    return np.exp(entropy - other)
