"""Operations on arrays of a step, those on small ones made of what XLA fuses with its neighbours.

Where a step is small, a GPU waits for the start of kernels, and every update of a slice, sort or reduction is at least
one. Comparisons, selections and gathers join the kernels around them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def overwrite(buffer: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """Rows [B, W] with new values [B, P] from a place of their own each, [B] int32, on; those beyond W are dropped."""
    place = jnp.arange(buffer.shape[1]) - at[:, None]
    values = jnp.take_along_axis(new, jnp.clip(place, 0, new.shape[1] - 1), axis=1)
    return jnp.where((place >= 0) & (place < new.shape[1]), values, buffer)


def write(buffers: Any, new: Any, at: jax.Array) -> Any:
    """A pytree of arrays [B, W, ...] with new values [B, P, ...] from a place of each row's own, [B] int32, on.

    It leaves the rest alone, which `overwrite` passes over. New values must fit: they would be moved back silently.
    """
    one = jax.vmap(lambda buffer, new, at: lax.dynamic_update_slice_in_dim(buffer, new, at, axis=0))
    return jax.tree.map(lambda buffer, new: one(buffer, new, at), buffers, new)


def best_of(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of the last dimension and their places, both [..., count].

    The barrier is for XLA's compiler for GPUs, which cannot take the largest of a slice: logits of few rows are one.
    """
    return lax.top_k(lax.optimization_barrier(x), count)
