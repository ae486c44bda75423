"""The dynamic sparse tree (PPD chapter 5), found exactly.

Decoding is a Markov chain over states: the number of probes on the last accepted node, which is how deep the next
tree can be. Choosing a tree for each state, with so many probes on each of its nodes, to make the most tokens per
step is an average-reward decision process, and policy iteration solves it: given how much better it is to be in one
state than in another (the bias h), the best tree of a state under a budget of rows is a knapsack on a tree.

A candidate v that is reached with probability P(v) and carries n probes adds

    P(v) * (1 + h[n] - h[probes of its parent])

because accepting it brings one token and moves the point from which the next step starts. The thesis strips probes
greedily instead (Proposition 5.6.3, `stripped_tree`); this search can only be better.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

from jaxspec.errors import UserError
from jaxspec.trees.arrays import Path
from jaxspec.trees.plan import State, TreePlan, check_accuracy, endings, expected

_LARGEST = 1024  # rows: the search grows with their square
_ROUNDS = 100
_ALMOST_ONE = 1 - 1e-6


def dynamic_sparse_tree(
    accuracy: np.ndarray,
    max_rows: int,
    *,
    root_probes: int | None = None,
    probe_cost: float = 1.0,
    min_probes: int = 1,
) -> TreePlan:
    """The trees with the most expected tokens per step among all within a budget of rows.

    Args:
      accuracy: [M, K], the probability that the rank-k candidate at distance m + 1 is right.
      max_rows: candidates and probes of a tree together, the root and the root's own probes not counted.
      root_probes: probes the root carries; default M.
      probe_cost: rows that a probe counts for: n for an ensemble of n, a fraction for probes that join the rows
        at a middle layer (taken as the nearest fraction of at most eight parts, at least one eighth).
      min_probes: probes that a candidate carries at least: 1 in the thesis; with 0 there is one more state, in
        which nothing is drafted.

    Returns:
      One state per number of probes, `min_probes` to M.

    Raises:
      UserError: accuracies that are none, or a budget, cost or number of probes out of range.
    """
    table = check_accuracy(accuracy)
    distances = len(table)
    root_probes = distances if root_probes is None else root_probes
    cost = check_budget(max_rows, probe_cost)
    if min_probes not in (0, 1) or not max(min_probes, 1) <= root_probes <= distances:
        raise UserError(
            f"tree: root_probes must be between 1 and {distances} and min_probes 0 or 1, got {root_probes} and "
            f"{min_probes}"
        )
    search = _Search(unsure(table), max_rows, root_probes, cost, min_probes)
    bias, best, before = np.zeros(distances + 1), None, None
    for _ in range(_ROUNDS):
        states = tuple(search.state(needs, bias) for needs in range(min_probes, distances + 1))
        plan = expected(TreePlan(states), search.accuracy)
        if best is None or plan.expected_tokens > best.expected_tokens + 1e-12:
            best = plan
        if plan.states == before:  # not before: a round may better rare states alone, and the rate in the next one
            break
        bias, before = search.bias(plan), plan.states
    return expected(best, table)


def check_budget(max_rows: int, probe_cost: float) -> Fraction:
    """The rows that a probe counts for as a fraction. Raises UserError for that or a budget out of range."""
    if not isinstance(max_rows, int | np.integer) or not 0 <= max_rows <= _LARGEST:
        raise UserError(f"tree: max_rows must be a whole number from 0 to {_LARGEST}, got {max_rows}")
    if not 0 < probe_cost < np.inf:
        raise UserError(f"tree: probe_cost must be a positive number, got {probe_cost}")
    return max(Fraction(probe_cost).limit_denominator(8), Fraction(1, 8))


def unsure(accuracy: np.ndarray) -> np.ndarray:
    """Accuracies for a search: some step always falls back on the root, so that the chain has one recurrent class."""
    return accuracy / np.maximum(accuracy.sum(axis=1, keepdims=True) / _ALMOST_ONE, 1)


@dataclasses.dataclass(frozen=True)
class _Search:
    """The best tree of one state, given the bias of all.

    Attributes:
      accuracy: [M, K].
      max_rows: budget.
      root_probes: of the root.
      probe_cost: rows per probe.
      min_probes: of a candidate.
    """

    accuracy: np.ndarray
    max_rows: int
    root_probes: int
    probe_cost: Fraction
    min_probes: int

    def bias(self, plan: TreePlan) -> np.ndarray:
        """h [M + 1] by number of probes: h + gain = tokens + transition @ h, with h = 0 where the root leads."""
        count = len(plan.states)
        tokens = [sum(endings(state.paths, self.accuracy)[0].values()) - 1 for state in plan.states]
        equations = np.zeros((count + 1, count + 1))
        equations[:count, :count] = np.eye(count) - plan.transition
        equations[:count, count] = 1  # the gain
        equations[count, plan.next_state(self.root_probes)] = 1
        solved = np.linalg.lstsq(equations, np.append(tokens, 0.0), rcond=None)[0][:count]
        return np.array([solved[plan.next_state(n)] for n in range(len(self.accuracy) + 1)])

    def state(self, needs: int, bias: np.ndarray) -> State:
        """The best tree of depth `needs` at most.

        Bottom up: `forest[np][b]` is the value of all that hangs below a node with np probes, per unit of the
        probability of that node, with at most b units of rows; a child is worth its accuracy times
        `single[np][b] = max over n of 1 + h[n] - h[np] + forest of the next level[n][b - cost(n)]`.
        """
        probe_cost, node_cost = self.probe_cost.as_integer_ratio()
        budget = self.max_rows * node_cost
        labels = range(self.min_probes, len(self.accuracy) + 1)
        forest = {n: np.zeros(budget + 1) for n in labels}
        levels = []
        for level in reversed(range(needs)):
            parents = labels if level else (self.root_probes,)
            choices, grown = {}, {}
            for parent in parents:
                options = np.full((len(labels), budget + 1), -np.inf)
                for row, n in enumerate(labels):
                    first = node_cost + n * probe_cost
                    if first <= budget:
                        options[row, first:] = 1 + bias[n] - bias[parent] + forest[n][: budget + 1 - first]
                picked, single = options.argmax(axis=0), options.max(axis=0)
                grown[parent], shares = _share_out(self.accuracy[level], single)
                choices[parent] = picked, shares
            levels.append(choices)
            forest = grown
        paths = self._collect(levels[::-1], labels, node_cost, probe_cost, budget)
        ordered = sorted(paths, key=lambda path: (len(path), path))
        probes = (self.root_probes, *(paths[path] for path in ordered))
        return State(tuple(ordered), probes, needs)

    def _collect(
        self, levels: list[dict], labels: range, node_cost: int, probe_cost: int, budget: int
    ) -> dict[Path, int]:
        """Walk the choices from the root down: {path: probes}."""
        found: dict[Path, int] = {}
        pending = [((), self.root_probes, budget)]
        while pending:
            path, parent, budget = pending.pop()
            if len(path) == len(levels):
                continue
            picked, shares = levels[len(path)][parent]
            for rank in reversed(range(len(shares))):
                units = shares[rank, budget]
                budget -= units
                if units:
                    n = labels[picked[units]]
                    found[*path, rank] = n
                    pending.append(((*path, rank), n, units - node_cost - n * probe_cost))
        return found


def _share_out(accuracy: np.ndarray, single: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide a budget among the ranks of one level, each child worth its accuracy times `single` of its share.

    Args:
      accuracy: [K] of the ranks.
      single: [budget + 1], the value of a child with at most so many units; -inf where they do not pay for one.

    Returns:
      The best value [budget + 1] of at most so many units, and the share of the last of the first k + 1 ranks
      [K, budget + 1].
    """
    total = np.zeros(len(single))
    shares = np.zeros((len(accuracy), len(single)), int)
    useful = [units for units in np.flatnonzero(single > 0) if units == 0 or single[units] > single[units - 1]]
    for rank, right in enumerate(accuracy):
        before = total.copy()
        for units in useful if right > 0 else ():
            value = before[: len(single) - units] + right * single[units]
            better = value > total[units:] + 1e-15
            total[units:] = np.where(better, value, total[units:])
            shares[rank, units:] = np.where(better, units, shares[rank, units:])
    return total, shares
