"""The part of docs/claims.md about PPD's Figure 6.6: builders of trees, sizes, and the size that is said to be best."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lab.page import section
from experiments.lab.row_costs import Costs, cpu_costs, gpu_costs
from experiments.lab.speeds import Counted, at_every_size, verdict
from experiments.lab.tree_tables import BUILDERS, DECODED_SIZES, PPD_SIZES, label_of
from jaxspec.bench.metrics import Estimate, estimate
from jaxspec.bench.report import interval

_TOKENS, _SPEEDS = "PPD, Figure 6.6a", "PPD, Figure 6.6c"
_THESIS = "stripped"
_BEST = "the size with the highest predicted speedup is the fastest"


def builder_sections(counted: Counted, decoded: Mapping[str, Any] | None) -> list[str]:
    """The conclusions, and the figure as a table.

    Args:
      counted: of every builder and size.
      decoded: what `measure_speeds` found of some sizes of the thesis's trees on a CPU; None for nothing.
    """
    return [_conclusions(counted, decoded), _sizes(counted)]


def _conclusions(counted: Counted, decoded: Mapping[str, Any] | None) -> str:
    """Of 6.6a about tokens per step; of 6.6c about the size that 6.6b says to be best."""
    more = "dynamic trees make more tokens than"
    lines = [
        _ahead(counted, f"{more} full ones of as many rows", "filled"),
        _ahead(counted, f"{more} full ones sized for three probes", "full", "**not judged**"),
        _ahead(counted, f"{more} random ones", "random"),
        _grows(counted),
        _closer(counted),
        _as_expected(counted),
        *(_best_counted(counted, costs) for costs in (gpu_costs(), cpu_costs())),
        _best_decoded(counted, decoded),
        [f"{_BEST}, decoded on a GPU", _SPEEDS, "", "**not reached**"],
        _exact(counted),
    ]
    text = (
        f"On {len(counted.tokens)} answers. A *size* is, as in the thesis, candidates and probes together, without the "
        "root and its probes; rows of a step are in brackets, of the tree that is named first and then of the other. "
        "Dynamic trees are those of the thesis's procedure. Every node of a full one has as many probes as the tree is "
        "deep; full ones of as many rows have at most as many as the dynamic tree, and are as deep as pays. Full ones "
        "sized for three probes have so few candidates that each could have these, and need fewer rows where they are "
        "not as deep: these are not judged. Random ones have as few. Ratios are of tokens per step; of speeds where a "
        "size is the fastest. A claim about sizes holds where the interval lies above 1 at every one. Proposition "
        "5.6.4 is judged with accuracies on the same answers, which its interval takes as given. The size that is "
        "predicted to be fastest, by the accuracies on other answers, is compared with the fastest of the others; the "
        "smallest and the largest size show no peak. What is decoded is decoded in turn, so that other work slows all "
        "alike."
    )
    return section("Exploratory: PPD's trees", text, ["claim", "source", "measured", "verdict"], lines)


def _sized(counted: Counted, size: int, *builders: str) -> str:
    """A size, and the rows that steps of some builders' trees have there."""
    return f"size {size} ({' and '.join(str(counted.rows(label_of(builder, size))) for builder in builders)} rows)"


def _ahead(counted: Counted, text: str, worse: str, said: str = "") -> list[str]:
    """That the thesis's trees make more tokens than those of another builder."""
    ratios = [counted.longer(label_of(_THESIS, size), label_of(worse, size)) for size in PPD_SIZES]
    places = [_sized(counted, size, _THESIS, worse) for size in PPD_SIZES]
    measured = ", ".join(f"{interval(ratios[i])} at {places[i]}" for i in (0, -1))
    return [text, _TOKENS, measured, said or at_every_size(ratios)]


def _exact(counted: Counted) -> list[str]:
    pairs = [(label_of("exact", size), label_of(_THESIS, size)) for size in PPD_SIZES]
    ratios = [counted.longer(*pair) for pair in pairs]
    fewer = sum(counted.rows(exact) < counted.rows(stripped) for exact, stripped in pairs)
    places = [_sized(counted, size, "exact", _THESIS) for size in PPD_SIZES]
    measured = ", ".join(f"{interval(ratios[i])} at {places[i]}" for i in (0, -1))
    measured += f"; with fewer rows at {fewer} of {len(pairs)} sizes"
    return ["the exact search makes more than the thesis's procedure", "our question", measured, at_every_size(ratios)]


def _grows(counted: Counted) -> list[str]:
    labels = [label_of(_THESIS, size) for size in PPD_SIZES]
    ratios = [counted.longer(larger, smaller) for smaller, larger in itertools.pairwise(labels)]
    largest, smallest = (_sized(counted, PPD_SIZES[i], _THESIS) for i in (-1, 0))
    measured = f"{interval(counted.longer(labels[-1], labels[0]))} times as many at {largest} as at {smallest}"
    return ["every larger size makes more", _TOKENS, measured, at_every_size(ratios)]


def _closer(counted: Counted) -> list[str]:
    """The lead of dynamic trees over full ones at the second size, over their lead at the largest."""
    sizes = PPD_SIZES[1], PPD_SIZES[-1]
    steps = [counted.steps(label_of(builder, size)) for size in sizes for builder in ("filled", _THESIS)]
    ratio = estimate(np.stack(steps), lambda a, b, c, d, axis: a.sum(axis) * d.sum(axis) / (b.sum(axis) * c.sum(axis)))
    small, large = (_sized(counted, size, _THESIS, "filled") for size in sizes)
    measured = f"dynamic over full, in tokens: {interval(ratio)} times as high at {small} as at {large}"
    return ["full trees of as many rows come closer at larger sizes", _TOKENS, measured, verdict(ratio, close=0.0)]


