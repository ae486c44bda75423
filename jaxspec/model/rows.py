"""Rows on their way through the base: all from the first layer, or some of them from a later one on.

    layer            0 ........ 10 ........ 18 ........ 30
    nodes            ──────────────────────────────────→
    probes (d = 1)              ───────────────────────→    a `Join` at layer 10
    probes (d = 2)                          ───────────→    a `Join` at layer 18

Every segment of layers works on the rows that are there, a prefix of all of them: what joins late costs nothing
below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.model.attention import Context, causal_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache


@dataclasses.dataclass(frozen=True)
class Join:
    """Further rows from a layer on.

    Attributes:
      layer: the first layer that computes them; joins are ordered by it.
      extend: hidden states before that layer, [B, G, r, D] of the rows so far, to those of the rows from here on.
    """

    layer: int
    extend: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The input of a pass: G groups of r rows that do not see each other (a decoding step is one group).

    Attributes:
      x: [B, G, r0, D], embeddings of the rows that are there from the start; r0 may be 0.
      positions: [B, G, r] int32, absolute, of all rows, those that join later at the end.
      mask: [B, G, r, r] bool, which row sees which, itself included.
      joins: who comes later.
      prefix: keys and values without a position that joining rows may see, L x [K, P, Dh]; None in layers below the
        first join.
      sees_prefix: [1 or B, G, r, P] bool.
      taps: before which layers the hidden states of the rows there are wanted, besides those after the last one.
    """

    x: jax.Array
    positions: jax.Array
    mask: jax.Array
    joins: tuple[Join, ...] = ()
    prefix: Cache | None = None
    sees_prefix: jax.Array | None = None
    taps: tuple[int, ...] = ()

    def there(self, layer: int) -> int:
        """How many rows of a group are there before a layer, those that join at it not counted."""
        x = self.x
        for join in self.joins:
            if join.layer < layer:
                x = jax.eval_shape(join.extend, x)
        return x.shape[2]


def run_rows(
    base: Base, rows: Rows, cache: Cache | None = None, visible: jax.Array | None = None
) -> tuple[dict[int, jax.Array], Cache]:
    """Run rows through the base.

    Args:
      base: the frozen decoder.
      rows: what to run.
      cache: older keys and values, L x [B, K, S, Dh].
      visible: [B, 1 or G, 1 or r] int32, how many slots of the cache a row sees.

    Returns:
      {layer: hidden states [B, G, rows there, D] before it}, of every tap and, under the number of layers, of all rows
      after the last one, before the final norm; and the rows' own keys and values, [B, K, G * rows there, Dh] for every
      layer that had rows, behind which those of padding may follow (see `Decoder.rows`).
    """
    last = base.decoder.config.num_layers
    stops = sorted({*(join.layer for join in rows.joins), *rows.taps, last})
    x, done, prefix, keys, values = rows.x, 0, None, (), ()
    states: dict[int, jax.Array] = {}
    for stop in stops:
        if x.shape[2] and stop > done:
            x, kv = _segment(base, rows, x, (done, stop), cache, visible, prefix)
            keys, values = keys + kv.keys, values + kv.values
        done = stop
        if stop in (*rows.taps, last):
            states[stop] = x
        for join in (join for join in rows.joins if join.layer == stop):
            x, prefix = join.extend(x), rows.prefix
    return states, Cache(keys, values)


def _segment(
    base: Base,
    rows: Rows,
    x: jax.Array,
    layers: tuple[int, int],
    cache: Cache | None,
    visible: jax.Array | None,
    prefix: Cache | None,
) -> tuple[jax.Array, Cache]:
    """Layers [first, last) for the rows that are there, the first ones of every group."""
    B, G, r, D = x.shape

    def flat(a: jax.Array) -> jax.Array:
        return a[:, :, :r].reshape(a.shape[0], G * r, *a.shape[3:])

    if visible is not None:
        one_for_all = visible.shape[1:] == (1, 1)
        visible = visible[:, 0] if one_for_all else flat(jnp.broadcast_to(visible, rows.positions.shape))
    sees = None if prefix is None else flat(rows.sees_prefix)
    context = Context(flat(rows.positions), rows.mask[:, :, :r, :r], cache, visible, prefix, sees)
    hidden, kv = base.padded_rows(x.reshape(B, G * r, D), context, layers)
    return hidden.reshape(x.shape), kv


def read_layers(
    base: Base, tokens: jax.Array, layers: tuple[int, ...], context: Context | None = None
) -> tuple[jax.Array, Cache, dict[int, jax.Array]]:
    """Run sequences and read hidden states on the way.

    Args:
      base: the frozen decoder.
      tokens: [B, T] int32.
      layers: before which of them to read; the number of layers reads after the last one.
      context: where the tokens stand, one group of rows; default whole sequences.

    Returns:
      Final hidden states [B, T, D], the keys and values of all layers, and {layer: hidden states [B, T, D]}.
    """
    context, last = context or causal_context(*tokens.shape), base.decoder.config.num_layers
    visible = None if context.visible is None else context.visible[:, None]
    rows = Rows(base.embed(tokens)[:, None], context.positions[:, None], context.mask, taps=layers)
    states, kv = run_rows(base, rows, context.cache, visible)
    kv = jax.tree.map(lambda a: a[:, :, : tokens.shape[1]], kv)
    return states[last][:, 0], kv, {layer: states[layer][:, 0] for layer in sorted(set(layers))}
