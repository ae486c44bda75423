"""Which candidates to verify: builders of draft-tree topologies."""

from __future__ import annotations

import heapq

import numpy as np

from jaxspec.errors import UserError
from jaxspec.tree.tree import Path


def sparse_paths(accuracy: np.ndarray, num_nodes: int) -> list[Path]:
    """The tree of `num_nodes` nodes with the largest expected accepted length (Medusa; PPD Proposition 5.6.1).

    A node is accepted with the product of the accuracies on its path, and never likelier than its parent, so
    taking the likeliest node next is optimal.

    Args:
      accuracy: [M, K], the probability that the rank-k candidate at distance m + 1 is right.
      num_nodes: nodes, the root included.

    Returns:
      The paths of all nodes but the root; fewer than asked for when `accuracy` holds no more of them with a
      positive probability.

    Raises:
      UserError: an accuracy outside [0, 1], a distance whose accuracies sum to more than 1, or num_nodes < 1.
    """
    try:
        accuracy = np.asarray(accuracy, float)
    except ValueError:  # rows of unequal length
        accuracy = np.empty(0)
    if accuracy.ndim != 2 or not accuracy.size or not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise UserError("tree: accuracies must be an [M, K] table of values in [0, 1]")
    if (accuracy.sum(axis=1) > 1 + 1e-4).any():
        raise UserError(f"tree: accuracies of one distance sum to {accuracy.sum(axis=1).max():.3f}, more than 1")
    if num_nodes < 1:
        raise UserError(f"tree: the number of nodes must be at least 1 (the root), got {num_nodes}")
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
    return chosen
