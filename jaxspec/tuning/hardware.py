"""Which tree is fastest on a machine: tokens per step over seconds per step (PPD 5.6.3), both of them measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jaxspec.errors import UserError
from jaxspec.trees.builders import chain, sparse_tree
from jaxspec.trees.dynamic import dynamic_sparse_tree
from jaxspec.trees.plan import TreePlan, expected


@dataclasses.dataclass(frozen=True)
class RowLatency:
    """Seconds of a step by the number of rows, between and beyond the measured ones on straight lines.

    Only nodes go through the vocabulary projection, and this curve does not tell them from probes: it is exact for
    trees with as many probes as nodes, a little cheap for others with more nodes and dear for those with more probes.

    Attributes:
      rows: increasing.
      seconds: medians, made increasing: a row more is never cheaper.
      drafting: seconds that a tree of depth 1, 2, ... adds by its depth: heads that draft after the pass work for
        every level. Empty where rows say it all.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    drafting: tuple[float, ...] = ()

    def __call__(self, rows: float, depth: int = 1) -> float:
        """Seconds of a step with that many rows and a tree so deep."""
        deeper = self.drafting[depth - 1] if self.drafting else 0.0
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds)) + deeper
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return self.seconds[-1] + slope * (rows - self.rows[-1]) + deeper


def fit_latency(measured: Mapping[int, float]) -> RowLatency:
    """The curve through medians {rows: seconds}. Raises UserError for fewer than two sizes."""
    if len(measured) < 2:
        raise UserError(f"tree: step times of at least two sizes make a curve, got {len(measured)}")
    rows = sorted(measured)
    return RowLatency(tuple(rows), tuple(np.maximum.accumulate([measured[r] for r in rows]).tolist()))


@dataclasses.dataclass(frozen=True)
class Option:
    """A shape worth trying.

    Attributes:
      name: what it is, in words.
      shape: trees, or the specification of a budget.
      rows: R, rows of a step, the padding of states included.
      tokens: per step, as expected.
      predicted: tokens per second, for one prompt.
    """

    name: str
    shape: TreePlan | str
    rows: float
    tokens: float
    predicted: float


def make_option(name: str, plan: TreePlan, latency: RowLatency, probes: int, probe_rows: float) -> Option:
    """A plan with its rows and predicted speed; the arguments of `rank_options`."""
    rows = plan.num_nodes + (plan.num_probes * probe_rows if probes else 0)
    tokens = plan.expected_tokens
    return Option(name, plan, rows, tokens, tokens / latency(rows, plan.depth))


def rank_options(
    accuracy: np.ndarray, latency: RowLatency, max_rows: int, probes: int, probe_rows: float
) -> list[Option]:
    """The best tree of every number of rows, by predicted tokens per second.

    Args:
      accuracy: [M, K].
      latency: of this machine.
      max_rows: rows of a step at most.
      probes: distances a node may carry probes for; 0 for methods that draft after the pass.
      probe_rows: rows per probe.
    """
    best: dict[float, Option] = {}
    for name, plan in _plans(np.asarray(accuracy), max_rows, probes, probe_rows):
        option = make_option(name, plan, latency, probes, probe_rows)
        if plan.depth and option.rows <= max_rows:
            best[option.rows] = max(option, best.get(option.rows, option), key=lambda option: option.predicted)
    return sorted(best.values(), key=lambda option: -option.predicted)


def _plans(accuracy: np.ndarray, max_rows: int, probes: int, probe_rows: float) -> Iterator[tuple[str, TreePlan]]:
    """Chains, sparse trees of every size, and dynamic trees of every size and balance of candidates and probes."""
    for length in range(1, len(accuracy) + 1):
        yield f"chain:{length}", expected(chain(length), accuracy)
    sizes = [n for n in range(2, max_rows + 1) if n < 16 or (n < 64 and n % 8 == 0) or n % 32 == 0]
    for depth in range(1, len(accuracy) + 1):
        for nodes in sizes:
            yield f"sparse:{nodes} of depth {depth}", sparse_tree(accuracy[:depth], nodes)
    for root_probes in range(1, probes + 1):
        for budget in sizes:
            for weight in (0.5, 1, 2):  # a state's candidates and probes are padded to the most of any state
                for least in (0, 1):
                    plan = dynamic_sparse_tree(
                        accuracy, budget, root_probes=root_probes, probe_cost=weight * probe_rows, min_probes=least
                    ).trimmed(root_probes)
                    yield f"dynamic:{budget} ({root_probes} at the root, {least} at least, weight {weight:g})", plan
