"""Topologies of the papers: which candidates to verify.

chain            0 ─ 0 ─ 0, the best candidate of every distance     (BiTA, full tree with k = 1)
straightforward  the same, but only the root carries probes          (BiTA 3.2)
cartesian        every combination of the k best                     (BiTA, full tree)
efficient        only the chain of best ones branches: linear, not exponential, in the depth (BiTA 3.2)
sparse           the likeliest nodes                                 (Medusa; PPD 5.3)
medusa           those of Medusa's heads for Vicuna-7B, as published (Amphista A.1)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxspec.errors import UserError
from jaxspec.trees.arrays import Path
from jaxspec.trees.plan import State, TreePlan, check_accuracy, from_paths, make_plan

_LARGEST = 4096  # nodes
# `mc_sim_7b_63` of Medusa's released code (medusa_choices.py): paths by ranks, in the order in which they were added
_MEDUSA = (
    "0", "00", "1", "01", "2", "000", "10", "02", "3", "03", "4", "04", "20", "05", "001", "5", "06", "6", "07", "010",
    "11", "7", "08", "002", "30", "09", "8", "9", "100", "020", "12", "003", "40", "21", "004", "005", "0000", "011",
    "006", "030", "50", "13", "007", "008", "009", "60", "040", "14", "70", "012", "200", "31", "22", "80", "050", "15",
    "101", "021", "90", "060", "0001", "16", "070",
)  # fmt: skip


def chain(length: int) -> TreePlan:
    """The best candidate of every distance, `length` of them."""
    if length < 1:
        raise UserError(f"tree: a chain needs at least one candidate, got {length}")
    return from_paths([(0,) * depth for depth in range(1, length + 1)])


def straightforward(length: int) -> TreePlan:
    """A chain of up to `length` candidates whose root alone carries probes, `length` of them (BiTA Figure 4).

    Where c candidates were accepted, the first c probes have served; the others still predict what follows.
    """
    longest = chain(length).states[0].paths
    states = [State(longest[:n], (length,) + (0,) * n, n, borrows=True) for n in range(length + 1)]
    return make_plan(states)


def cartesian(widths: Sequence[int]) -> TreePlan:
    """Every path through the `widths[m]` best candidates of each distance m + 1."""
    _check_widths(widths, sum(math.prod(widths[:depth]) for depth in range(1, len(widths) + 1)))
    levels = [itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1)]
    return from_paths([path for level in levels for path in level])


def efficient(widths: Sequence[int]) -> TreePlan:
    """The `widths[m]` best candidates of each distance m + 1 behind the best ones of the distances before.

    BiTA's default is 5 for every distance; its released code thins the levels, 5, 4, 3.
    """
    _check_widths(widths, sum(widths))
    return from_paths([(*(0,) * depth, rank) for depth, width in enumerate(widths) for rank in range(width)])


def sparse_tree(accuracy: np.ndarray, num_nodes: int) -> TreePlan:
    """The tree of `num_nodes` nodes with the largest expected accepted length (Medusa; PPD Proposition 5.6.1).

    A node is accepted with the product of the accuracies on its path, and never likelier than its parent, so
    taking the likeliest node next is optimal.

    Args:
      accuracy: [M, K], the probability that the rank-k candidate at distance m + 1 is right.
      num_nodes: nodes, the root included.

    Returns:
      A plan of one tree, smaller than asked for when `accuracy` holds no more nodes with a positive probability.

    Raises:
      UserError: an accuracy outside [0, 1], a distance whose accuracies sum to more than 1, or num_nodes < 1.
    """
    accuracy = check_accuracy(accuracy)
    _check_nodes(num_nodes)
    distances, ranks = accuracy.shape
    chosen: list[Path] = []
    frontier = [(-accuracy[0, k], (k,)) for k in range(ranks)]
    heapq.heapify(frontier)
    while frontier and len(chosen) < num_nodes - 1:
        negative, path = heapq.heappop(frontier)
        if negative == 0:
            break
        chosen.append(path)
        if len(path) < distances:
            for k in range(ranks):
                heapq.heappush(frontier, (negative * accuracy[len(path), k], (*path, k)))
    return from_paths(chosen, accuracy)


def medusa(num_nodes: int = 64) -> TreePlan:
    """The first nodes of Medusa's tree, the root included; all 64 are what Amphista drafts too (A.1, Figure 4).

    Raises:
      UserError: more nodes than it has.
    """
    _check_nodes(num_nodes, most=len(_MEDUSA) + 1)
    return from_paths([tuple(map(int, path)) for path in _MEDUSA[: num_nodes - 1]])


def random_tree(distances: int, ranks: int, num_nodes: int, seed: int = 0) -> TreePlan:
    """Nodes grown at random: the control of PPD's Figure 6.6."""
    _check_nodes(num_nodes)
    rng = np.random.default_rng(seed)
    chosen: list[Path] = []
    frontier = [(k,) for k in range(ranks)]
    while frontier and len(chosen) < num_nodes - 1:
        path = frontier.pop(rng.integers(len(frontier)))
        chosen.append(path)
        if len(path) < distances:
            frontier += [(*path, k) for k in range(ranks)]
    return from_paths(chosen)


def _check_widths(widths: Sequence[int], nodes: int) -> None:
    if not widths or min(widths) < 1:
        raise UserError(f"tree: every level needs at least one candidate, got widths {list(widths)}")
    if nodes > _LARGEST:
        raise UserError(f"tree: widths {list(widths)} make {nodes} nodes, more than {_LARGEST}")


def _check_nodes(num_nodes: int, most: int = _LARGEST) -> None:
    if not 1 <= num_nodes <= most:
        raise UserError(f"tree: the number of nodes must be at least 1 (the root) and at most {most}, got {num_nodes}")
