"""Attention of a decoding step as one GPU kernel, of which `jaxspec.model.attention.attend` is the definition.

An instance takes one key/value head of one text, and some of its queries: the query heads that share it, of all
rows, folded into one matrix. It normalises and rotates them, goes over the visible slots of the cache and over the rows
themselves with one softmax, and hands on the rows' rotated keys and their values for the cache. Where a long cache
leaves too few instances for a GPU, several share it, and a second kernel merges what they found.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.model.gpu import block, launch
from jaxspec.parallel.sharding import over_mesh

MOST_ROWS = 128
_MASKED = -1e30
_TINY = 1e-30  # instead of the sum of a row that sees nothing, such as one that only pads
_QUERIES = {2: 64, 4: 16}  # of an instance, by bytes per number: float32 takes no tensor cores, but many registers
_BYTES = 2**14  # of keys that an instance reads at a time
_LONG = 1024  # slots, from which on a cache is divided among instances
_INSTANCES = 128  # about the multiprocessors of a large GPU
_SHARE = 256  # slots per instance, at least

Pair = tuple[jax.Array, jax.Array]


def attend_step(
    qkv: jax.Array,
    norms: tuple[jax.Array, ...],
    angles: jax.Array,
    mask: jax.Array,
    cached: Pair,
    positions: jax.Array,
    visible: jax.Array,
    window: int | None = None,
    epsilon: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of few rows from queries, keys and values as their product leaves them.

    Args:
      qkv: [B, R, K, H/K + 2, Dh], per key/value head its query heads, its key and its value.
      norms: scales [Dh] of the norms of queries and of keys; empty without.
      angles: [B, R, Dh/2].
      mask: [B, 1, R, R] bool, which rows see which, whatever the window.
      cached: keys and values [B, K, S, Dh].
      positions: [B, R] int32.
      visible: [B, 1 or R] int32, how many slots of the cache a row sees.
      window: how far back a row sees.
      epsilon: of the norms.

    Returns:
      [B, R, H * Dh], and the rows' rotated keys and their values, [B, K, R, Dh].
    """
    B, R, K = qkv.shape[:3]
    whole, heads, texts = ("batch", None, "heads"), ("batch", "heads"), ("batch",)
    inputs = [whole, texts, texts, texts, texts, texts, heads, heads, *[()] * len(norms)]
    run = over_mesh(functools.partial(_run, window, epsilon), (B, K), inputs, [whole, heads, heads])
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # the same in all layers
    out, k, v = run(qkv, cos, sin, positions, visible, mask, *cached, *norms)
    return out.reshape(B, R, -1), k, v


