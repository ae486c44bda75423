"""The dtype of sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def wide(x: jax.Array) -> jnp.dtype:
    """The dtype of sums over `x`: float32, or its own where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
