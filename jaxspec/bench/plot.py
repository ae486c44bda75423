"""Plots of a benchmark: speed, tokens per step and acceptance."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxspec.bench.config import REFERENCE
from jaxspec.bench.metrics import Estimate
from jaxspec.bench.questions import MT_BENCH
from jaxspec.bench.results import ALL, Results, compared
from jaxspec.plotting import picture


def plot_bench(results: Results, file: Path) -> bool:
    """Draw speedup and tokens per step by category, and acceptance by depth. Returns whether there is anything to."""
    groups, ways = [g for g in results.figures[REFERENCE] if g not in MT_BENCH], compared(results)
    if not ways:
        return False
    deepest = max(len(results.figures[way][ALL].acceptance) for way in ways)
    with picture(file, 3, 1, (11, 12), dpi=100) as (speed, tokens, acceptance):
        width, places = 0.8 / len(ways), np.arange(len(groups))
        for number, way in enumerate(ways):
            found = [results.figures[way].get(group) for group in groups]
            shift = (number - (len(ways) - 1) / 2) * width
            spread = np.array([_spread(f.speedup) if f else (0, 0) for f in found]).T
            heights = [f.speedup.value if f else 0 for f in found]
            speed.bar(places + shift, heights, width, yerr=spread, label=way, error_kw={"linewidth": 0.8})
            tokens.bar(places + shift, [f.tokens_per_step if f else 0 for f in found], width)
            rates = results.figures[way][ALL].acceptance
            acceptance.bar(np.arange(1, len(rates) + 1) + shift, rates, width)
        for axes, name in ((speed, "speedup against autoregressive"), (tokens, "tokens per step")):
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xticks(places, groups)
            axes.set(ylabel=name)
        acceptance.set(xlabel="depth", ylabel="accepted of offered", ylim=(0, 1), xticks=range(1, deepest + 1))
        speed.legend(fontsize=8, ncols=min(len(ways), 6), loc="lower center", bbox_to_anchor=(0.5, 1))
    return True


def _spread(estimate: Estimate) -> tuple[float, float]:
    """How far its interval reaches below and above a value."""
    if estimate.low is None:
        return 0, 0
    return max(estimate.value - estimate.low, 0), max(estimate.high - estimate.value, 0)
