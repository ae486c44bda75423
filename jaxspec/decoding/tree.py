"""A draft tree as arrays, padded to a fixed size and passed to jit as data. `jaxspec.trees` makes those of fixed trees.

root ── a ── c        nodes   0 root, 1 a, 2 b, 3 c      parent [0, 0, 0, 1]   depth [0, 1, 1, 2]
     └─ b             probes  attached to nodes; each sits `distance` positions after its owner
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Tree:
    """Topology of a draft tree with its probes. All arrays may carry leading axes (a batch, a stack of states).

    Attributes:
      parent: [N] int32; the root is its own parent.
      depth: [N] int32; the root has 0.
      rank: [N] int32, which candidate of its distance a node takes, 0 the most probable; None where nodes are chosen.
      live: [N] bool; False for padding.
      ancestors: [N, N] bool; row n marks the path from the root to n, both included.
      probe_owner: [Q] int32, the node a probe belongs to; probes are ordered by distance.
      probe_distance: [Q] int32, 1 .. M.
      probe_live: [Q] bool; False for padding.
      probe_of: [N, M] int32, the probe at distance m + 1 of each node; -1 for none.
      next_state: [N] int32, which tree of the stack the next step verifies when this node is the last accepted;
        None where there is no stack.
      max_depth: deepest level the padded size allows (static).
      max_rank: number of candidates per distance the padded size allows (static).
      probe_ends: (E_1 .. E_M), the first E_d probes hold all those at distances up to d, in a stack perhaps some of a
        greater one; a part of the padded size (static).
      inner: (W_0 .. W_P-1), at most so many nodes of each depth have children, a power of two, so that similar trees
        share a program; a part of the padded size (static).
    """

    parent: jax.Array
    depth: jax.Array
    rank: jax.Array | None
    live: jax.Array
    ancestors: jax.Array
    probe_owner: jax.Array
    probe_distance: jax.Array
    probe_live: jax.Array
    probe_of: jax.Array
    next_state: jax.Array | None
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

    def probes_behind(self, node: jax.Array, distances: int) -> jax.Array:
        """The probes of one node [B] of every tree of a batch, [B, M]; -1 for none, and where the tree has fewer."""
        probes = self.probe_of[jnp.arange(len(node)), node]
        return jnp.pad(probes, ((0, 0), (0, distances - probes.shape[1])), constant_values=-1)

    def first(self, count: int) -> Tree:
        """The first nodes of a batch of trees, with all probes: the others are padding, as are probes that they own."""
        named = {name: x[:, :count] for name in _OF_NODES if (x := getattr(self, name)) is not None}
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


def select_trees(stack: Tree, state: jax.Array) -> Tree:
    """One tree of a stack per batch row: state [B] int32 to arrays with a batch axis."""
    return jax.tree.map(lambda x: jnp.asarray(x)[state], stack)
