"""Plans of draft trees as paths: one tree for a static method, one per state for a dynamic one.

PPD 5.4: how many probes the last accepted node carried decides how deep the next tree can be. So a dynamic plan
holds one tree per number of probes, and every node of every tree says, by its probes, which tree follows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decoding.tree import Tree
from jaxspec.errors import UserError
from jaxspec.trees.arrays import Path, build_tree, check_paths, stack_trees


@dataclasses.dataclass(frozen=True)
class State:
    """One tree of a plan.

    Attributes:
      paths: every node but the root, as candidate ranks from the root down, sorted by level and rank.
      probes: number of probes of every node, the root first.
      needs: k, how many distances must have candidates to fill this tree: at least its depth.
      borrows: a node also uses its ancestors' probes for what its own do not predict.
    """

    paths: tuple[Path, ...]
    probes: tuple[int, ...]
    needs: int
    borrows: bool = False

    @property
    def known(self) -> tuple[int, ...]:
        """For every node, how many distances have candidates once it is the last accepted one."""
        if not self.borrows:
            return self.probes
        known: dict[Path, int] = {}
        for path, own in zip(((), *self.paths), self.probes, strict=True):
            known[path] = max(own, known[path[:-1]] - 1 if path else 0)
        return tuple(known.values())


@dataclasses.dataclass(frozen=True)
class TreePlan:
    """Draft trees and the way from one to the next. Built by the functions of this package.

    The host-side part, paths to search and to keep in files; `StaticTree` is their arrays in the jitted loop.

    Attributes:
      states: ordered by `needs`; a step that ends on a node with candidates for n distances is followed by the last
        one that needs at most n.
      expected_tokens: tokens per step, 1 + R(T) of PPD's Proposition 5.6.4, if accuracies are known and independent.
      transition: [states, states], the probability that one follows another, or None as above.
    """

    states: tuple[State, ...]
    expected_tokens: float | None = None
    transition: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def num_nodes(self) -> int:
        """N, nodes of the largest tree, the root included."""
        return max(len(state.paths) for state in self.states) + 1

    @property
    def num_probes(self) -> int:
        """Q, probes of the tree that has most of them."""
        return max(sum(state.probes) for state in self.states)

    @property
    def depth(self) -> int:
        """Candidates on the longest path."""
        return max((len(path) for state in self.states for path in state.paths), default=0)

    def next_state(self, known: int) -> int:
        """Index of the state that follows a node with candidates for so many distances."""
        return max((i for i, state in enumerate(self.states) if state.needs <= known), default=0)

    def trimmed(self, root_probes: int) -> TreePlan:
        """The plan without states that are never reached, or that repeat the one before: they only pad the others."""
        pending, seen = [self.next_state(root_probes)], set()
        while pending:
            state = pending.pop()
            if state not in seen:
                seen.add(state)
                pending += {self.next_state(known) for known in self.states[state].known}
        kept: list[State] = []
        for state in (self.states[i] for i in sorted(seen)):
            if not kept or dataclasses.replace(state, needs=kept[-1].needs) != kept[-1]:
                kept.append(state)
        return TreePlan(tuple(kept), self.expected_tokens)

    def arrays(self, distances: int) -> Tree:
        """The trees as one padded stack of arrays.

        Args:
          distances: M, probes a node of the method may carry; 0 for methods without probes.
        """
        trees = []
        for state in self.states:
            tree = build_tree(state.paths, distances, state.probes if distances else None, state.borrows)
            follows = np.array([self.next_state(known) for known in state.known], np.int32)
            trees.append(tree.replace(next_state=follows))
        return stack_trees(trees)


def make_plan(states: Sequence[State], accuracy: np.ndarray | None = None) -> TreePlan:
    """Check the states and, where accuracies are given, work out what to expect of them.

    Raises:
      UserError: paths that form no tree, a wrong number of probe counts, or a node after which nothing fits.
    """
    checked = []
    for state in sorted(states, key=lambda state: state.needs):
        paths = tuple(check_paths(state.paths))
        if len(state.probes) != len(paths) + 1 or min(state.probes) < 0:
            raise UserError(f"tree: {len(paths) + 1} nodes need as many probe counts, got {list(state.probes)}")
        if paths and len(paths[-1]) > state.needs:
            raise UserError(f"tree: path {list(paths[-1])} is deeper than the {state.needs} distances of its state")
        checked.append(State(paths, tuple(state.probes), state.needs, state.borrows))
    fewest = min((n for state in checked for n in state.known), default=0)
    if not checked or fewest < checked[0].needs:
        raise UserError(f"tree: no state follows a node that knows candidates for {fewest} distances")
    plan = TreePlan(tuple(checked))
    return plan if accuracy is None else expected(plan, accuracy)


def from_paths(paths: Sequence[Path], accuracy: np.ndarray | None = None) -> TreePlan:
    """One tree, as many probes on every node as it is deep: the full sparse tree of PPD 5.3, and static trees."""
    depth = max(map(len, paths), default=0)
    return make_plan([State(tuple(paths), (depth,) * (len(paths) + 1), depth)], accuracy)


def expected(plan: TreePlan, accuracy: np.ndarray) -> TreePlan:
    """The plan with its tokens per step and its transitions, from accuracies [M, K] (PPD 5.6.1, 5.6.4).

    The candidates of a borrowing state come from what is left of the last root's probes, those of larger distances.
    """
    accuracy = check_accuracy(accuracy)
    gains, transition = [], np.zeros((len(plan.states), len(plan.states)))
    for i, state in enumerate(plan.states):
        reach, last = endings(state.paths, accuracy, state.probes[0] - state.needs if state.borrows else 0)
        for path, known in zip(((), *state.paths), state.known, strict=True):
            transition[i, plan.next_state(known)] += last[path]
        gains.append(sum(reach.values()) - 1)
    rate = stationary(transition) @ np.array(gains)
    return dataclasses.replace(plan, expected_tokens=1 + float(rate), transition=transition)


def replayed(plan: TreePlan, texts: Sequence[np.ndarray]) -> float:
    """Tokens per step that a plan makes of texts of which it is known what was drafted everywhere.

    Args:
      plan: the trees.
      texts: [P, M] int each, for P places that follow each other the ranks of the tokens drafted there that are right,
        by distance; -1 where none is.
    """
    return sum(map(len, texts)) / max(sum(count_steps(plan, ranks) for ranks in texts), 1)


def count_steps(plan: TreePlan, ranks: np.ndarray) -> int:
    """The steps that one of the texts of `replayed` takes, [P, M] int."""
    known = [dict(zip(((), *state.paths), state.known, strict=True)) for state in plan.states]
    steps, at, accepted, state = 0, 0, 0, plan.next_state(plan.states[0].probes[0])  # behind a root alone
    while at < len(ranks):
        served = accepted if plan.states[state].borrows else 0  # of the last root's distances
        right = tuple(ranks[at - served, served:].tolist())
        accepted = max(n for n in range(len(right) + 1) if right[:n] in known[state])
        state = plan.next_state(known[state][right[:accepted]])
        at, steps = at + accepted + 1, steps + 1
    return steps


def endings(
    paths: Sequence[Path], accuracy: np.ndarray, served: int = 0
) -> tuple[dict[Path, float], dict[Path, float]]:
    """The probabilities that nodes are accepted, and that they are the last accepted ones, the root first.

    Args:
      paths: of a tree, sorted by level and rank.
      accuracy: [M, K].
      served: distances before those that the candidates come from.
    """
    reach = {(): 1.0}
    for path in paths:
        level, rank = served + len(path) - 1, path[-1]
        right = accuracy[level, rank] if level < len(accuracy) and rank < accuracy.shape[1] else 0.0
        reach[path] = reach[path[:-1]] * right
    last = dict(reach)
    for path in paths:
        last[path[:-1]] -= reach[path]
    return reach, last


def stationary(transition: np.ndarray) -> np.ndarray:
    """The stationary distribution of a chain with one recurrent class: p = p @ transition, sum 1."""
    count = len(transition)
    equations = np.vstack([transition.T - np.eye(count), np.ones(count)])
    return np.linalg.lstsq(equations, np.append(np.zeros(count), 1.0), rcond=None)[0]


def check_accuracy(accuracy: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    """Accuracies as a float array [M, K].

    Raises:
      UserError: no such table, a value outside [0, 1], or a distance whose accuracies sum to more than 1.
    """
    try:
        accuracy = np.asarray(accuracy, float)
    except (TypeError, ValueError):  # rows of unequal length, or no numbers
        accuracy = np.empty(0)
    if accuracy.ndim != 2 or not accuracy.size or not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise UserError("tree: accuracies must be an [M, K] table of values in [0, 1]")
    if (accuracy.sum(axis=1) > 1 + 1e-4).any():
        raise UserError(f"tree: accuracies of one distance sum to {accuracy.sum(axis=1).max():.3f}, more than 1")
    return accuracy


def plan_to_json(plan: TreePlan) -> list[dict[str, Any]]:
    """The states as plain values."""
    return [
        {"needs": s.needs, "paths": [list(p) for p in s.paths], "probes": list(s.probes), "borrows": s.borrows}
        for s in plan.states
    ]


def plan_from_json(value: object, where: str) -> TreePlan:
    """The inverse of `plan_to_json`; a plain list of paths (Medusa's format) is a plan of one tree.

    Raises:
      UserError: anything else, naming `where`.
    """
    try:
        if value and all(isinstance(state, dict) for state in value):
            return make_plan([_state(entry) for entry in value])
        return from_paths(_state({"paths": value, "probes": [], "needs": 0}).paths)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise UserError(f"{where}: neither a list of paths nor a list of tree states") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _state(value: dict) -> State:
    paths, borrows = value["paths"], value.get("borrows", False)
    if not isinstance(paths, list) or not isinstance(borrows, bool):
        raise ValueError
    return State(tuple(map(_whole, paths)), _whole(value["probes"]), _whole([value["needs"]])[0], borrows)


def _whole(value: object) -> Path:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        raise ValueError
    return tuple(value)
