"""The part of docs/claims.md about PPD's Figure 6.6: builders of trees, sizes, and the size that is said to be best."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.lab.page import section
from experiments.lab.row_costs import Costs, cpu_costs, gpu_costs
from experiments.lab.speeds import Counted, at_every_size, verdict
from experiments.lab.tree_tables import BUILDERS, DECODED_ROWS, PPD_ROWS
from jaxspec.bench.metrics import Estimate, estimate
from jaxspec.bench.report import CLOSE_SPEED, interval

_FIGURE = "PPD, Figure 6.6"
_THESIS = "stripped"
_BEST = "the size with the highest predicted speedup is the fastest"


def builder_sections(counted: Counted, decoded: Mapping[str, Any] | None) -> list[str]:
    """The conclusions, and the figure as a table.

    Args:
      counted: of every builder and size.
      decoded: what `measure_speeds` found of some sizes of the thesis's trees on a CPU; None for nothing.
    """
    return [_conclusions(counted, decoded), _sizes(counted)]


def label_of(builder: str, rows: int) -> str:
    """As results name a tree."""
    return f"{builder}, {rows} rows"


def _conclusions(counted: Counted, decoded: Mapping[str, Any] | None) -> str:
    """Of 6.6a about tokens per step; of 6.6b and 6.6c about the best size."""
    lines = [
        _ahead(counted, "dynamic trees make more tokens than full ones", _THESIS, "full"),
        _ahead(counted, "dynamic trees make more tokens than full ones of as many rows", _THESIS, "filled"),
        _ahead(counted, "dynamic trees make more tokens than random ones", _THESIS, "random"),
        _grows(counted),
        _closer(counted),
        _as_expected(counted),
        *(_best_size(counted, costs) for costs in (gpu_costs(), cpu_costs())),
        _best_decoded(counted, decoded),
        [f"{_BEST}, decoded on a GPU", f"{_FIGURE}c", "", "**not reached**"],
        _ahead(counted, "the exact search makes more than the thesis's procedure, our question", "exact", _THESIS),
    ]
    text = (
        f"On {len(counted.tokens)} answers. Dynamic trees are those of the thesis's procedure. *Full* ones have so few "
        "candidates that each could have three probes, as the thesis says, and need fewer rows where they are not as "
        "deep; *filled* ones have as many candidates as fit the same rows. Ratios are of tokens per step; of speeds "
        "where a size is the fastest. A claim about sizes holds where the interval lies above 1 at every one. What is "
        "decoded is decoded in turn, so that other work on the machine slows all alike."
    )
    return section("Exploratory: PPD's trees", text, ["claim", "source", "measured", "verdict"], lines)


def _ahead(counted: Counted, text: str, better: str, worse: str) -> list[str]:
    ratios = [counted.longer(label_of(better, rows), label_of(worse, rows)) for rows in PPD_ROWS]
    measured = ", ".join(f"{interval(ratios[i])} at {PPD_ROWS[i]} rows" for i in (0, -1))
    return [text, f"{_FIGURE}a", measured, at_every_size(ratios)]


def _grows(counted: Counted) -> list[str]:
    labels = [label_of(_THESIS, rows) for rows in PPD_ROWS]
    ratios = [counted.longer(larger, smaller) for smaller, larger in itertools.pairwise(labels)]
    total = counted.longer(labels[-1], labels[0])
    measured = f"{interval(total)} times as many at {PPD_ROWS[-1]} rows as at {PPD_ROWS[0]}"
    return ["every larger size makes more", f"{_FIGURE}a", measured, at_every_size(ratios)]


def _closer(counted: Counted) -> list[str]:
    """The lead of dynamic trees over full ones at the second size, over their lead at the largest."""
    sizes = PPD_ROWS[1], PPD_ROWS[-1]
    steps = [counted.steps(label_of(builder, rows)) for rows in sizes for builder in ("full", _THESIS)]
    ratio = estimate(np.stack(steps), lambda a, b, c, d, axis: a.sum(axis) * d.sum(axis) / (b.sum(axis) * c.sum(axis)))
    measured = f"their ratio at {sizes[0]} rows is {interval(ratio)} times that at {sizes[1]}"
    return ["full trees come closer at larger sizes", f"{_FIGURE}a", measured, verdict(ratio, close=0.0)]


def _as_expected(counted: Counted) -> list[str]:
    """Tokens per step over those that Proposition 5.6.4 expects of independent accuracies."""
    labels = [label_of(_THESIS, rows) for rows in PPD_ROWS]
    ratios = [counted.against_expected(label) for label in labels]
    measured = ", ".join(f"{interval(ratios[i])} of it at {PPD_ROWS[i]} rows" for i in (0, -1))
    apart = sum(not ratio.low <= 1 <= ratio.high for ratio in ratios)
    said = f"**does not hold** at {apart} of {len(ratios)}" if apart else "**holds** as far as can be seen"
    return ["tokens per step are as many as the accuracies say", "PPD, Proposition 5.6.4", measured, said]


def _best_size(counted: Counted, costs: Costs) -> list[str]:
    """Is the size that is predicted to be fastest the fastest by what was counted?"""
    labels = {rows: label_of(_THESIS, rows) for rows in PPD_ROWS}
    predicted = max(labels, key=lambda rows: predicted_speedup(counted, labels[rows], costs))
    best = max(labels, key=lambda rows: counted.speedup(labels[rows], costs).value)
    text = f"{_BEST}, counted, {costs.name}"
    measured = f"predicted {predicted} rows, counted {best}"
    if predicted == best:
        return [text, f"{_FIGURE}b", measured, "**holds**"]
    ratio = counted.faster(labels[predicted], labels[best], costs)
    measured += f"; the former {interval(ratio)} times as fast"
    return [text, f"{_FIGURE}b", measured, _as_fast(ratio)]


def _best_decoded(counted: Counted, decoded: Mapping[str, Any] | None) -> list[str]:
    """Is the size that is predicted to be fastest ahead of the best of the others when all decode in turn?"""
    text = f"{_BEST}, decoded on two cores"
    if decoded is None:
        return [text, f"{_FIGURE}c", "", "**not reached**"]
    speeds = {rows: decoded[str(rows)]["speedup"] for rows in DECODED_ROWS}
    chances = {rows: predicted_speedup(counted, label_of(_THESIS, rows), cpu_costs()) for rows in DECODED_ROWS}
    predicted = max(chances, key=chances.__getitem__)
    other = max(speeds.keys() - {predicted}, key=speeds.__getitem__)
    pair = np.array([decoded[str(rows)]["seconds"] for rows in (other, predicted)])
    ratio = estimate(pair, lambda a, b, axis: a.sum(axis) / b.sum(axis))
    listed = ", ".join(f"{speed:.2f} with {rows}" for rows, speed in speeds.items())
    measured = f"predicted {predicted} rows, {interval(ratio)} times as fast as {other}; speedups {listed}"
    return [text, f"{_FIGURE}c", measured, verdict(ratio)]


def _as_fast(ratio: Estimate) -> str:
    """What is said of a claim that a ratio, below 1 as it was measured, is none."""
    if ratio.low is not None and ratio.low >= 1 - CLOSE_SPEED:
        return f"**holds** within {CLOSE_SPEED}"
    return verdict(ratio)


def predicted_speedup(counted: Counted, label: str, costs: Costs) -> float:
    """By expected tokens per step (Proposition 5.6.4) and the costs of rows."""
    return counted.drafts[label]["expected"] * costs.autoregressive() / counted.seconds(label, costs)


def _sizes(counted: Counted) -> str:
    """Tokens per step of all builders, and the predicted and counted speedup of the thesis's trees."""
    lines = []
    for rows in PPD_ROWS:
        made = [f"{counted.tokens_per_step(label_of(builder, rows)):.2f}" for builder in BUILDERS]
        label = label_of(_THESIS, rows)
        lines.append([rows, counted.rows(label), *made, f"{counted.drafts[label]['expected']:.2f}"])
        for costs in (gpu_costs(), cpu_costs()):
            predicted = f"{predicted_speedup(counted, label, costs):.2f}"
            lines[-1] += [predicted, interval(counted.speedup(label, costs))]
    heads = ["candidates and probes", "rows", *BUILDERS, "stripped, expected"]
    heads += [f"{device}: speedup, {how}" for device in ("H100", "CPU") for how in ("predicted", "counted")]
    text = (
        "Tokens per step of the [exact search](trees.md#the-dynamic-tree), of the thesis's procedure (*stripped*), of "
        "full, filled and random trees (means of 20); rows of a step and speedups are those of the thesis's procedure."
    )
    return section("Exploratory: PPD's trees by size", text, heads, lines)
