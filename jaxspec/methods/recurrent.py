"""A decoder layer that drafts on its own outputs: EAGLE-3's, and the next-token modules that bases bring.

The row at position t reads a state of the base at t beside the embedding of the token at t + 1. Its output gives the
token at t + 2 and stands for the base's state at t + 1, so that the same layer drafts as far as it is asked to:

    position         ...  p - 2   p - 1       p      p + 1
    state of          base  base   base      own      own      (own: the output of the row before)
    embedding of            p - 1   root      a        b       (the token that follows: known, or drafted)
    drafts                           a        b        c

Rows on the base's states stay in a cache of the drafter's own. Those on its own states see that cache and the rows of
their own path, and are dropped with the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Offer, PyTree
from jaxspec.decoding.levels import Parents, offer_levels
from jaxspec.decoding.method import Batch, Method, ReadChunk, check_least
from jaxspec.errors import UserError
from jaxspec.model.attention import MASKED
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.dtypes import wide
from jaxspec.model.rows import read_layers

KeyValue = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class RecurrentLayer(Method):
    """What such drafters share: a file of their own says how a row begins, what its layer is, and what follows it.

    Attributes:
      depth: M, how far ahead it drafts.
      confidence: where drafts are chosen per step, paths less probable than this are not followed, and a level without
        others takes no time; 0: all levels are drafted in every step.
    """

    adjustable: ClassVar[tuple[str, ...]] = ("confidence",)

    depth: int = 4
    confidence: float = 0.0

    def __post_init__(self) -> None:
        check_least(self, depth=1)
        if not 0 <= self.confidence < 1:
            raise UserError(f"{self.name}: confidence must be at least 0 and below 1, got {self.confidence}")

    # The layer

    def taps(self, layers: int) -> tuple[int, ...]:
        """The layers whose input it reads, on a base of `layers`; that number itself: the output of the last one."""
        raise NotImplementedError

    def layer_shapes(self, config: ModelConfig) -> ModelConfig:
        """The shapes of its layer on a base of these shapes."""
        raise NotImplementedError

    def fused(self, trainable: PyTree, base: Base, states: dict[int, jax.Array]) -> jax.Array:
        """The base's states before each of `taps`, [B, R, D] each, as one [B, R, D]."""
        raise NotImplementedError

    def entered(self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array) -> jax.Array:
        """States [B, R, D], the base's or its own, as rows begin, which may know the tokens after them [B, R]."""
        raise NotImplementedError

    def queries_keys_values(
        self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, R, H, Dh], keys and values [B, R, K, Dh] of rows as `entered` leaves them."""
        raise NotImplementedError

    def after(self, trainable: PyTree, base: Base, state: jax.Array, attended: jax.Array) -> jax.Array:
        """The rest of the layer: rows [B, R, D] with what they attended to, [B, R, H * Dh], to outputs [B, R, D]."""
        raise NotImplementedError

    def logits(self, trainable: PyTree, base: Base, output: jax.Array) -> jax.Array:
        """Float32 logits [..., V'] of what follows, from rows' outputs [..., D]."""
        raise NotImplementedError

    # Along a text

    def unrolled(
        self, trainable: PyTree, base: Base, batch: Batch, count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Outputs [B, G, count, D] of unrolls at every insertion point; and the base's final states, [B, T, D]."""
        B, T = batch.tokens.shape
        frozen, _, states = read_layers(base, batch.tokens, self.taps(base.decoder.config.num_layers))
        rows, points = jnp.arange(B)[:, None], jnp.maximum(batch.points, 0)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        following = jnp.roll(batch.tokens, -1, axis=1)
        fused = self.entered(trainable, base, self.fused(trainable, base, states), following)
        q, k, v = self.queries_keys_values(trainable, base, fused, following, positions)
        cached, visible = (k.swapaxes(1, 2), v.swapaxes(1, 2)), jnp.arange(T) <= points[..., None]
        after = jax.checkpoint(self.after) if base.decoder.remat else self.after
        state = after(trainable, base, fused[rows, points], _attend(q[rows, points], cached, visible, []))
        outputs, path = [state], []
        for unroll in range(1, count):
            following = batch.tokens[rows, jnp.minimum(points + 1 + unroll, T - 1)]
            state = self.entered(trainable, base, state, following)
            q, *row_kv = self.queries_keys_values(trainable, base, state, following, points + unroll)
            path.append(tuple(row_kv))
            state = after(trainable, base, state, _attend(q, cached, visible, path))
            outputs.append(state)
        return jnp.stack(outputs, axis=2), frozen

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] along the text; -inf for tokens that it does not draft."""
        states, _ = self.unrolled(trainable, base, batch, self.depth)
        return base.draft_whole(self.logits(trainable, base, states), -jnp.inf)

    # Decoding

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The cache of rows on the base's states, and the output [B, D] of the newest of them."""
        config = dataclasses.replace(self.layer_shapes(base.decoder.config), num_layers=1)
        cache = empty_cache(config, batch, capacity, base.dtype)
        return {"cache": cache, "state": jnp.zeros((batch, config.hidden_size), base.dtype)}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Keys and values of all rows that were read; the rest of the layer for the last one alone."""
        trainable, base, (B, T) = context.trainable, context.base, chunk.hidden.shape[:2]
        taps = self.taps(base.decoder.config.num_layers)
        following = chunk.tokens[:, 1:]
        fused = self.fused(trainable, base, {layer: chunk.taps[layer] for layer in taps})
        fused = self.entered(trainable, base, fused, following)
        q, k, v = self.queries_keys_values(trainable, base, fused, following, chunk.first[:, None] + jnp.arange(T))
        cache = commit(method_state["cache"], Cache((k.swapaxes(1, 2),), (v.swapaxes(1, 2),)), chunk.first)
        rows, last = jnp.arange(B)[:, None], jnp.maximum(chunk.length - 1, 0)[:, None]
        visible = jnp.arange(cache.capacity) <= (chunk.first[:, None] + last)[..., None]  # [B, 1, S]
        attended = _attend(q[rows, last], (cache.keys[0], cache.values[0]), visible, [])
        state = self.after(trainable, base, fused[rows, last], attended)[:, 0]
        return {"cache": cache, "state": chunk.updated(state, method_state["state"])}

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """Level by level: every node that expands is a row on the output of its parent's."""
        trainable, base, cache = context.trainable, context.base, method_state["cache"]
        visible = jnp.arange(cache.capacity) < context.position[:, None, None]
        rows = jnp.arange(len(context.root))[:, None]

        def expand(parents: Parents, levels: Sequence[Any]) -> tuple[jax.Array, Any]:
            """`levels` holds, of the nodes that expanded at each, outputs [B, W, D], keys and values [B, W, K, Dh]."""
            if parents.level == 0:
                state, row_kv = method_state["state"][:, None], None
            else:
                above, place = levels[-1][0], parents.ancestors
                position = context.position[:, None] - 1 + parents.level
                state = self.entered(trainable, base, above[rows, place[..., -1]], parents.tokens)
                q, *row_kv = self.queries_keys_values(trainable, base, state, parents.tokens, position)
                path = [tuple(x[rows, place[..., i]] for x in levels[i][1]) for i in range(1, parents.level)]
                attended = _attend(q, (cache.keys[0], cache.values[0]), visible, [*path, tuple(row_kv)])
                state = self.after(trainable, base, state, attended)
            return self.logits(trainable, base, state), (state, row_kv)

        return offer_levels(context, expand, best=not context.fixed, confidence=self.confidence)


