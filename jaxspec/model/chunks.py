"""Long sequences, chunk by chunk of equal width: it bounds the memory of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.model.attention import Context, causal_mask
from jaxspec.model.cache import Cache, commit


def run_in_chunks(
    run: Callable[[Any, Context], tuple[Any, Cache]], inputs: Any, cache: Cache, width: int
) -> tuple[Any, Cache]:
    """Run whole sequences from position 0 on and commit their keys and values.

    Args:
      run: what to do with a chunk: its inputs and where it stands, to its outputs and its rows' keys and values. The
        first chunk sees no cache.
      inputs: pytree of [B, T, ...].
      cache: to write to.
      width: W, a divisor of T.

    Returns:
      The outputs, [B, T, ...], and the cache.
    """
    B, T = jax.tree.leaves(inputs)[0].shape[:2]
    causal = causal_mask(B, width)
    parts = jax.tree.map(lambda x: x.reshape(B, T // width, width, *x.shape[2:]).swapaxes(0, 1), inputs)

    def chunk(cache: Cache, start: jax.Array, part: Any, seen: Cache | None) -> tuple[Cache, Any]:
        positions = jnp.broadcast_to(start + jnp.arange(width), (B, width))
        visible = None if seen is None else jnp.broadcast_to(start, (B, 1))
        outputs, rows = run(part, Context(positions, causal, seen, visible))
        return commit(cache, rows, jnp.broadcast_to(start, (B,))), outputs

    cache, outputs = chunk(cache, jnp.int32(0), jax.tree.map(lambda x: x[0], parts), None)
    if width == T:
        return outputs, cache
    others = (jnp.arange(width, T, width), jax.tree.map(lambda x: x[1:], parts))
    cache, rest = lax.scan(lambda cache, item: chunk(cache, *item, cache), cache, others)
    rest = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, T - width, *x.shape[3:]), rest)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first, rest], axis=1), outputs, rest), cache