def _run(window: int | None, epsilon: float, *operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernels on one device; the first result is [B, R, K, H/K, Dh]."""
    (B, R, K, width, Dh), dtype, S = operands[0].shape, operands[0].dtype, operands[6].shape[2]
    heads, splits = width - 2, 1
    parts = -(-heads * R // _QUERIES[dtype.itemsize])
    if S > _LONG:
        splits = min(block(-(-_INSTANCES // (B * K * parts)), 1), block(S // _SHARE, 1))
    out, new = jax.ShapeDtypeStruct((B, R, K, heads, Dh), dtype), [jax.ShapeDtypeStruct((B, K, R, Dh), dtype)] * 2
    kernel = functools.partial(_kernel, splits=splits, window=window, epsilon=epsilon, inputs=len(operands))
    if splits == 1:
        k, v, out = launch(kernel, (parts, K, B), [*new, out], *operands)
        return out, k, v
    found = [jax.ShapeDtypeStruct((splits, *s), jnp.float32) for s in (out.shape, out.shape[:-1], out.shape[:-1])]
    k, v, *found = launch(kernel, (parts * splits, K, B), [*new, *found], *operands)
    [out] = launch(_merge, (R * heads, K, B), [out], *found, warps=1)
    return out, k, v


def _kernel(*refs: Any, inputs: int, splits: int, window: int | None, epsilon: float) -> None:
    """One instance; `refs` are those of the operands and outputs in `_run`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import load, store

    qkv, cos, sin, positions, visible, mask, keys, values, *norms = refs[:inputs]
    new_k, new_v, *results = refs[inputs:]
    q_norm, k_norm = norms or (None, None)
    (_, R, _, width, Dh), S, dtype = qkv.shape, keys.shape[2], qkv.dtype
    heads, half, halved = width - 2, Dh // 2, block(Dh // 2)
    queries = min(block(heads * R), _QUERIES[dtype.itemsize])
    slots = min(max(_BYTES // (2 * halved * dtype.itemsize), 16), 128)
    part, k, b = (pl.program_id(axis) for axis in range(3))
    split, writes = lax.rem(part, splits), part < splits
    query = lax.div(part, splits) * queries + jnp.arange(queries)
    row, head, live = lax.div(query, heads), lax.rem(query, heads), query < heads * R
    d, wide = jnp.arange(halved), jnp.arange(2 * halved)

    def halves(ref: Any, *index: Any, seen: jax.Array) -> Pair:
        """Two [n, Dh/2]; `index` of all dimensions but the last, arrays in it [n, 1]; `seen` [n]."""
        kept = seen[:, None] & (d < half)[None]
        return tuple(load(ref.at[*index, d[None] + start], mask=kept, other=0) for start in (0, half))

    def turned(x: Pair, row: jax.Array, seen: jax.Array, norm: Any) -> Pair:
        """Normalised and rotated."""
        first, second = (part.astype(jnp.float32) for part in x)
        kept = seen[:, None] & (d < half)[None]
        if norm is not None:
            mean = jnp.sum(first * first + second * second, axis=1, keepdims=True) / Dh
            scales = (load(norm.at[d + start], mask=d < half, other=0)[None] for start in (0, half))
            root = lax.rsqrt(mean + epsilon)
            normed = ((x * root * scale).astype(dtype) for x, scale in zip((first, second), scales, strict=True))
            first, second = (x.astype(jnp.float32) for x in normed)
        c, s = (load(ref.at[b, row[:, None], d[None]], mask=kept, other=0) for ref in (cos, sin))
        return (first * c - second * s).astype(dtype), (second * c + first * s).astype(dtype)

    def add(found: tuple, k: Pair, v: jax.Array, sees: jax.Array) -> tuple:
        """The softmax so far, of some more keys and values: weighted values, the largest score and the sum."""
        total, top, norm = found
        scores = jnp.where(sees, (_dot(q[0], k[0].T) + _dot(q[1], k[1].T)) * Dh**-0.5, _MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(sees, jnp.exp(scores - higher[:, None]), 0.0)
        kept = jnp.exp(top - higher)
        total = total * kept[:, None] + _dot(weights.astype(dtype), v)
        return total, higher, norm * kept + jnp.sum(weights, axis=1)

    def add_slots(i: jax.Array, found: tuple) -> tuple:
        slot = i * slots + jnp.arange(slots)
        inside = slot < limit
        sees = slot[None] < seen[:, None]
        if window is not None:
            sees &= slot[None] > at[:, None] - window
        v = load(values.at[b, k, slot[:, None], wide[None]], mask=inside[:, None] & (wide < Dh)[None], other=0)
        return add(found, halves(keys, b, k, slot[:, None], seen=inside), v, sees)

    def add_rows(i: jax.Array, found: tuple) -> tuple:
        other = i * own + jnp.arange(own)
        inside = other < R
        new = turned(halves(qkv, b, other[:, None], k, heads, seen=inside), other, inside, k_norm)
        v_mask = inside[:, None] & (wide < Dh)[None]
        v = load(qkv.at[b, other[:, None], k, heads + 1, wide[None]], mask=v_mask, other=0)
        sees = load(mask.at[b, 0, row[:, None], other[None]], mask=live[:, None] & inside[None], other=False)
        if window is not None:
            sees &= load(positions.at[b, other], mask=inside, other=0)[None] > at[:, None] - window
        for start, part in zip((0, half), new, strict=True):
            kept = (inside & writes)[:, None] & (d < half)[None]
            store(new_k.at[b, k, other[:, None], d[None] + start], part, mask=kept)
        store(new_v.at[b, k, other[:, None], wide[None]], v, mask=v_mask & writes)
        return add(found, new, v, sees)

    q = turned(halves(qkv, b, row[:, None], k, head[:, None], seen=live), row, live, q_norm)
    at = load(positions.at[b, row], mask=live, other=2**30)
    seen = load(visible.at[b, row if visible.shape[1] > 1 else row * 0], mask=live, other=0)
    limit = jnp.minimum(jnp.max(seen), S)
    begin = 0 if window is None else lax.div(jnp.maximum(jnp.min(at) - window + 1, 0), slots)
    end = lax.div(limit + slots - 1, slots)
    each = lax.div(jnp.maximum(end - begin, 0) + splits - 1, splits)
    begin = begin + split * each
    own = min(block(R), slots)
    nothing = jnp.zeros(queries, jnp.float32)
    found = (jnp.zeros((queries, 2 * halved), jnp.float32), nothing + _MASKED, nothing)
    found = lax.fori_loop(begin, jnp.minimum(begin + each, end), add_slots, found)
    blocks = -(-R // own)
    begin = split * -(-blocks // splits)
    found = lax.fori_loop(begin, jnp.minimum(begin - (-blocks // splits), blocks), add_rows, found)

    index, kept = (b, row[:, None], k, head[:, None], wide[None]), live[:, None] & (wide < Dh)[None]
    if splits == 1:
        total, _, norm = found
        store(results[0].at[*index], (total / jnp.maximum(norm, _TINY)[:, None]).astype(dtype), mask=kept)
    else:
        store(results[0].at[split, *index], found[0], mask=kept)
        for ref, x in zip(results[1:], found[1:], strict=True):
            store(ref.at[split, b, row, k, head], x, mask=live)


def _merge(total: Any, top: Any, norm: Any, out: Any) -> None:
    """One query of one row: what the instances found, [splits, B, R, K, H/K, ...], under one softmax."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import load, store

    (splits, _, _, _, heads, Dh), k, b = total.shape, pl.program_id(1), pl.program_id(2)
    row, head = lax.div(pl.program_id(0), heads), lax.rem(pl.program_id(0), heads)
    each, d = jnp.arange(splits), jnp.arange(block(Dh))
    tops = load(top.at[each, b, row, k, head])
    weights = jnp.exp(tops - jnp.max(tops))
    values = load(total.at[each[:, None], b, row, k, head, d[None]], mask=(d < Dh)[None], other=0)
    whole = jnp.sum(weights * load(norm.at[each, b, row, k, head]))
    result = jnp.sum(weights[:, None] * values, axis=0) / jnp.maximum(whole, _TINY)
    store(out.at[b, row, k, head, d], result.astype(out.dtype), mask=d < Dh)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """On tensor cores, but never with float32 rounded to TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