def _attend(q: jax.Array, cached: KeyValue, visible: jax.Array, path: list[KeyValue]) -> jax.Array:
    """Grouped-query attention of rows to a cache and to keys of their own each.

    Args:
      q: [B, R, H, Dh], rotated.
      cached: keys and values [B, K, S, Dh].
      visible: [B, 1 or R, S] bool.
      path: P keys and values [B, R, K, Dh], one of each for every row, all of which it sees.

    Returns:
      [B, R, H * Dh].
    """
    B, R, H, Dh = q.shape
    K, S = cached[0].shape[1:3]
    dot = dict(preferred_element_type=wide(q))
    grouped = (q.reshape(B, R, K, H // K, Dh) * Dh**-0.5).swapaxes(1, 2)  # [B, K, R, H/K, Dh]
    folded = grouped.reshape(B, K, -1, Dh)
    scores = jnp.einsum("bkqd,bksd->bkqs", folded, cached[0].astype(q.dtype), **dot).reshape(B, K, R, -1, S)
    scores = [jnp.where(visible[:, None, :, None], scores, MASKED)]
    scores += [jnp.einsum("bkrgd,brkd->bkrg", grouped, k, **dot)[..., None] for k, _ in path]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1)).astype(q.dtype)
    old = weights[..., :S].reshape(B, K, -1, S)
    out = jnp.einsum("bkqs,bksd->bkqd", old, cached[1].astype(q.dtype), **dot).reshape(B, K, R, -1, Dh)
    for i, (_, v) in enumerate(path):
        out += weights[..., S + i, None] * v.swapaxes(1, 2)[..., None, :]
    return out.swapaxes(1, 2).reshape(B, R, -1).astype(q.dtype)
