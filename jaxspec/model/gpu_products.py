"""Products of few rows with kernels of few bits in groups, as one GPU kernel; `Quantized.dense` is the definition.

An instance takes some columns and a share of their rows: it reads the packed numbers, scales them on the way to the
tensor cores and writes a sum. Where few columns leave too few instances for a GPU, several share the rows of the same
ones, and XLA adds what they found.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.model.gpu import block, launch
from jaxspec.model.quantized import Quantized

MOST_ROWS = 64  # with more, multiplying takes the time rather than reading
_COLUMNS = 128  # of an instance, whose bytes lie side by side
_BYTES = 32  # rows of packed numbers that an instance reads at a time
_INSTANCES = 256  # about two for each multiprocessor of a large GPU
_SHARE = 8  # times `_BYTES` that an instance reads, at least


def multiply_groups(rows: jax.Array, kernels: Quantized) -> jax.Array:
    """Rows [R, in] times kernels [C, in, out]: [C, R, out] float32."""
    count, packed, columns = kernels.values.shape
    wide = -(-columns // _COLUMNS)
    chunks = -(-packed // _BYTES)
    splits = min(block(-(-_INSTANCES // (count * wide)), 1), max(chunks // _SHARE, 1))
    out = jax.ShapeDtypeStruct((splits, count, len(rows), columns), jnp.float32)
    kernel = functools.partial(_kernel, per_byte=kernels.per_byte, group=kernels.group, splits=splits)
    operands = [rows, *filter(lambda x: x is not None, (kernels.values, kernels.scales, kernels.minima))]
    [sums] = launch(kernel, (wide, splits, count), [out], *operands, stages=3)
    return jnp.sum(sums, axis=0)


def _kernel(rows: Any, values: Any, scales: Any, *rest: Any, per_byte: int, group: int, splits: int) -> None:
    """One instance; `rest` are the minima, if there are any, and the sums [splits, C, R, out]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import load, store

    *minima, sums = rest
    (R, _), (_, packed, columns), bytes_of_group = rows.shape, values.shape, group // per_byte
    split, c = pl.program_id(1), pl.program_id(2)
    r, n = jnp.arange(block(R)), pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
    live_row, live_column = r < R, n < columns

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        at = i * _BYTES + jnp.arange(_BYTES)
        inside = at < packed
        place, kept = lax.div(at, bytes_of_group), inside[:, None] & live_column[None]
        first = place * group + lax.rem(at, bytes_of_group)
        numbers = load(values.at[c, at[:, None], n[None]], mask=kept, other=0).astype(jnp.int32)
        scale, *lowest = (
            load(ref.at[c, place[:, None], n[None]], mask=kept, other=0).astype(jnp.float32)
            for ref in (scales, *minima)
        )
        for half in range(per_byte):
            seen = live_row[:, None] & inside[None]
            x = load(rows.at[r[:, None], (first + half * bytes_of_group)[None]], mask=seen, other=0)
            part = numbers if per_byte == 1 else (numbers >> 4 * half) & 15
            if per_byte == 2 and not minima:
                part = part - 8
            weights = part.astype(jnp.float32) * scale
            weights = weights + lowest[0] if minima else weights
            total += jnp.dot(
                x, weights.astype(x.dtype), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
            )
        return total

    chunks = -(-packed // _BYTES)
    each = -(-chunks // splits)
    end = jnp.minimum((split + 1) * each, chunks)
    total = lax.fori_loop(split * each, end, add, jnp.zeros((len(r), _COLUMNS), jnp.float32))
    store(sums.at[split, c, r[:, None], n[None]], total, mask=live_row[:, None] & live_column[None])
