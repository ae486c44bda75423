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

from jaxspec.decoding.draft import Draft, Drawn, Offer, Pace
from jaxspec.decoding.tree import Tree, owned_probes, select_trees


@flax.struct.dataclass
class StaticTree:
    """A fixed tree of one source, or a stack of them that follow each other (PPD 5.4).

    The device-side part of fixed trees, a pytree in the jitted loop; `trees.TreePlan` is searched and kept on the host.

    Attributes:
      stack: the trees, with a leading axis.
    """

    stack: Tree

    costs = None  # it has one size

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

    def draft(self, trees: Sequence[Tree], root: jax.Array, offers: Sequence[Offer], pace: Pace | None = None) -> Draft:
        """The tree, filled by rank.

        Args:
          trees: of `begin` or `follow`.
          root: [B] int32, the newest token.
          offers: of the one source, or nothing.
          pace: not used here.
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
        return Draft(tree, tokens, tree.live & (is_root | known), jnp.where(is_root, 0, 1), None, drawn)


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
    would bring at the pace of late.

    Attributes:
      trees: what each source expands that drafts along paths; arrays with a leading axis of one.
      nodes: N, the root included (static).
      owners: nodes that carry probes (static).
      distances: M, probes that each of them carries (static).
      depth: P, candidates on the longest path (static).
      sizes: nodes of each size, the root included, the smallest first; empty where there is but one (static).
      costs: [K] float32, milliseconds of a step of each size.
    """

    trees: tuple[Tree, ...]
    nodes: int = flax.struct.field(pytree_node=False)
    owners: int = flax.struct.field(pytree_node=False)
    distances: int = flax.struct.field(pytree_node=False)
    depth: int = flax.struct.field(pytree_node=False)
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    costs: jax.Array | None = None

    @property
    def width(self) -> int:
        """Candidates that are wanted at each distance: hardly any draft has more siblings."""
        return min(self.nodes - 1, 10)

    def begin(self, batch: int) -> list[Tree]:
        """The tree that each source expands."""
        return [select_trees(tree, jnp.zeros(batch, jnp.int32)) for tree in self.trees]

    def follow(self, draft: Draft, node: jax.Array) -> list[Tree]:
        """Likewise: the same in every step."""
        return self.begin(len(node))

    def draft(self, trees: Sequence[Tree], root: jax.Array, offers: Sequence[Offer], pace: Pace | None = None) -> Draft:
        """The best nodes, ordered by falling probability, parents first.

        Args:
          trees: of `begin`; not used here.
          root: [B] int32, the newest token.
          offers: one of each source.
          pace: of the rows, where there are several sizes.
        """
        levels = _grow([_to_depth(offer, self.depth) for offer in offers], len(root), self.nodes - 1, self.depth)
        log_p, index = lax.top_k(levels["log_p"].reshape(len(root), -1), self.nodes - 1)  # of P * F

        def pick(x: jax.Array, of_root: jax.Array | int) -> jax.Array:
            picked = jnp.take_along_axis(x.reshape(len(root), -1), index, axis=1)
            return jnp.concatenate([jnp.broadcast_to(of_root, (len(root), 1)).astype(x.dtype), picked], axis=1)

        depth = jnp.pad(index // (self.nodes - 1) + 1, ((0, 0), (1, 0)))
        above = (depth[:, 1:] - 2) * (self.nodes - 1) + pick(levels["parent"], 0)[:, 1:]  # among the P * F
        parent = jnp.argmax(above[..., None] == index[:, None], axis=-1) + 1
        parent = jnp.pad(jnp.where(depth[:, 1:] == 1, 0, parent), ((0, 0), (1, 0))).astype(jnp.int32)
        valid = jnp.pad(log_p > -jnp.inf, ((0, 0), (1, 0)), constant_values=True)
        log_p, size = jnp.pad(log_p, ((0, 0), (1, 0))), None
        if self.sizes:
            size = self._size(log_p, pace)
            valid &= jnp.arange(self.nodes) < jnp.asarray(self.sizes)[size][:, None]
        tree = self._with_probes(parent, depth.astype(jnp.int32), valid, log_p)
        return Draft(tree, pick(levels["tokens"], root[:, None]), valid, pick(levels["sources"], 0), log_p, None, size)

    def _size(self, log_p: jax.Array, pace: Pace) -> jax.Array:
        """The size of the next step [B], the same for all rows, from the chances of nodes [B, N]."""
        tokens = jnp.cumsum(jnp.exp(log_p), axis=1)[:, jnp.asarray(self.sizes) - 1]  # [B, K]; the root's 1: the bonus
        worth = tokens - (pace.tokens / pace.time)[:, None] * self.costs
        total = jnp.sum(jnp.where(pace.active[:, None], worth, 0.0), axis=0)
        return jnp.full(len(log_p), jnp.argmax(total), jnp.int32)

    def _with_probes(self, parent: jax.Array, depth: jax.Array, valid: jax.Array, log_p: jax.Array) -> Tree:
        """The topology, with probes on the nodes where the accepted path is most likely to end. Arrays [B, N]."""
        N = parent.shape[1]
        is_parent = jax.nn.one_hot(parent, N, dtype=bool) & valid[..., None]  # [B, N, N]
        ancestors = is_parent | jnp.eye(N, dtype=bool)
        for _ in range(max(self.depth - 1, 1).bit_length()):  # each doubles how far back it looks
            ancestors = jnp.einsum("bij,bjk->bik", ancestors, ancestors, preferred_element_type=jnp.int32) > 0
        p = jnp.where(valid, jnp.exp(log_p), 0.0)
        below = jnp.einsum("bn,bnm->bm", p.at[:, 0].set(0), is_parent.astype(p.dtype))  # of each node's children
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
            rank=jnp.zeros_like(parent),
            live=valid,
            ancestors=ancestors,
            probe_live=jnp.tile(live, (1, self.distances)),
            next_state=jnp.zeros_like(parent),
            max_depth=self.depth,
            max_rank=1,
            inner=(),
            **probes | {"probe_of": probe_of},
        )