def _as_expected(counted: Counted) -> list[str]:
    """Tokens per step over those that Proposition 5.6.4 expects of independent accuracies."""
    ratios = [counted.against_expected(label_of(_THESIS, size)) for size in PPD_SIZES]
    places = [_sized(counted, size, _THESIS) for size in PPD_SIZES]
    measured = ", ".join(f"{interval(ratios[i])} of it at {places[i]}" for i in (0, -1))
    return [
        "tokens per step are as many as the accuracies say",
        "PPD, Proposition 5.6.4",
        measured,
        _equal_everywhere(ratios),
    ]


def _equal_everywhere(ratios: Sequence[Estimate]) -> str:
    """What is said of a claim that all of several ratios are 1."""
    if any(ratio.low is None for ratio in ratios):
        return "**undecided**; too few answers"
    apart = sum(not ratio.low <= 1 <= ratio.high for ratio in ratios)
    return f"**does not hold** at {apart} of {len(ratios)}" if apart else "**holds** as far as can be seen"


def _best_counted(counted: Counted, costs: Costs) -> list[str]:
    """Is the size that is predicted to be fastest ahead of the best of the others by what was counted?"""
    labels = {size: label_of(_THESIS, size) for size in PPD_SIZES}
    predicted = max(labels, key=lambda size: predicted_speedup(counted, labels[size], costs))
    others = [size for size in labels if size != predicted]
    other = max(others, key=lambda size: counted.speedup(labels[size], costs).value)
    ratio = counted.faster(labels[predicted], labels[other], costs)
    names = [_sized(counted, size, _THESIS) for size in (predicted, other)]
    measured = f"predicted {names[0]}: {interval(ratio)} times as fast as {names[1]}, and "
    measured += f"{interval(counted.speedup(labels[predicted], costs))} times as fast as autoregressive decoding"
    return [f"{_BEST}, counted, {costs.name}", _SPEEDS, measured, _fastest(ratio, predicted, PPD_SIZES)]


def _best_decoded(counted: Counted, decoded: Mapping[str, Any] | None) -> list[str]:
    """Likewise when all decode in turn."""
    text = f"{_BEST}, decoded on two cores"
    if decoded is None:
        return [text, _SPEEDS, "", "**not reached**"]
    speeds = {size: decoded[str(size)]["speedup"] for size in DECODED_SIZES}
    chances = {size: predicted_speedup(counted, label_of(_THESIS, size), cpu_costs()) for size in DECODED_SIZES}
    predicted = max(chances, key=chances.__getitem__)
    other = max(speeds.keys() - {predicted}, key=speeds.__getitem__)
    pair = np.array([decoded[str(size)]["seconds"] for size in (other, predicted)])
    ratio = estimate(pair, lambda a, b, axis: a.sum(axis) / b.sum(axis))
    listed = ", ".join(f"{speed:.2f} with {size}" for size, speed in speeds.items())
    names = [_sized(counted, size, _THESIS) for size in (predicted, other)]
    measured = f"predicted {names[0]}: {interval(ratio)} times as fast as {names[1]}; speedups by size {listed}"
    return [text, _SPEEDS, measured, _fastest(ratio, predicted, DECODED_SIZES)]


def _fastest(ratio: Estimate, predicted: int, sizes: Sequence[int]) -> str:
    """What is said of a claim that a size is the fastest, by its speed over that of the best other one."""
    return "**at the edge of the sizes**" if predicted in (sizes[0], sizes[-1]) else verdict(ratio)


def predicted_speedup(counted: Counted, label: str, costs: Costs) -> float:
    """By expected tokens per step (Proposition 5.6.4) and the costs of rows."""
    return counted.drafts[label]["expected"] * costs.autoregressive() / counted.seconds(label, costs)


def _sizes(counted: Counted) -> str:
    """Rows and tokens per step of all builders, and the predicted and counted speedup of the thesis's trees."""
    lines = []
    for size in PPD_SIZES:
        labels = [label_of(builder, size) for builder in BUILDERS]
        rows = ", ".join(str(counted.rows(label)) for label in labels)
        label = label_of(_THESIS, size)
        expected = [f"{counted.drafts[label][name]:.2f}" for name in ("expected", "expected_here")]
        lines.append([size, rows, *(f"{counted.tokens_per_step(label):.2f}" for label in labels), *expected])
        for costs in (gpu_costs(), cpu_costs()):
            predicted = f"{predicted_speedup(counted, label, costs):.2f}"
            lines[-1] += [predicted, interval(counted.speedup(label, costs))]
    heads = ["size", f"rows: {', '.join(BUILDERS)}", *BUILDERS, "stripped, expected", "by these answers"]
    heads += [f"{device}: speedup, {how}" for device in ("H100", "CPU") for how in ("predicted", "counted")]
    text = (
        "Tokens per step of the [exact search](trees.md#the-dynamic-tree), of the thesis's procedure (*stripped*), of "
        "full trees sized for three probes (*full*) or for as many rows (*filled*), and of random ones (means of 20). "
        "*Expected* are those of the thesis's procedure, by accuracies on other answers and on these. "
        "Speedups are its own, too."
    )
    return section("Exploratory: PPD's trees by size", text, heads, lines)
