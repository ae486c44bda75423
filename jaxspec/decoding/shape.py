"""Shapes: what makes a draft of the offers of its sources.

StaticTree   the papers' trees: a node takes the candidate of its rank
Best         the most probable candidates of all sources, as many as a budget of rows allows
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.decoding.draft import Draft, Drawn, Offer
from jaxspec.decoding.growth import Nodes, grow
from jaxspec.decoding.pace import Pace, in_cheapest_steps
from jaxspec.decoding.tree import Tree, owned_probes, select_trees

# The time of a larger step beyond the smallest one's counts so many times. The largest of many estimates of a worth is
# more often too high than too low, and a busy machine makes rows dearer than they were when they were measured.
_CAUTION = 1.25
# Likewise of sizes with added rows, where others leave these out: what the other sources would offer in place of the
# method's candidates is underrated, as only nodes at hand are counted.
_CAUTION_IF_ADDED = 1.5


@flax.struct.dataclass
class StaticTree:
    """A fixed tree of one source, or a stack of them that follow each other (PPD 5.4).

    The device-side part of fixed trees, a pytree in the jitted loop; `trees.TreePlan` is searched and kept on the host.

    Attributes:
      stack: the trees, with a leading axis.
    """

    stack: Tree

    costs, alone = None, 0  # it has one size, with all rows

    @property
    def depth(self) -> int:
        """P, candidates on the longest path."""
        return self.stack.max_depth

    @property
    def width(self) -> int:
        """Candidates that are wanted at each distance."""
        return self.stack.max_rank

    def begin(self, batch: int) -> list[Tree]:
        """The tree that each source fills first: any will do, nothing is drafted yet and every root carries probes."""
        return [select_trees(self.stack, jnp.zeros(batch, jnp.int32))]

    def follow(self, draft: Draft, node: jax.Array) -> list[Tree]:
        """The tree that each source fills after a draft whose last accepted node is `node` [B].

        Of a stack of one it is the draft's own: what a loop returns as it was it need not copy.
        """
        if len(self.stack.parent) == 1:
            return [draft.tree]
        state = jnp.take_along_axis(draft.tree.next_state, node[:, None], axis=1)[:, 0]
        return [select_trees(self.stack, state)]

    def draft(
        self,
        trees: Sequence[Tree],
        root: jax.Array,
        offers: Sequence[Offer],
        pace: Pace | None = None,
        costs: jax.Array | None = None,
    ) -> Draft:
        """The tree, filled by rank.

        Args:
          trees: of `begin` or `follow`.
          root: [B] int32, the newest token.
          offers: of the one source, or nothing.
          pace: not used here.
          costs: likewise.
        """
        [tree] = trees
        is_root = tree.depth == 0
        tokens, valid = jnp.where(is_root, root[:, None], 0), tree.live & is_root
        if not offers:
            return Draft(tree, tokens, valid, jnp.zeros_like(tokens))
        [offer] = offers
        place, exists = _fixed_places(tree, offer) if offer.parent is None else _places(tree, offer)
        index = (jnp.arange(len(root))[:, None], jnp.maximum(tree.depth - 1, 0), place)
        known = jnp.broadcast_to(offer.known, offer.tokens.shape)[index] & exists
        tokens = jnp.where(is_root, tokens, offer.tokens[index])
        drawn = offer.drawn and Drawn(offer.drawn.log_q, offer.drawn.place[index])
        sources = jnp.where(is_root, 0, offer.bits(0)[index])
        return Draft(tree, tokens, tree.live & (is_root | known), sources, None, drawn)


def _fixed_places(tree: Tree, offer: Offer) -> tuple[jax.Array, jax.Array]:
    """The place of every node's candidate [B, N] at its distance, which is its rank, and whether there is one."""
    W = offer.tokens.shape[-1]
    return jnp.minimum(tree.rank, W - 1), tree.rank < W


