"""Attention of the rows of one step: over each other, over the cache and over a prefix; and what they may see."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.model.cache import Cache
from jaxspec.model.dtypes import wide
from jaxspec.model.gpu import either, has_kernels
from jaxspec.model.gpu_attention import MOST_ROWS, attend_step
from jaxspec.model.rope import rotate

MASKED = -1e30  # the score of what a row does not see


@flax.struct.dataclass
class Context:
    """Positions of rows, and what they see besides themselves.

    Attributes:
      positions: [B, R] int32, absolute.
      mask: [B, G, r, r] bool, which rows see which, themselves included; R = G * r (see `attend`).
      cache: older keys and values, L x [B, K, S, Dh]; None: there are none.
      visible: [B, 1 or R] int32, how many slots of the cache a row sees.
      prefix: further keys and values, whose positions are their own affair (no window applies), L x [K, P, Dh], the
        same for the whole batch, or [B, K, P, Dh].
      sees_prefix: [1 or B, R, P] bool, which rows see which of them.
      long: [B] bool, texts that will be longer than the original context, for rotary frequencies that depend on it;
        None: those whose rows stand beyond it.
    """

    positions: jax.Array
    mask: jax.Array
    cache: Cache | None = None
    visible: jax.Array | None = None
    prefix: Cache | None = None
    sees_prefix: jax.Array | None = None
    long: jax.Array | None = None


@flax.struct.dataclass
class Reach:
    """What the rows of a step see of themselves and of a cache, for a kernel that makes no masks of it.

    Attributes:
      positions: [B, R] int32.
      visible: [B, 1 or R] int32, slots of the cache.
      window: of the layer (static).
    """

    positions: jax.Array
    visible: jax.Array
    window: int | None = flax.struct.field(pytree_node=False, default=None)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How queries and keys make scores, beyond their scaled product.

    Attributes:
      scale: scores are multiplied by it; None: Dh ** -0.5.
      cap: scores s become cap * tanh(s / cap); None: they stay.
      rotary_factor: what is rotated is multiplied by it.
      joint: norms of queries and of keys are over all heads together.
    """

    scale: float | None = None
    cap: float | None = None
    rotary_factor: float = 1.0
    joint: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> Scoring:
        """Those of a base."""
        return cls(config.score_scale, config.score_cap, config.rotary_factor, config.joint_norms)


def causal_mask(batch: int, length: int) -> jax.Array:
    """[B, 1, T, T] bool: every token sees itself and what is older."""
    return jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, 1, length, length))


def causal_context(batch: int, length: int) -> Context:
    """Whole sequences [B, T] from position 0 on."""
    return Context(jnp.broadcast_to(jnp.arange(length), (batch, length)), causal_mask(batch, length))


