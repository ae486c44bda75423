"""A draft tree as static arrays, padded to a fixed size and passed to jit as data.

root ── a ── c        nodes   0 root, 1 a, 2 b, 3 c      parent [0, 0, 0, 1]   depth [0, 1, 1, 2]
     └─ b             probes  attached to nodes; each sits `distance` positions after its owner
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import UserError

Path = tuple[int, ...]


@flax.struct.dataclass
class Tree:
    """Topology of a draft tree with its probes. All arrays may carry leading axes (a batch, a stack of states).

    Attributes:
      parent: [N] int32; the root is its own parent.
      depth: [N] int32; the root has 0.
      rank: [N] int32, which candidate of its distance a node takes, 0 the most probable.
      live: [N] bool; False for padding.
      ancestors: [N, N] bool; row n marks the path from the root to n, both included.
      probe_owner: [Q] int32, the node a probe belongs to; probes are ordered by distance.
      probe_distance: [Q] int32, 1 .. M.
      probe_live: [Q] bool; False for padding.
      probe_of: [N, M] int32, the probe at distance m + 1 of each node; -1 for none.
      next_state: [N] int32, which tree of the stack the next step verifies when this node is the last accepted.
      max_depth: deepest level the padded size allows (static).
      max_rank: number of candidates per distance the padded size allows (static).
      probe_ends: (E_1 .. E_M), the first E_d probes hold all those at distances up to d, in a stack perhaps some of a
        greater one; a part of the padded size (static).
      inner: (W_0 .. W_P-1), at most so many nodes of each depth have children, a power of two, so that similar trees
        share a program; a part of the padded size (static).
    """

    parent: jax.Array
    depth: jax.Array
    rank: jax.Array
    live: jax.Array
    ancestors: jax.Array
    probe_owner: jax.Array
    probe_distance: jax.Array
    probe_live: jax.Array
    probe_of: jax.Array
    next_state: jax.Array
    max_depth: int = flax.struct.field(pytree_node=False)
    max_rank: int = flax.struct.field(pytree_node=False)
    probe_ends: tuple[int, ...] = flax.struct.field(pytree_node=False)
    inner: tuple[int, ...] = flax.struct.field(pytree_node=False)

    @property
    def num_nodes(self) -> int:
        """N, padding included."""
        return self.parent.shape[-1]

    @property
    def num_probes(self) -> int:
        """Q."""
        return self.probe_owner.shape[-1]

    def first(self, count: int) -> Tree:
        """The first nodes of a batch of trees, with all probes: the others are padding, as are probes that they own."""
        named = {name: getattr(self, name)[:, :count] for name in _OF_NODES}
        named |= {"ancestors": self.ancestors[:, :count, :count]}
        return self.replace(**named, probe_owner=jnp.minimum(self.probe_owner, count - 1))


def owned_probes(owners: jax.Array, distances: int, nodes: int) -> dict[str, Any]:
    """The fields of a batch of trees that say which probes there are: one at every distance behind each of some nodes.

    Args:
      owners: [B, O] int32, those nodes.
      distances: M.
      nodes: N of the trees.
    """
    (B, count), M = owners.shape, distances
    numbers = jnp.arange(count)[:, None] + count * jnp.arange(M)  # [O, M], by distance
    none = jnp.full((B, nodes, M), -1, jnp.int32)
    return {
        "probe_owner": jnp.tile(owners, (1, M)).astype(jnp.int32),
        "probe_distance": jnp.broadcast_to(jnp.repeat(jnp.arange(1, M + 1), count), (B, count * M)),
        "probe_of": none.at[jnp.arange(B)[:, None], owners].set(numbers.astype(jnp.int32)),
        "probe_ends": tuple(count * d for d in range(1, M + 1)),
    }


_OF_NODES = ("parent", "depth", "rank", "live", "probe_of", "next_state")


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
    probe_of = np.full((len(nodes), distances), -1, np.int32)
    owners, spans = [], []
    for distance in range(1, distances + 1):
        for node, count in enumerate(probes):
            if count >= distance:
                probe_of[node, distance - 1] = len(owners)
                owners.append(node)
                spans.append(distance)
    parent = np.array([index[path[:-1]] for path in nodes], np.int32)
    inner = [0] * len(nodes[-1])
    for path in {path[:-1] for path in nodes[1:]}:
        inner[len(path)] += 1
    for node in range(1, len(nodes)) if borrows else ():  # parents come first; their probes are a distance further
        of_parent = np.append(probe_of[parent[node], 1:], np.int32(-1))
        probe_of[node] = np.where(probe_of[node] < 0, of_parent, probe_of[node])
    return Tree(
        parent=parent,
        depth=np.array([len(path) for path in nodes], np.int32),
        rank=np.array([path[-1] if path else 0 for path in nodes], np.int32),
        live=np.ones(len(nodes), bool),
        ancestors=ancestors,
        probe_owner=np.array(owners, np.int32),
        probe_distance=np.array(spans, np.int32),
        probe_live=np.ones(len(owners), bool),
        probe_of=probe_of,
        next_state=np.zeros(len(nodes), np.int32),
        max_depth=len(nodes[-1]),
        max_rank=1 + max(path[-1] if path else 0 for path in nodes),
        probe_ends=tuple(np.searchsorted(spans, range(1, distances + 1), side="right").tolist()),
        inner=tuple(1 << (count - 1).bit_length() for count in inner),
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

    def fit(x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, extra))

    distance = np.concatenate([tree.probe_distance, np.full(more, tree.probe_of.shape[1], np.int32)])
    return Tree(
        parent=fit(tree.parent),
        depth=fit(tree.depth),
        rank=fit(tree.rank),
        live=fit(tree.live),
        ancestors=np.pad(tree.ancestors, ((0, extra), (0, extra))),
        probe_owner=np.pad(tree.probe_owner, (0, more)),
        probe_distance=distance,
        probe_live=np.pad(tree.probe_live, (0, more)),
        probe_of=np.pad(tree.probe_of, ((0, extra), (0, 0)), constant_values=-1),
        next_state=fit(tree.next_state),
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


def select_trees(stack: Tree, state: jax.Array) -> Tree:
    """One tree of a stack per batch row: state [B] int32 to arrays with a batch axis."""
    return jax.tree.map(lambda x: jnp.asarray(x)[state], stack)
