"""The part of docs/claims.md about trees and numbers of masks: what ships, counted, with the costs of two devices."""

from __future__ import annotations

import dataclasses

from experiments.lab.builder_claims import builder_sections
from experiments.lab.page import Find, section
from experiments.lab.row_costs import cpu_costs, gpu_costs
from experiments.lab.speeds import Counted, verdict
from experiments.lab.tree_tables import TREES
from jaxspec.bench.report import interval


@dataclasses.dataclass(frozen=True)
class Faster:
    """That one draft of a method is faster than another.

    Attributes:
      text: the claim, as a reader of the paper would say it.
      source: the paper, and its table or figure.
      method: whose adapter ships.
      better: label of the draft that is said to be ahead.
      worse: of the other one.
      least: how many times as fast it is at least, as the paper says.
    """

    text: str
    source: str
    method: str
    better: str
    worse: str
    least: float = 1.0


_TABLE_4, _FIGURE_9, _FIGURE_6 = "BiTA, Table 4", "BiTA, Figure 9", "SPACE, Figure 6"
_CHAIN, _EFFICIENT = "straightforward", "efficient tree"
_FULL = {k: f"full tree, k = {k}" for k in (1, 2, 3, 4)}
SPEEDS = (
    Faster("masks on every candidate pay", _TABLE_4, "bita", _FULL[1], _CHAIN),
    Faster("full trees of two candidates are faster than of one", _TABLE_4, "bita", _FULL[2], _FULL[1]),
    Faster("wide full trees cost more than they bring", _TABLE_4, "bita", _FULL[2], _FULL[4]),
    Faster("the efficient tree is faster than straightforward decoding", _TABLE_4, "bita", _EFFICIENT, _CHAIN),
    Faster("by more than 30%", _TABLE_4, "bita", _EFFICIENT, _CHAIN, 1.3),
    *(
        Faster(f"the efficient tree is faster than full trees of {k}", _TABLE_4, "bita", _EFFICIENT, label)
        for k, label in _FULL.items()
    ),
    Faster("three masks are faster than one", _FIGURE_9, "bita", _EFFICIENT, "1 mask"),
    Faster("three masks are faster than two", _FIGURE_9, "bita", _EFFICIENT, "2 masks"),
    Faster("five masks are faster than one", _FIGURE_6, "space", "5 masks", "1 mask"),
    Faster("five masks are faster than three", _FIGURE_6, "space", "5 masks", "3 masks"),
)
NOT_REACHED = (
    ("three or four masks are faster than five", _FIGURE_9, "BiTA's adapter has three masks"),
    ("more than five masks are slower than five", _FIGURE_6, "SPACE's adapter has five masks"),
)
# Speedups: BiTA, Table 4
_PUBLISHED = dict(zip((_CHAIN, *_FULL.values(), _EFFICIENT), (1.82, 2.04, 2.23, 2.05, 1.64, 2.38), strict=True))

_INTRO = """\
## Trees and numbers of masks

What the papers say of their trees, with the adapters that ship, one training of each, all tokens drafted.

- **Steps are counted.** A recording along the lab's held-out answers says which candidate every token that came was,
  and so where each tree would have gone. Tokens per step are those of the default model; SPACE's are of the base that
  it has tuned, on that base's answers.
- **Times are computed** from what a step of so many rows costs on two devices: an H100 with a base of 7B
  ([measured](accelerators.md), beyond 256 rows on a straight line; few rows count as more where these take less time),
  and two cores with the default model ([measured](results.md), beyond 64 rows on a straight line). Drafting on the H100
  is computed, too: 1.7 microseconds for each kernel that a method's
  [compiled step](accelerators.md#kernels-of-a-step) has beyond one that drafts nothing. Costs on the two cores
  include neither drafting nor the reading of BiTA's prefix.
- **Judged by the H100.** The papers speak of GPUs, of A100 and A800, which compute less per byte that they read: wide
  trees cost more there. What the two cores say stands beside it.
- **Faster** is what has the whole interval more than 0.03 above 1. It is not faster where none of the interval is, and
  there is *no difference* where all of it lies within 0.03. Intervals are of 95%, bootstrapped over answers, which are
  paired. Nothing here is corrected for how many comparisons there are.
"""


def tree_sections(found: Find) -> list[str]:
    """The sections; of tables that were not counted nothing."""
    tables = {method: _counted(found, method) for method in TREES}
    tables = {method: counted for method, counted in tables.items() if counted}
    if not tables:
        return []
    drafts = [_drafts(tables[method]) for method in ("bita", "space") if method in tables]
    decoded = found("shipped/ppd/sizes")
    builders = builder_sections(tables["ppd"], decoded and decoded["result"]) if "ppd" in tables else []
    return [_INTRO, _speeds(tables), *drafts, *builders]


def _counted(found: Find, method: str) -> Counted | None:
    row = found(f"shipped/{method}/trees")
    return row and Counted(method, row["result"]["tokens"], row["result"]["trees"])


def _speeds(tables: dict[str, Counted]) -> str:
    lines = [_judged(claim, tables.get(claim.method)) for claim in SPEEDS]
    lines += [[text, source, "", "", "", f"**not reached**: {why}"] for text, source, why in NOT_REACHED]
    heads = ["claim", "source", "rows", "tokens per step", "H100: times as fast", "verdict", "CPU: times as fast"]
    text = (
        f"On {len(next(iter(tables.values())).tokens)} answers. Adapters with fewer masks are the ones that ship, cut; "
        "the papers train a model for every number."
    )
    return section("Exploratory: speeds of trees", text, heads, lines)


def _judged(claim: Faster, counted: Counted | None) -> list[str]:
    if counted is None:
        return [claim.text, claim.source, "", "", "", "**not reached**"]
    pair = claim.better, claim.worse
    ratio = counted.faster(*pair, gpu_costs())
    rows = " and ".join(str(counted.rows(label)) for label in pair)
    made = " against ".join(f"{counted.tokens_per_step(label):.2f}" for label in pair)
    measured = [rows, made, interval(ratio), verdict(ratio, claim.least), interval(counted.faster(*pair, cpu_costs()))]
    return [claim.text, claim.source, *measured]


def _drafts(counted: Counted) -> str:
    """Every draft of a method's table: rows, tokens per step and speeds."""
    lines = []
    for label in TREES[counted.method]:
        made = [f"{counted.tokens_per_step(label):.2f}", f"{counted.drafts[label]['expected']:.2f}"]
        speeds = [interval(counted.speedup(label, costs)) for costs in (gpu_costs(), cpu_costs())]
        published = [f"{_PUBLISHED[label]:.2f}" if label in _PUBLISHED else ""] * (counted.method == "bita")
        lines.append([label, counted.rows(label), *made, *speeds, *published])
    heads = ["draft", "rows", "tokens per step", "expected", "speedup, H100", "speedup, CPU"]
    heads += ["the paper's, LLaMA-2-7B on MT-Bench"] * (counted.method == "bita")
    text = "*Expected*: by the adapter's accuracies at each distance, as if these were independent."
    return section(f"Exploratory: drafts of {counted.method}", text, heads, lines)