def continued_context(cache: Cache, first: jax.Array, length: int) -> Context:
    """The next rows [B, T] of texts whose first tokens, `first` [B] of them, are in a cache."""
    first = first[:, None]
    return Context(first + jnp.arange(length), causal_mask(len(first), length), cache, first)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    cached: tuple[jax.Array, jax.Array] | None = None,
    cached_mask: jax.Array | None = None,
    prefix: tuple[jax.Array, jax.Array] | None = None,
    how: Scoring = Scoring(),
) -> jax.Array:
    """Grouped-query attention over the rows themselves, over the cache and over a prefix, softmaxed together.

    Scores of the cache and of what is near (the prefix, then the rows) are computed apart and share one maximum and
    one sum, so that no [R, S + P + R] mask is built. Query heads and rows of one key/value head are folded into one
    matrix.

    Args:
      q: [B, R, H, Dh], rotated.
      k: [B, R, K, Dh], rotated.
      v: [B, R, K, Dh].
      mask: [B, G, r, P + r] bool, the prefix first; the R = G * r rows come in G groups that do not see each other.
      cached: keys and values [B, K, S, Dh].
      cached_mask: [B, 1 or R, S] bool.
      prefix: keys and values [K, P, Dh] or [B, K, P, Dh] that stand before every group; P is 0 without.
      how: scores are made.

    Returns:
      [B, R, H, Dh].
    """
    B, R, H, Dh = q.shape
    K, (G, r, near) = k.shape[2], mask.shape[1:]  # near = P + r
    q = q.reshape(B, G, r, K, H // K, Dh).transpose(0, 3, 1, 4, 2, 5)  # [B, K, G, H/K, r, Dh]
    k = k.reshape(B, G, r, K, Dh).transpose(0, 3, 1, 2, 4)  # [B, K, G, r, Dh]
    v = v.reshape(B, G, r, K, Dh).transpose(0, 3, 1, 2, 4)
    if prefix is not None:
        k, v = (
            jnp.concatenate([jnp.broadcast_to(x[..., None, :, :], (B, K, G, *x.shape[-2:])).astype(y.dtype), y], axis=3)
            for x, y in zip(prefix, (k, v), strict=True)
        )
    folded = q.reshape(B, K, G, -1, Dh) * (Dh**-0.5 if how.scale is None else how.scale)

    dot = dict(preferred_element_type=wide(q))
    scores = capped(jnp.einsum("bkgqd,bkgrd->bkgqr", folded, k, **dot), how.cap).reshape(B, K, G, -1, r, near)
    scores = jnp.where(mask[:, None, :, None], scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if cached is not None:
        old = jnp.einsum("bkqd,bksd->bkqs", folded.reshape(B, K, -1, Dh), cached[0], **dot)
        old = capped(old, how.cap).reshape(B, K, G, H // K, r, -1)
        seen = jnp.broadcast_to(cached_mask, (B, R, cached_mask.shape[-1])) if G > 1 else cached_mask
        old = jnp.where(seen.reshape(B, 1, G, 1, -1, seen.shape[-1]), old, MASKED)
        top = jnp.maximum(top, jnp.max(old, axis=-1, keepdims=True))

    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(v.dtype).reshape(B, K, G, -1, near)
    out = jnp.einsum("bkgqr,bkgrd->bkgqd", weights, v, **dot)
    if cached is not None:
        weights = jnp.exp(old - top)
        total = total + jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(v.dtype).reshape(B, K, -1, weights.shape[-1])
        out = out + jnp.einsum("bkqs,bksd->bkqd", weights, cached[1], **dot).reshape(out.shape)
    out = out.reshape(B, K, G, -1, r, Dh) / total
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, R, H, Dh).astype(q.dtype)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Scores or logits within a cap, smoothly; as they are without one."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def normalised(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square normalisation of the last dimension, in float32."""
    y = x.astype(wide(x))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    return (y * scale).astype(x.dtype)


def unpacked(
    qkv: jax.Array, norms: tuple[jax.Array, ...], angles: jax.Array, epsilon: float, how: Scoring = Scoring()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [B, R, H, Dh], rotated keys and values [B, R, K, Dh].

    Args:
      qkv: [B, R, K, H/K + 2, Dh], per key/value head its query heads, its key and its value.
      norms: scales [Dh] of the norms of queries and of keys, or [H * Dh] and [K * Dh] of joint ones; empty without.
      angles: [B, R, Dh/2], or of the first dimensions alone.
      epsilon: of the norms.
      how: scores are made.
    """
    B, R, K, _, Dh = qkv.shape
    qk = qkv[..., :-1, :]
    if norms:
        norm = _normalised_jointly if how.joint else normalised
        parts = (qk[..., :-1, :], qk[..., -1:, :])
        qk = jnp.concatenate([norm(x, scale, epsilon) for x, scale in zip(parts, norms, strict=True)], axis=-2)
    qk = rotate(qk.reshape(B, R, -1, Dh), angles, how.rotary_factor).reshape(B, R, K, -1, Dh)
    return qk[..., :-1, :].reshape(B, R, -1, Dh), qk[..., -1, :], qkv[..., -1, :]


def _normalised_jointly(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """`normalised` of all heads [B, R, K, n, Dh] of a row together."""
    return normalised(x.reshape(*x.shape[:2], -1), scale, epsilon).reshape(x.shape)


def attend_packed(
    qkv: jax.Array,
    norms: tuple[jax.Array, ...],
    angles: jax.Array,
    epsilon: float,
    mask: jax.Array,
    cached: tuple[jax.Array, jax.Array] | None = None,
    cached_mask: jax.Array | None = None,
    prefix: tuple[jax.Array, jax.Array] | None = None,
    reach: Reach | None = None,
    how: Scoring = Scoring(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`attend` from queries, keys and values as their product leaves them.

    On GPUs that have kernels (see `jaxspec.model.gpu`) one does all of it where few rows of one group see a cache and
    no prefix: in decoding steps, in drafting and in short chunks of prompts. Training and long chunks keep `attend`,
    and so does every base whose scores are more than scaled products of wholly rotated queries and keys.

    Args:
      qkv: as in `unpacked`.
      norms: likewise.
      angles: likewise.
      epsilon: likewise.
      mask: as in `attend`.
      cached: likewise.
      cached_mask: likewise.
      prefix: likewise.
      reach: what the masks say; without it there is no kernel.
      how: scores are made.

    Returns:
      [B, R, H * Dh], and the rows' rotated keys and their values, [B, K, R, Dh].
    """

    def plain(
        qkv: jax.Array, norms: tuple[jax.Array, ...], angles: jax.Array, _: Reach | None, *context: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = unpacked(qkv, norms, angles, epsilon, how)
        return attend(q, k, v, *context, how=how).reshape(*q.shape[:2], -1), k.swapaxes(1, 2), v.swapaxes(1, 2)

    def kernel(
        qkv: jax.Array, norms: tuple[jax.Array, ...], angles: jax.Array, reach: Reach, *context: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        seen = (reach.positions, reach.visible, reach.window)
        return attend_step(qkv, norms, angles, *context[:2], *seen, epsilon)

    operands = (qkv, norms, angles, reach, mask, cached, cached_mask, prefix)
    simple = how == Scoring() and 2 * angles.shape[-1] == qkv.shape[-1]
    has_kernel = simple and _has_kernel(qkv, mask, cached, prefix, reach)
    return either(kernel, plain, *operands) if has_kernel else plain(*operands)


def _has_kernel(
    qkv: jax.Array, mask: jax.Array, cached: tuple | None, prefix: tuple | None, reach: Reach | None
) -> bool:
    """Whether `attend_step` takes these arguments of `attend_packed`."""
    if reach is None or cached is None or prefix is not None:
        return False
    (B, R), dtype = qkv.shape[:2], qkv.dtype
    whole = mask.shape == (B, 1, R, R) and len(cached[0]) == len(reach.visible) == len(reach.positions) == B
    return whole and R <= MOST_ROWS and dtype == cached[0].dtype and dtype.itemsize <= 4


def masks_of(context: Context, window: int | None) -> tuple[jax.Array, jax.Array | None]:
    """A layer's masks, its window applied: rows to prefix and rows [B, G, r, P + r], rows to cache [B, 1 or R, S]."""
    mask, positions, old = context.mask, context.positions, None
    if context.cache is not None:
        slots = jnp.arange(context.cache.capacity)
        old = slots < context.visible[..., None]
        if window is not None:
            old = old & (slots > positions[..., None] - window)
    if window is not None:
        groups = positions.reshape(positions.shape[0], mask.shape[1], -1)
        mask = mask & (groups[..., None, :] > groups[..., :, None] - window)
    if context.prefix is not None:
        seen = jnp.broadcast_to(context.sees_prefix, (len(mask), *context.sees_prefix.shape[1:]))
        mask = jnp.concatenate([seen.reshape(*mask.shape[:3], -1), mask], axis=-1)
    return mask, old


def reach_of(context: Context, window: int | None) -> Reach | None:
    """The same for a kernel; None where there is no cache, or no kernel."""
    if context.cache is None or not has_kernels():
        return None
    return Reach(context.positions, context.visible, window)


def of_layer(cache: Cache | None, layer: int) -> tuple[jax.Array, jax.Array] | None:
    """Keys and values of one layer."""
    return None if cache is None else (cache.keys[layer], cache.values[layer])
