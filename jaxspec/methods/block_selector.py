"""What a selector makes of a row's logits: new ones for its best tokens, and all others behind the last of these."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def reranked(logits: jax.Array, top: jax.Array, places: jax.Array, added: jax.Array) -> jax.Array:
    """Logits whose k best have something added, and whose others stay behind these in their own order.

    Where one of the others would come before the last of the best, they all lose the same amount. Where nothing is
    added, nothing changes, to the last bit.

    Args:
      logits: [B, ..., V'].
      top: [B, ..., k + 1], the largest of them; k if there are no others.
      places: likewise, where they are.
      added: [B, ..., k]; several rows of it may stand for one of the logits.

    Returns:
      [B, ..., V'], a row for each of `added`.
    """
    count = added.shape[-1]
    best = top[..., :count] + added
    first = top[..., count:] if count < logits.shape[-1] else jnp.full_like(top[..., :1], -jnp.inf)
    last = jnp.min(best, axis=-1, keepdims=True)
    ahead = first - last
    moved = jnp.any(best != top[..., :count], axis=-1, keepdims=True)
    margin = 4 * jnp.finfo(best.dtype).eps * (jnp.abs(last) + jnp.maximum(ahead, 0) + 1)  # above what is rounded
    # a constant in gradients: what the others lose is no doing of theirs
    lost = jax.lax.stop_gradient(jnp.where(moved & (ahead >= 0), ahead + margin, 0))
    at = jnp.broadcast_to(places[..., :count], best.shape)
    return jnp.put_along_axis(logits - lost, at, best, axis=-1, inplace=False)
