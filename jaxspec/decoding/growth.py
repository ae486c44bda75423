"""The growth of a draft from the offers of all sources, level by level, for the shape that takes the best nodes.

    offered by 1   a (b c)   d           nodes   a, held by 1 and 2     below it b (1 and 2), c (1)
    offered by 2   a (b)     e                   d, held by 1; e, held by 2

A node stands for all candidates, of any source, that end the same path of tokens: it holds them. On levels that only
one source reaches, and whose candidates have parents, every candidate is a node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.decoding.draft import Offer


@flax.struct.dataclass
class Nodes:
    """The nodes of a draft, or of some of its levels.

    Attributes:
      tokens: [B, N] int32.
      log_p: [B, N] float32, of whole paths; minus infinity for what there is not.
      sources: [B, N] int32, a bit each; 0 for the root.
      parent: [B, N] int32, the root's its own; of levels, places among the nodes of all levels.
      depth: [B, N] int32; the root has 0.
    """

    tokens: jax.Array
    log_p: jax.Array
    sources: jax.Array
    parent: jax.Array
    depth: jax.Array


def grow(offers: Sequence[Offer], root: jax.Array, nodes: int, depth: int) -> Nodes:
    """The root and the most probable nodes below it, by falling probability, parents first.

    Args:
      offers: one of each source, whose siblings differ in their tokens.
      root: [B] int32, its token.
      nodes: N, how many a draft has.
      depth: P, levels below the root.
    """
    distances = [min(offer.tokens.shape[1], depth) for offer in offers]
    last = int(np.argmax(distances))  # the source that reaches deepest
    together = depth if offers[last].parent is None else max([0, *distances[:last], *distances[last + 1 :]])
    candidates, start = _Candidates.of(offers, together), 0
    none = jnp.zeros((len(root), 1), jnp.int32)
    levels, held = [Nodes(root[:, None], none.astype(jnp.float32), none, none, none)], None
    for d in range(together):
        level, held = candidates.below(levels[-1], held, start, d, nodes - 1 - d)  # d others stand above each of them
        start += levels[-1].tokens.shape[1]
        levels.append(level)
    if together < distances[last]:
        holds = None if held is None else held[..., candidates.source == last]
        levels += _alone(offers[last], last, levels[-1], holds, start, slice(together, depth))
    every = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *levels)
    if (missing := nodes - every.tokens.shape[1]) > 0:
        log_p = jnp.pad(every.log_p, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        every = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, missing))), every).replace(log_p=log_p)
    log_p, index = lax.top_k(every.log_p, nodes)  # no chance is above the root's, and it stands first
    best = jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=1), every)
    parent = jnp.argmax(best.parent[..., None] == index[:, None], axis=-1).astype(jnp.int32)
    return best.replace(log_p=log_p, parent=parent)


def _alone(offer: Offer, source: int, above: Nodes, held: jax.Array | None, start: int, levels: slice) -> list[Nodes]:
    """The nodes of the levels where one source is alone: all of its candidates, which know their parents.

    Args:
      offer: the source's.
      source: its number.
      above: the nodes of the level above, F of them.
      held: [B, F, W] bool, which candidates of their level these are; None of the root.
      start: the place of the first of these among all nodes.
      levels: which distances.
    """
    tokens, own, parent = offer.tokens[:, levels], offer.log_p[:, levels], offer.above[:, levels]  # [B, L, W]
    own = jnp.where(jnp.broadcast_to(offer.known, offer.tokens.shape)[:, levels], own, -jnp.inf)
    bits = offer.bits(source)[:, levels]
    siblings = parent[..., None] == parent[..., None, :]
    total = jnp.log(jnp.maximum(jnp.sum(jnp.where(siblings, jnp.exp(own)[..., None, :], 0.0), axis=-1), 1.0))
    log_p, place = above.log_p, parent[:, 0]
    if held is not None:  # a candidate is in one node at most
        holds = jnp.take_along_axis(held, jnp.broadcast_to(parent[:, :1], (*held.shape[:2], parent.shape[2])), axis=2)
        place = jnp.argmax(holds, axis=1)
        log_p = jnp.max(jnp.where(holds, log_p[..., None], -jnp.inf), axis=1)
    found = []
    for i in range(tokens.shape[1]):
        if i > 0:
            place = parent[:, i]
        if i > 0 or held is None:
            log_p = jnp.take_along_axis(log_p, place, axis=1)
        log_p = log_p + own[:, i] - total[:, i]
        depth = jnp.full_like(place, levels.start + i + 1)
        found.append(Nodes(tokens[:, i], log_p, jnp.where(log_p > -jnp.inf, bits[:, i], 0), start + place, depth))
        start += above.tokens.shape[1] if i == 0 else tokens.shape[2]
    return found


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The candidates of all sources at every distance, X of them side by side.

    Attributes:
      tokens: [B, P, X] int32.
      log_p: [B, P, X] float32, minus infinity for what there is not.
      parent: [B, P, X] int32, a place among the X one distance nearer; anything where `anywhere`, and at the first.
      anywhere: [X] bool, which of them follow whatever stands before.
      source: [X] int, the source that offers each.
      bits: [B, P, X] int32, see `Offer.bits`.
      rivals: [B, P, X, X] bool, for each those of other sources that have its token and are more probable: below a node
        that both follow they stand for both. None of one source.
    """

    tokens: jax.Array
    log_p: jax.Array
    parent: jax.Array
    anywhere: np.ndarray
    source: np.ndarray
    bits: jax.Array
    rivals: jax.Array | None

    @classmethod
    def of(cls, offers: Sequence[Offer], depth: int) -> _Candidates:
        """Those of offers, for `depth` distances: there are none beyond an offer's own."""
        widths = [offer.tokens.shape[-1] for offer in offers]
        firsts = np.cumsum([0, *widths[:-1]])

        def fit(x: jax.Array, missing: float) -> jax.Array:
            levels = max(0, depth - x.shape[1])
            return jnp.pad(x[:, :depth], ((0, 0), (0, levels), (0, 0)), constant_values=missing)

        def joined(parts: Sequence[jax.Array], missing: float = 0) -> jax.Array:
            return jnp.concatenate([fit(x, missing) for x in parts], axis=-1)

        parents = [jnp.zeros_like(o.tokens) if o.parent is None else o.parent for o in offers]
        tokens = joined([o.tokens for o in offers])
        log_p = joined([jnp.where(o.known, o.log_p, -jnp.inf) for o in offers], -jnp.inf)
        place, source = np.arange(sum(widths)), np.repeat(np.arange(len(offers)), widths)
        other, own = log_p[..., None, :], log_p[..., None]
        higher = (other > own) | ((other == own) & (place < place[:, None]))
        same = (tokens[..., None, :] == tokens[..., None]) & (source != source[:, None])
        return cls(
            tokens=tokens,
            log_p=log_p,
            parent=joined([first + parent for first, parent in zip(firsts, parents, strict=True)]),
            anywhere=np.repeat([o.parent is None for o in offers], widths),
            source=source,
            bits=joined([offer.bits(number) for number, offer in enumerate(offers)]),
            rivals=same & higher if len(offers) > 1 else None,
        )

    def below(self, above: Nodes, held: jax.Array | None, start: int, d: int, most: int) -> tuple[Nodes, jax.Array]:
        """The most probable nodes of one level, and which candidates they hold, [B, F', X] bool.

        Args:
          above: the nodes of the level above, F of them.
          held: [B, F, X] bool, which candidates these hold; None of the root.
          start: the place of the first of these among all nodes.
          d: how many levels are above, the root's not counted.
          most: how many nodes are wanted at most.
        """
        tokens, own, X = self.tokens[:, d], self.log_p[:, d, None], len(self.source)
        there = own > -jnp.inf
        if held is not None:  # [B, F, X], which candidates stand below each node of the level above
            parent = jnp.broadcast_to(self.parent[:, d, None], (*held.shape[:2], X))
            there &= self.anywhere | jnp.take_along_axis(held, parent, axis=2)
        first = there
        if self.rivals is not None:
            first &= ~jnp.any(there[:, :, None] & self.rivals[:, d, None], axis=-1)
        total = jnp.sum(jnp.where(first, jnp.exp(own), 0.0), axis=-1, keepdims=True)
        log_p = jnp.where(first, above.log_p[..., None] + own - jnp.log(jnp.maximum(total, 1.0)), -jnp.inf)
        log_p, index = lax.top_k(log_p.reshape(len(log_p), -1), min(most, log_p[0].size))
        parent, x = jnp.divmod(index, X)
        token = jnp.take_along_axis(tokens, x, axis=1)
        held = jnp.take_along_axis(there, parent[..., None], axis=1) & (token[..., None] == tokens[:, None])
        held &= (log_p > -jnp.inf)[..., None]
        sources = lax.reduce(jnp.where(held, self.bits[:, d, None], 0), jnp.int32(0), lax.bitwise_or, (2,))
        return Nodes(token, log_p, sources, start + parent, jnp.full_like(parent, d + 1)), held
