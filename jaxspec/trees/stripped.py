"""The dynamic sparse tree as the thesis builds it (PPD 5.6.2, 5.6.3): candidates first, then probes stripped greedily.

For every number of candidates, the likeliest of each state carry all the probes there are, and those whose loss costs
least go until the rows suffice. The thesis gives all states one number of candidates, as here; its released code tries
all pairs of numbers for two states. `dynamic_sparse_tree` chooses candidates and probes together and is never worse.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from jaxspec.trees.arrays import Path
from jaxspec.trees.builders import sparse_tree
from jaxspec.trees.dynamic import check_budget, unsure
from jaxspec.trees.plan import State, TreePlan, check_accuracy, endings, expected, make_plan


def stripped_tree(accuracy: np.ndarray, max_rows: int, probe_cost: float = 1.0) -> TreePlan:
    """The trees that the thesis's procedure finds within a budget of rows, for the best number of candidates.

    Args:
      accuracy: [M, K], the probability that the rank-k candidate at distance m + 1 is right.
      max_rows: candidates and probes of a tree together, the root and its M probes not counted.
      probe_cost: rows that a probe counts for, as in `dynamic_sparse_tree`.

    Returns:
      One state per number of probes, 1 to M.

    Raises:
      UserError: accuracies that are none, or a budget or cost out of range.
    """
    table, cost = check_accuracy(accuracy), check_budget(max_rows, probe_cost)
    counts = range(int(max_rows / (1 + cost)) + 1)  # every candidate keeps one probe
    plans = (_with_candidates(unsure(table), count, max_rows, cost) for count in counts)
    return expected(max(plans, key=lambda plan: plan.expected_tokens), table)


def _with_candidates(accuracy: np.ndarray, count: int, max_rows: int, cost: Fraction) -> TreePlan:
    """Trees of so many candidates each, or of as many as there are."""
    best = [sparse_tree(accuracy[:depth], count + 1) for depth in range(1, len(accuracy) + 1)]
    tokens = [1.0, *(plan.expected_tokens for plan in best)]  # 1 + f(T_i)
    states = []
    for depth, plan in enumerate(best, 1):
        paths = plan.states[0].paths
        _, last = endings(paths, accuracy)
        allowed = int((max_rows - len(paths)) / cost)
        states.append(State(paths, (len(accuracy), *_strip(paths, last, np.diff(tokens), allowed)), depth))
    return make_plan(states, accuracy)


def _strip(paths: Sequence[Path], last: Mapping[Path, float], gains: np.ndarray, allowed: int) -> tuple[int, ...]:
    """Probes of every candidate once all but so many have gone, each time the one that is missed least.

    Args:
      paths: candidates.
      last: the probability that each is the last accepted one, as which we read p(c) of Proposition 5.6.3.
      gains: [M], what the i-th probe of a candidate adds to the next step: f(T_i) - f(T_{i-1}).
      allowed: probes to keep, at least one each.
    """
    probes = dict.fromkeys(paths, len(gains))
    losses = [(last[path] * gains[-1], path) for path in paths]
    heapq.heapify(losses)
    for _ in range(len(gains) * len(paths) - allowed):
        _, path = heapq.heappop(losses)
        probes[path] -= 1
        if probes[path] > 1:
            heapq.heappush(losses, (last[path] * gains[probes[path] - 1], path))
    return tuple(probes.values())
