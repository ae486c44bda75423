"""Whether what papers conclude from a table holds, and what two trainings must differ by to say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.evaluation.bench_report import interval
from jaxspec.evaluation.claims import CLOSE, top
from jaxspec.evaluation.metrics import estimate
from jaxspec.evaluation.studies import Conclusion

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
      results: of the study of seeds; what was trained with another seed differs in the end of its label.

    Returns:
      {(candidates that count as the best, whether it is the mean over distances): accuracy}, at least `CLOSE`, which
      is all there is without results.
    """
    methods = {label.partition(", seed")[0] for label in results}
    found = {(k, mean): CLOSE for k in (1, 5) for mean in (True, False)}
    for k in (1, 5) if results else ():
        repeated = [
            np.array([top(r["accuracy"], k) for label, r in results.items() if label.startswith(m)]) for m in methods
        ]
        of_means = np.mean([tops.mean(axis=1).var(ddof=1) for tops in repeated])
        of_distances = np.mean([tops.var(axis=0, ddof=1).mean() for tops in repeated])
        for mean, variance in ((True, of_means), (False, of_distances)):
            found[k, mean] = max(CLOSE, 2 * float(np.sqrt(2 * variance)))
    return found


def not_learnt(accuracy: Sequence[Sequence[float]]) -> list[int]:
    """Distances predicted far worse than a farther one, or than the one before: no method's that has learnt them is."""
    tops = top(accuracy, 5)
    overtaken = {d for d in range(1, len(tops)) if tops[d - 1] < 2 / 3 * max(tops[d:])}
    return sorted(overtaken | {d for d in range(2, len(tops) + 1) if tops[d - 1] < 0.45 * tops[d - 2]})


def by_accuracy(
    conclusion: Conclusion,
    one: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    close: Spreads,
) -> tuple[str, str]:
    """A verdict on which all numbers of candidates agree, or `in part`, and the differences."""
    both, words, figures = min(len(one), len(other)), [], []
    for k in conclusion.best:
        gap = top(one[:both], k) - top(other[:both], k)
        difference = float(gap[conclusion.distance - 1] if conclusion.distance else np.mean(gap))
        words.append(verdict(difference, close[k, not conclusion.distance], conclusion.gains))
        figures.append((f"top-{k} {difference:+.3f}", words[-1]))
    agree = len(set(words)) == 1
    measured = ", ".join(figure if agree else f"{figure}: {word}" for figure, word in figures)
    where = f"at distance {conclusion.distance}" if conclusion.distance else "mean over distances"
    return words[0] if agree else "in part", f"{where}, {measured}"


def by_perplexity(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Whether a perplexity is no higher than another, on the same answers."""
    if not all("answer_entropies" in r for r in (one, other)):
        return "not judged", "without the answers' own"
    sums = np.stack([r["answer_entropies"] for r in (one, other)], axis=1)  # [n, 2, 2]
    found = estimate(sums, _perplexity_ratio)
    word = "undecided"
    if found.low is not None and found.high < 1 + CLOSE:
        word = "holds"
    if found.low is not None and found.low > 1 + CLOSE:
        word = "does not hold"
    return word, f"{interval(found, 3)} times its perplexity, {len(sums)} answers"


def _perplexity_ratio(sums: np.ndarray, axis: int = 0) -> np.ndarray:
    """Of sums of -log P and numbers of tokens [..., n, 2, 2], n at `axis`."""
    total = sums.sum(axis=axis)
    entropy = total[..., 0] / total[..., 1]
    return np.exp(entropy[..., 0] - entropy[..., 1])
