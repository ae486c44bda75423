"""The arrays of fixed trees, made on the host from paths of candidate ranks."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.decoding.tree import Tree
from jaxspec.errors import UserError

Path = tuple[int, ...]


def check_paths(paths: Sequence[Path]) -> list[Path]:
    """Sort paths by level and rank and see that they form a tree.

    Args:
      paths: one tuple of candidate ranks per node, the root's empty path left out; (0, 2) is the third candidate
        at distance 2 below the best one at distance 1.

    Raises:
      UserError: a negative rank, a duplicate, or a path whose parent is missing.
    """
    ordered = sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
    if () in ordered:
        raise UserError("tree: the root's empty path is implied, leave it out")
    known: set[Path] = {()}
    for path in ordered:
        if min(path) < 0:
            raise UserError(f"tree: path {list(path)} has a negative rank")
        if path in known:
            raise UserError(f"tree: path {list(path)} occurs twice")
        if path[:-1] not in known:
            raise UserError(f"tree: path {list(path)} comes without its parent {list(path[:-1])}")
        known.add(path)
    return ordered


def build_tree(
    paths: Sequence[Path], distances: int = 0, probes: Sequence[int] | None = None, borrows: bool = False
) -> Tree:
    """The static arrays of a tree.

    Args:
      paths: every node but the root, as candidate ranks from the root down (Medusa's format).
      distances: M, probes a node may carry.
      probes: number of probes of every node in the order root, then `paths` sorted by level and rank; default
        as many for each as a tree of this depth can use.
      borrows: where a node has no probe of its own for some token, it takes its parent's that predicts the same one.

    Returns:
      A tree without padding.

    Raises:
      UserError: the paths do not form a tree, or one is longer than `distances` (where there are any).
    """
    nodes: list[Path] = [(), *check_paths(paths)]
    if distances and len(nodes[-1]) > distances:
        raise UserError(f"tree: path {list(nodes[-1])} is longer than the {distances} distances that have candidates")
    probes = [min(distances, len(nodes[-1]))] * len(nodes) if probes is None else list(probes)
    if len(probes) != len(nodes) or any(not 0 <= n <= distances for n in probes):
        raise UserError(f"tree: {len(nodes)} nodes need as many probe counts between 0 and {distances}, got {probes}")
    index = {path: i for i, path in enumerate(nodes)}
    ancestors = np.zeros((len(nodes), len(nodes)), bool)
    for path, i in index.items():
        ancestors[i, [index[path[:n]] for n in range(len(path) + 1)]] = True
    steps, owners = np.nonzero(np.array(probes) > np.arange(distances)[:, None])  # by distance; steps are one less
    probe_of = np.full((len(nodes), distances), -1, np.int32)
    probe_of[owners, steps] = np.arange(len(owners))
    parent = np.array([index[path[:-1]] for path in nodes], np.int32)
    inner = collections.Counter(map(len, {path[:-1] for path in nodes[1:]}))
    for node in range(1, len(nodes)) if borrows else ():  # parents come first; their probes are a distance further
        of_parent = np.append(probe_of[parent[node], 1:], np.int32(-1))
        probe_of[node] = np.where(probe_of[node] < 0, of_parent, probe_of[node])
    return Tree(
        parent=parent,
        depth=np.array([len(path) for path in nodes], np.int32),
        rank=np.array([path[-1] if path else 0 for path in nodes], np.int32),
        live=np.ones(len(nodes), bool),
        ancestors=ancestors,
        probe_owner=owners.astype(np.int32),
        probe_distance=(steps + 1).astype(np.int32),
        probe_live=np.ones(len(owners), bool),
        probe_of=probe_of,
        next_state=np.zeros(len(nodes), np.int32),
        max_depth=len(nodes[-1]),
        max_rank=1 + max(path[-1] if path else 0 for path in nodes),
        probe_ends=tuple(np.searchsorted(steps, range(distances), side="right").tolist()),
        inner=tuple(1 << (inner[depth] - 1).bit_length() for depth in range(len(nodes[-1]))),
    )


def pad_tree(
    tree: Tree,
    num_nodes: int,
    num_probes: int,
    max_depth: int,
    max_rank: int,
    probe_ends: tuple[int, ...] | None = None,
    inner: tuple[int, ...] | None = None,
) -> Tree:
    """A tree with further nodes and probes that are not live, so that trees of one padded size share a program.

    Args:
      tree: what to pad.
      num_nodes: N.
      num_probes: Q.
      max_depth: P.
      max_rank: candidates per distance.
      probe_ends: (E_1 .. E_M), at least the tree's own; default Q each, which holds for every tree of this size.
      inner: (W_0 .. W_P-1), at least the tree's own; default N each but the root's 1, likewise.

    Raises:
      UserError: the tree is larger than that.
    """
    extra, more = num_nodes - tree.num_nodes, num_probes - tree.num_probes
    inner = inner or (1, *[num_nodes] * (max_depth - 1))[:max_depth]
    if min(extra, more, max_depth - tree.max_depth, max_rank - tree.max_rank) < 0:
        raise UserError(
            f"tree: {tree.num_nodes} nodes, {tree.num_probes} probes, depth {tree.max_depth} and rank {tree.max_rank} "
            f"do not fit the padded size {num_nodes}, {num_probes}, {max_depth} and {max_rank}"
        )

    of_nodes = ("parent", "depth", "rank", "live", "next_state")
    return Tree(
        **{name: np.pad(getattr(tree, name), (0, extra)) for name in of_nodes},
        ancestors=np.pad(tree.ancestors, (0, extra)),
        probe_owner=np.pad(tree.probe_owner, (0, more)),
        probe_distance=np.pad(tree.probe_distance, (0, more), constant_values=tree.probe_of.shape[1]),
        probe_live=np.pad(tree.probe_live, (0, more)),
        probe_of=np.pad(tree.probe_of, ((0, extra), (0, 0)), constant_values=-1),
        max_depth=max_depth,
        max_rank=max_rank,
        probe_ends=(*probe_ends[:-1], num_probes) if probe_ends else (num_probes,) * len(tree.probe_ends),
        inner=inner,
    )


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """Trees padded to the size of the largest, with a leading axis: the states of a dynamic tree."""
    sizes = [(t.num_nodes, t.num_probes, t.max_depth, t.max_rank) for t in trees]
    largest = tuple(map(max, zip(*sizes, strict=True)))
    ends = tuple(map(max, zip(*(tree.probe_ends for tree in trees), strict=True)))
    inner = tuple(map(max, itertools.zip_longest(*(tree.inner for tree in trees), fillvalue=0)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(pad_tree(tree, *largest, ends, inner) for tree in trees))
