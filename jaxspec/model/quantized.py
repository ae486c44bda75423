"""Kernels of 8 or 4 bits: whole numbers, and what they are scaled with, by column or by groups of rows of a column.

    int8      number * scale, of -127 to 127
    int4      (number - 8) * scale, or number * scale + minimum, of 0 to 15; two numbers in a byte

A byte holds two numbers of one group and column: its lower half one of the group's first half, its upper half the one
half a group further down. GGUF files store theirs so. `jaxspec.model.small_products` multiplies with them.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

GROUPS = {"int8": 0, "int4": 32, "int4-64": 64}  # rows that share a scale, by form; 0: all of a column
_LARGEST = 127
_MIDDLE = 8  # of the numbers of 4 bits
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's largest number: clipping it may cost less than coarser steps


@flax.struct.dataclass
class Quantized:
    """A kernel [..., in, out] in few bits; it takes the place of a plain one, several may lie side by side.

    Attributes:
      values: [..., in, out] int8; or of 4 bits [..., in / 2, out] uint8, two in a byte.
      scales: [..., G, out], one per group of in / G rows: float32 where G is 1, else float16.
      minima: [..., G, out] float16, which are added; None: there are none.
      kind: the dtype that the kernel stands in for, by its name (static).
    """

    values: jax.Array
    scales: jax.Array
    minima: jax.Array | None = None
    kind: str = flax.struct.field(pytree_node=False, default="float32")

    @property
    def per_byte(self) -> int:
        """Numbers in a byte: 1 or 2."""
        return 2 if self.values.dtype == jnp.uint8 else 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of embeddings, hidden states and caches of a base with such kernels."""
        return jnp.dtype(self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel that it stands for, [..., in, out]."""
        *more, rows, columns = self.values.shape
        return (*more, rows * self.per_byte, columns)

    @property
    def ndim(self) -> int:
        """Dimensions of `shape`."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Weights, however few bits they take."""
        return self.values.size * self.per_byte

    @property
    def group(self) -> int:
        """Rows that share a scale."""
        return self.shape[-2] // self.scales.shape[-2]

    @property
    def by_column(self) -> bool:
        """Whether a product can be scaled in place of the kernel."""
        return self.scales.shape[-2] == 1 and self.minima is None and self.per_byte == 1

    def dense(self, dtype: jnp.dtype) -> jax.Array:
        """The kernel [..., in, out] written out."""
        *more, rows, columns = self.shape
        parts = [part.reshape(*more, self.scales.shape[-2], -1, columns) for part in self.dense_parts(dtype)]
        return jnp.concatenate(parts, axis=-2).reshape(*more, rows, columns)

    def dense_parts(self, dtype: jnp.dtype) -> list[jax.Array]:
        """The same in parts [..., in / P, out]: the P numbers of every byte, whose rows are those of `split_rows`."""
        *more, rows, columns = self.values.shape
        bytes_ = self.values.reshape(*more, self.scales.shape[-2], -1, columns)  # [..., G, in / G / P, out]
        parts = [bytes_] if self.per_byte == 1 else [bytes_ & 15, bytes_ >> 4]
        scales, lowest = self.scales[..., None, :].astype(jnp.float32), 0.0
        if self.minima is not None:
            lowest = self.minima[..., None, :].astype(jnp.float32)
        elif self.per_byte == 2:
            lowest = -_MIDDLE * scales
        weights = (part.astype(jnp.float32) * scales + lowest for part in parts)
        return [part.astype(dtype).reshape(*more, rows, columns) for part in weights]

    def split_rows(self, x: jax.Array) -> list[jax.Array]:
        """[..., in] as its parts [..., in / P] that `dense_parts` are multiplied with."""
        grouped = x.reshape(*x.shape[:-1], self.scales.shape[-2], self.per_byte, -1)
        return [grouped[..., half, :].reshape(*x.shape[:-1], -1) for half in range(self.per_byte)]

    def join_rows(self, parts: list[jax.Array]) -> jax.Array:
        """The opposite of `split_rows`."""
        grouped = [part.reshape(*part.shape[:-1], self.scales.shape[-2], -1) for part in parts]
        return jnp.stack(grouped, axis=-2).reshape(*parts[0].shape[:-1], -1)

    def astype(self, dtype: jnp.dtype) -> jax.Array:
        """`dense`: what starts as a copy of a kernel is a plain one."""
        return self.dense(dtype)

    def take(self, index: jax.Array) -> Quantized:
        """Some columns [n] of it, [..., in, n]."""
        return jax.tree.map(lambda x: jnp.take(x, index, axis=-1), self)

    def part(self, start: jax.Array | int, size: int) -> Quantized:
        """So many columns from one on."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 1), self)


def is_quantized(leaf: Any) -> bool:
    """Whether a leaf of a parameter tree is such a kernel."""
    return isinstance(leaf, Quantized)


def dense(tree: Any) -> Any:
    """A tree with every such kernel written out in the dtype that it stands in for."""
    return jax.tree.map(lambda x: x.dense(x.dtype) if is_quantized(x) else x, tree, is_leaf=is_quantized)


def form_of(kernel: Any) -> str:
    """The one of `GROUPS` that it is in, or `int8-32` and the like for groups of a file; empty for a plain one."""
    if not is_quantized(kernel):
        return ""
    if kernel.per_byte == 1:
        return "int8" if kernel.scales.shape[-2] == 1 else f"int8-{kernel.group}"
    return "int4-64" if kernel.group == 64 else "int4"


def quantize(kernel: jax.Array, form: str, dtype: str) -> Quantized:
    """A kernel [..., in, out] with the scales that its numbers need.

    Args:
      kernel: of floats.
      form: one of `GROUPS`, whose group divides `in`.
      dtype: what it stands in for.
    """
    *more, rows, columns = kernel.shape
    if form == "int8":
        kernel = kernel.astype(jnp.float32)
        scales = jnp.max(jnp.abs(kernel), axis=-2, keepdims=True) / _LARGEST
        values = jnp.round(kernel / jnp.where(scales > 0, scales, 1))
        return Quantized(values.astype(jnp.int8), scales, kind=dtype)
    groups = kernel.astype(jnp.float32).reshape(*more, rows // GROUPS[form], GROUPS[form], columns)
    values, scales = _nearest(groups)
    low, high = jnp.split(values, 2, axis=-2)
    packed = (low | high << 4).reshape(*more, rows // 2, columns)
    return Quantized(packed, scales.reshape(*more, -1, columns), kind=dtype)


def _nearest(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers uint8 [..., G, g, out] and scales float16 [..., G, 1, out] of least squared error.

    The largest number in magnitude, whatever its sign, becomes the lowest one, -8, or is clipped to it.
    """
    lowest = jnp.min(groups, axis=-2, keepdims=True)
    highest = jnp.max(groups, axis=-2, keepdims=True)
    widest = jnp.where(-lowest > highest, lowest, highest) / -_MIDDLE
    smallest = jnp.finfo(jnp.float16).smallest_subnormal

    def rounded(scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scales = scales.astype(jnp.float16)
        divisors = jnp.where(jnp.abs(scales) < smallest, 1, scales.astype(jnp.float32))
        numbers = jnp.clip(jnp.round(groups / divisors), -_MIDDLE, _MIDDLE - 1)
        error = jnp.sum((numbers * scales.astype(jnp.float32) - groups) ** 2, axis=-2, keepdims=True)
        return error, numbers, scales

    best = rounded(widest)
    for shrink in _SHRINKS[1:]:
        other = rounded(widest * shrink)
        better = other[0] < best[0]
        best = tuple(jnp.where(better, new, old) for new, old in zip(other, best, strict=True))
    _, numbers, scales = best
    return (numbers + _MIDDLE).astype(jnp.uint8), scales


def fits(shape: tuple[int, ...], form: str) -> bool:
    """Whether a kernel of this shape can be held in a form: its rows are whole groups."""
    return form == "int8" or shape[-2] % GROUPS[form] == 0


def on_host(kernel: Quantized) -> Quantized:
    """The same with NumPy arrays."""
    return jax.tree.map(np.asarray, kernel)
