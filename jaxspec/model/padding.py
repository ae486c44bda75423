"""Rows that only fill up a pass: those that come behind the rows of each batch row, see themselves, and are dropped.

rows           r0 r1 r2 .  .  .  .  .
r2 sees        r0    r2 .  .  .  .  .     as the mask says
the first pad  .  .  .  p0 .  .  .  .
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.model.attention import Context


def pad_rows(x: jax.Array, context: Context, least: int) -> tuple[jax.Array, Context]:
    """A pass filled up to `least` rows of the whole batch, or as it is where it has as many, or more than one group.

    Args:
      x: [B, R, D].
      context: of these rows.
      least: B * R at least.

    Returns:
      x [B, R', D] and its context. Pads stand where the last row does, and see no prefix; of the cache they see what is
      there, since all rows may share one length.
    """
    (B, R, _), groups = x.shape, context.mask.shape[1]
    spare = -(-least // B) - R
    if spare <= 0 or groups > 1:
        return x, context

    def behind(a: jax.Array, axis: int = 1, **options: str) -> jax.Array:
        return jnp.pad(a, [(0, spare if i == axis else 0) for i in range(a.ndim)], **options)

    is_pad = jnp.arange(R + spare) >= R
    visible, sees_prefix = context.visible, context.sees_prefix
    padded = context.replace(
        positions=behind(context.positions, mode="edge"),
        mask=behind(behind(context.mask, 2), 3) | jnp.diag(is_pad),
        visible=visible if visible is None or visible.shape[1] == 1 else behind(visible),
        sees_prefix=None if sees_prefix is None else behind(sees_prefix),
    )
    return behind(x), padded