def _places(tree: Tree, offer: Offer) -> tuple[jax.Array, jax.Array]:
    """Likewise, where candidates have parents: the one of its rank among the children of its parent's candidate."""
    ranks, parents = offer.rank, offer.above
    place, exists = jnp.zeros_like(tree.depth), tree.depth == 0
    for level in range(tree.max_depth):
        above = jnp.take_along_axis(place, tree.parent, axis=1)  # [B, N]
        fits = offer.known[:, level, None] & (ranks[:, level, None] == tree.rank[..., None])  # [B, N, W]
        fits &= parents[:, level, None] == above[..., None]
        has_candidate = (tree.depth == level + 1) & jnp.take_along_axis(exists, tree.parent, axis=1)
        place = jnp.where(has_candidate, jnp.argmax(fits, axis=-1), place)
        exists |= has_candidate & jnp.any(fits, axis=-1)
    return place, exists


@flax.struct.dataclass
class Best:
    """The most probable candidates of all sources.

    The device-side part of a budget, a pytree in the jitted loop; `drafters.Budget` is what a user writes on the host.

    The chance of a candidate, given its parent, is the highest that any source gives it; where siblings come to more
    than 1 together they are scaled to it. A path's chance is the product, so that a draft of the best nodes holds every
    parent of its nodes. Probes go where the accepted path will most probably end.

    Where there are several sizes, a step has the one that is worth most: the tokens to expect of it, less what its time
    would bring at the pace of late. Some sizes, the first ones, are nodes alone: they leave out the rows that a method
    adds, which are probes or a window. The step after such a step has none of this method's candidates, and must run
    its rows for the step behind it. Leaving them out once is hardly worth that, so steps are nodes alone only while the
    method's candidates have not paid: for several steps, or for one where its rows are dear. Then the other sources
    draft.

    Attributes:
      trees: what each source expands that drafts along paths; arrays with a leading axis of one.
      nodes: N, the root included (static).
      owners: nodes that carry probes (static).
      distances: M, probes that each of them carries (static).
      depth: P, candidates on the longest path (static).
      sizes: nodes of each size, the root included, the first the root alone or the smallest; empty where there is but
        one (static).
      alone: how many of them, the first, leave out the rows that a method adds (static).
      adding: the bit of the source that adds rows, as in `Draft.sources`; 0 where none does (static).
      costs: [2, K] float32, milliseconds of a step of each size, in greedy decoding and in sampling.
    """

    trees: tuple[Tree, ...]
    nodes: int = flax.struct.field(pytree_node=False)
    owners: int = flax.struct.field(pytree_node=False)
    distances: int = flax.struct.field(pytree_node=False)
    depth: int = flax.struct.field(pytree_node=False)
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    alone: int = flax.struct.field(pytree_node=False, default=0)
    adding: int = flax.struct.field(pytree_node=False, default=0)
    costs: jax.Array | None = None

    @property
    def width(self) -> int:
        """Candidates that are wanted at each distance: hardly any draft has more siblings."""
        return min(self.nodes - 1, 10)

    @property
    def trial_size(self) -> int:
        """The number of the smallest size that tries a draft."""
        return max(self.alone, 1)

    @property
    def _caution(self) -> np.ndarray | float:
        """[K] or one number, how much the time of each size beyond the smallest one's counts."""
        if self.alone < 2:
            return _CAUTION
        return np.where(np.arange(len(self.sizes)) < self.alone, _CAUTION, _CAUTION_IF_ADDED)

    def rising(self, costs: np.ndarray) -> np.ndarray:
        """Costs [..., K] of its sizes without the noise that makes some cheaper than smaller ones of their kind."""
        parts = np.split(costs, [self.alone], axis=-1)
        return np.maximum(np.concatenate([np.maximum.accumulate(x, axis=-1) for x in parts], axis=-1), costs[..., :1])

    def begin(self, batch: int) -> list[Tree]:
        """The tree that each source expands."""
        return [select_trees(tree, jnp.zeros(batch, jnp.int32)) for tree in self.trees]

    def follow(self, draft: Draft, node: jax.Array) -> list[Tree]:
        """Likewise: the same in every step."""
        return self.begin(len(node))

    def draft(
        self,
        trees: Sequence[Tree],
        root: jax.Array,
        offers: Sequence[Offer],
        pace: Pace | None = None,
        costs: jax.Array | None = None,
    ) -> Draft:
        """The best nodes, ordered by falling probability, parents first.

        Args:
          trees: of `begin`; not used here.
          root: [B] int32, the newest token.
          offers: one of each source.
          pace: of the rows, where there are several sizes.
          costs: [B or 1, K] float32, of a step of each size, likewise.
        """
        nodes = grow(offers, root, self.nodes, self.depth)
        valid, size, pays = nodes.log_p > -jnp.inf, None, None
        if self.sizes:
            size, pays = self._size(nodes, pace, costs)
            valid &= jnp.arange(self.nodes) < jnp.asarray(self.sizes)[size][:, None]
        tree = self._with_probes(nodes.parent, nodes.depth, valid, nodes.log_p)
        return Draft(tree, nodes.tokens, valid, nodes.sources, nodes.log_p, None, size, pays)

    def _size(self, nodes: Nodes, pace: Pace, costs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The size of the next step [B], one for all rows that are there, and whether drafting pays [B].

        Added rows pay if steps that have them, and draft what they gave, are worth more than steps of nodes alone with
        what the other sources offer, of the nodes at hand. A row that a server inserts brings its own size; the step
        has the last of them.
        """
        sizes, p = jnp.asarray(self.sizes), jnp.exp(nodes.log_p)
        times = in_cheapest_steps(costs)
        smallest = times[:, :1]
        price = jnp.maximum(pace.tokens / pace.time, 1)  # any step makes a token
        spent = price[:, None] * (smallest + self._caution * (times - smallest))

        def worth(tokens: jax.Array) -> jax.Array:
            """The worth [K'] of steps of the first K' sizes, which make `tokens` [B, K'], summed over rows."""
            return jnp.sum(jnp.where(pace.active[:, None], tokens - spent[:, : tokens.shape[1]], 0.0), axis=0)

        total = worth(jnp.cumsum(p, axis=1)[:, sizes - 1])  # the root's 1: the bonus
        size = jnp.argmax(total)
        pays = size > 0
        if self.alone:
            others = (nodes.sources & ~self.adding > 0) | (nodes.depth == 0)
            fits = others[:, None] & (jnp.cumsum(others, axis=1)[:, None] <= sizes[: self.alone, None])  # [B, K', N]
            without = jnp.max(worth(jnp.sum(jnp.where(fits, p[:, None], 0.0), axis=-1)))
            with_added = self.alone + jnp.argmax(total[self.alone :])
            pays = total[with_added] > without
            rests = pace.rests(times[:, self.trial_size] - smallest[:, 0])
            size = jnp.where(rests & ~pays, size, with_added)
        return jnp.full(len(p), size, jnp.int32), jnp.full(len(p), pays)

    def _with_probes(self, parent: jax.Array, depth: jax.Array, valid: jax.Array, log_p: jax.Array) -> Tree:
        """The topology, with probes on the nodes where the accepted path is most likely to end. Arrays [B, N]."""
        N = parent.shape[1]
        nodes = jnp.arange(N)
        ancestors, above = jnp.broadcast_to(jnp.eye(N, dtype=bool), (len(parent), N, N)), parent
        for _ in range(self.depth):
            ancestors |= valid[..., None] & (above[..., None] == nodes)
            above = jnp.take_along_axis(parent, above, axis=1)
        p = jnp.where(valid, jnp.exp(log_p), 0.0)
        is_child = (parent[:, None] == nodes[:, None]) & (nodes > 0)  # [B, N, N], of the first the second
        below = jnp.sum(jnp.where(is_child, p[:, None], 0.0), axis=-1)  # of each node's children
        ends = jnp.where(valid, p - below, -1.0)
        owners = lax.top_k(ends, self.owners)[1]  # [B, O]
        probes = owned_probes(owners, self.distances, N)
        own = probe_of = probes["probe_of"]
        for _ in range(min(self.depth, self.distances - 1)):  # what a node has not, its parent's may predict
            shifted = jnp.pad(probe_of[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
            of_parent = jnp.take_along_axis(shifted, parent[..., None], axis=1)
            probe_of = jnp.where(own < 0, of_parent, own)
        live = jnp.take_along_axis(valid, owners, axis=1)
        return Tree(
            parent=parent,
            depth=depth,
            rank=None,
            live=valid,
            ancestors=ancestors,
            probe_live=jnp.tile(live, (1, self.distances)),
            next_state=None,
            max_depth=self.depth,
            max_rank=1,
            inner=(),
            **probes | {"probe_of": probe_of},
        )
