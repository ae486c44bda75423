"""Long sequences, chunk by chunk of equal width: it bounds the memory of attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.model.attention import Context, causal_mask
from jaxspec.model.cache import Cache, commit


def run_in_chunks(
    run: Callable[[Any, Context], tuple[Any, Cache]], inputs: Any, cache: Cache, width: int, chunks: jax.Array
) -> tuple[Any, Cache]:
    """Run sequences from position 0 on and commit their keys and values.

    Args:
      run: what to do with a chunk: its inputs and where it stands, to its outputs and its rows' keys and values. The
        first chunk sees no cache.
      inputs: pytree of [B, T, ...].
      cache: to write to.
      width: W, a divisor of T.
      chunks: [] int32, how many to run, at least 1; the rest is padding.

    Returns:
      The outputs, [B, T, ...], zeros behind the chunks that were run, and the cache.
    """
    B, T = jax.tree.leaves(inputs)[0].shape[:2]
    causal = causal_mask(B, width)

    def chunk(start: jax.Array, cache: Cache, seen: Cache | None) -> tuple[Any, Cache]:
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, width, axis=1), inputs)
        positions = jnp.broadcast_to(start + jnp.arange(width), (B, width))
        visible = None if seen is None else jnp.broadcast_to(start, (B, 1))
        outputs, rows = run(part, Context(positions, causal, seen, visible))
        return outputs, commit(cache, rows, jnp.broadcast_to(start, (B,)))

    def more(i: jax.Array, carry: tuple[Any, Cache]) -> tuple[Any, Cache]:
        done, cache = carry
        outputs, cache = chunk(i * width, cache, cache)
        write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=i * width, axis=1)
        return jax.tree.map(write, done, outputs), cache

    first, cache = chunk(jnp.int32(0), cache, None)
    if width == T:
        return first, cache
    whole = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, T - width)] + [(0, 0)] * (x.ndim - 2)), first)
    return lax.fori_loop(1, chunks, more, (whole, cache))