def _to_depth(offer: Offer, depth: int) -> Offer:
    """An offer for `depth` distances: what it has no candidates for is not known."""

    def fit(x: jax.Array) -> jax.Array:
        missing = depth - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, max(missing, 0)), (0, 0)))[:, :depth]

    known = jnp.broadcast_to(offer.known, offer.tokens.shape)
    parent = None if offer.parent is None else fit(offer.above)
    return Offer(fit(offer.tokens), fit(known), fit(offer.log_p), parent)


def _grow(offers: Sequence[Offer], B: int, F: int, depth: int) -> dict[str, jax.Array]:
    """The F most probable nodes of each level, over those of the level above.

    Returns:
      tokens, log_p (of whole paths), sources (a bit each) and parent (a place among those of the level above), all
      [B, depth, F].
    """
    bits = jnp.concatenate([jnp.full(o.tokens.shape[-1], 1 << i, jnp.int32) for i, o in enumerate(offers)])
    ends = np.cumsum([0, *(o.tokens.shape[-1] for o in offers)])

    def level(above: tuple[jax.Array, ...], offered: list[Offer]) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        log_p, matches = above  # [B, F], and per source [B, F]: the candidate that a node is, -1 for none
        tokens = jnp.concatenate([o.tokens for o in offered], axis=-1)  # [B, X]
        given = [_below(o, match) for o, match in zip(offered, matches, strict=True)]
        given = jnp.concatenate(given, axis=-1)  # [B, F, X]: log-probabilities below each node of the level above
        same = tokens[:, None] == tokens[..., None]  # [B, X, X]
        place = jnp.arange(tokens.shape[-1])
        other, own = given[:, :, None], given[..., None]
        better = (other > own) | ((other == own) & (place < place[:, None]))
        first = ~jnp.any(same[:, None] & better, axis=-1) & (given > -jnp.inf)  # the best of those with one token
        total = jax.nn.logsumexp(jnp.where(first, given, -jnp.inf), axis=-1, keepdims=True)
        whole = jnp.where(first, log_p[..., None] + given - jnp.maximum(total, 0.0), -jnp.inf)
        log_p, index = lax.top_k(whole.reshape(len(whole), -1), F)
        parent, x = jnp.divmod(index, tokens.shape[-1])  # [B, F]
        shared = jnp.take_along_axis(same, x[..., None], axis=1)  # [B, F, X], candidates with a node's token
        shared &= jnp.take_along_axis(given, parent[..., None], axis=1) > -jnp.inf  # and below its parent
        shared &= (log_p > -jnp.inf)[..., None]
        matches = []
        for i, offer in enumerate(offered):
            own = shared[..., ends[i] : ends[i] + offer.tokens.shape[-1]]
            matches.append(jnp.where(jnp.any(own, axis=-1), jnp.argmax(own, axis=-1), -1))
        sources = lax.reduce(jnp.where(shared, bits, 0), jnp.int32(0), lax.bitwise_or, (2,))
        node = {"tokens": jnp.take_along_axis(tokens, x, axis=1), "log_p": log_p, "sources": sources, "parent": parent}
        return (log_p, tuple(matches)), node

    at_root = jnp.where(jnp.arange(F) == 0, 0.0, -jnp.inf)
    above = (jnp.broadcast_to(at_root, (B, F)), tuple(jnp.zeros((B, F), jnp.int32) for _ in offers))
    levels = []
    for d in range(depth):
        level_offers = [jax.tree.map(lambda x, d=d: x[:, d], offer) for offer in offers]
        above, node = level(above, level_offers)
        levels.append(node)
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *levels)


def _below(offer: Offer, match: jax.Array) -> jax.Array:
    """Log-probabilities of one level's candidates [B, W] below nodes that match candidates [B, F]: [B, F, W]."""
    log_p = jnp.where(offer.known, offer.log_p, -jnp.inf)[:, None]
    if offer.parent is None:
        return jnp.broadcast_to(log_p, (*match.shape, log_p.shape[-1]))
    return jnp.where(offer.parent[:, None] == match[..., None], log_p, -jnp.inf)
