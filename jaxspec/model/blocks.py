"""Products with a kernel in either layout: plain [in, out], or in blocks of columns [out / n, in, n].

Kernels of one shape that multiply the same rows may be held side by side, [2, in, out], and take one product.

XLA's CPU backend repacks a plain kernel for every product of two rows or more, which takes longer than the product. A
block is a small matrix that needs no packing. `jaxspec.weights.layouts` chooses and makes the layouts. A single row is
multiplied as two rows, by the code that two rows get. The layouts sum in different orders, so their products differ by
rounding, as those of different numbers of rows do.

On GPUs one row would be multiplied and summed without tensor cores, which may write an array as large as the kernel,
and a few rows in more kernels than eight. A pass of the base pads its rows once (`least_rows`), other products their
own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.model.dtypes import wide
from jaxspec.model.quantized import Quantized, is_quantized
from jaxspec.model.small_products import small_products

_MANY_ROWS = 128  # with more, even making a plain kernel costs less than it saves
_GPUS = ("gpu", "cuda", "rocm")
_TILE = 8  # rows that tensor cores multiply at once


def holds_pairs(platform: str) -> bool:
    """Whether gate and up are held side by side: a kernel less per layer on GPUs, and slower on CPUs."""
    return platform in _GPUS


def least_rows(platform: str) -> int:
    """Rows that a pass computes at least on devices of a platform (`jax.Device.platform`)."""
    return _TILE if platform in _GPUS else 1


@flax.struct.dataclass
class Corrected:
    """A kernel with a correction of low rank beside it, kernel + down @ up (LoRA).

    Kept apart in training, so that no gradient as large as the kernel is ever made.

    Attributes:
      kernel: [in, out], or several side by side as `products` takes them, as are the others then.
      down: [in, r].
      up: [r, out].
    """

    kernel: jax.Array | Quantized
    down: jax.Array
    up: jax.Array

    def merged(self) -> jax.Array:
        """The corrected kernel, in its own dtype."""
        correction = jnp.matmul(self.down, self.up, precision="highest")
        return (self.kernel.astype(wide(self.kernel)) + correction).astype(self.kernel.dtype)


def merged(params: Any) -> Any:
    """A parameter tree with every correction added to its kernel; over a quantized one it stays beside it."""

    def is_corrected(leaf: Any) -> bool:
        return isinstance(leaf, Corrected)

    def sum_of(leaf: Any) -> Any:
        return leaf.merged() if is_corrected(leaf) and not is_quantized(leaf.kernel) else leaf

    return jax.tree.map(sum_of, params, is_leaf=is_corrected)


def product(x: jax.Array, kernel: jax.Array | Quantized | Corrected, **options: Any) -> jax.Array:
    """x [..., in] times a kernel, [in, out], in blocks [out / n, in, n], quantized or corrected: [..., out].

    Rows in float32 are multiplied with a kernel in bfloat16 as exactly as with one in float32.
    """
    if isinstance(kernel, Corrected):
        down, up = kernel.down.astype(x.dtype), kernel.up.astype(x.dtype)
        return product(x, kernel.kernel, **options) + (x @ down) @ up
    if is_quantized(kernel):
        return products(x, jax.tree.map(lambda leaf: leaf[None], kernel), **options)[0]
    if (x.dtype, kernel.dtype) == (jnp.float32, jnp.bfloat16):
        high, middle, low = product(_in_terms(x), kernel, preferred_element_type=jnp.float32)
        return high + (middle + low)
    rows = math.prod(x.shape[:-1])
    if kernel.ndim == 3 and rows > _MANY_ROWS:
        kernel = kernel.swapaxes(0, 1).reshape(x.shape[-1], -1)
    multiply = functools.partial(jnp.matmul if kernel.ndim == 2 else _in_blocks, **options)
    if kernel.ndim == 2 and rows >= _TILE:
        return multiply(x, kernel)
    return _tiled(multiply, x.reshape(rows, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)


def products(x: jax.Array, kernel: jax.Array | Quantized | Corrected, **options: Any) -> jax.Array:
    """x [..., in] times kernels side by side, [C, in, out], quantized or corrected: [C, ..., out].

    Each is as `product` has it.
    """
    if isinstance(kernel, Corrected):
        down, up = kernel.down.astype(x.dtype), kernel.up.astype(x.dtype)
        y, thin = products(x, kernel.kernel, **options), products(x, down)
        return y + (thin.reshape(len(thin), -1, thin.shape[-1]) @ up).reshape(y.shape)
    if is_quantized(kernel):
        multiply = functools.partial(small_products, dtype=options.get("preferred_element_type", x.dtype))
        return _tiled(multiply, x.reshape(-1, x.shape[-1]), kernel).reshape(kernel.shape[0], *x.shape[:-1], -1)
    if (x.dtype, kernel.dtype) == (jnp.float32, jnp.bfloat16):
        high, middle, low = products(_in_terms(x), kernel, preferred_element_type=jnp.float32).swapaxes(0, 1)
        return high + (middle + low)
    multiply = functools.partial(_each, **options)
    return _tiled(multiply, x.reshape(-1, x.shape[-1]), kernel).reshape(len(kernel), *x.shape[:-1], -1)


def own_products(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """x [..., M, in], each of the M times the kernel of its own in [M, in, out]: [..., M, out]."""
    rows = x.reshape(-1, *x.shape[-2:]).swapaxes(0, 1)  # [M, R, in]
    return _tiled(jnp.matmul, rows, kernels).swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def _in_blocks(rows: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    """Rows [R, in] times a kernel in blocks [out / n, in, n]: [R, out]."""
    count = len(rows)
    rows = jnp.repeat(rows, 2, axis=0) if count == 1 else rows
    y = _each(rows, kernel, **options)[:, :count]  # [out / n, R, n]
    return y.swapaxes(0, 1).reshape(count, -1)


def _each(rows: jax.Array, kernels: jax.Array, **options: Any) -> jax.Array:
    """Rows [R, in] times each of some kernels [C, in, out]: [C, R, out]."""
    everywhere = jnp.broadcast_to(rows, (len(kernels), *rows.shape))
    return lax.dot_general(everywhere, kernels, (((2,), (1,)), ((0,), (0,))), **options)


def _tiled(multiply: Callable[..., jax.Array], rows: jax.Array, kernel: jax.Array | Quantized) -> jax.Array:
    """The product [..., R, out] of rows [..., R, in] and a kernel; on GPUs of a tile of rows at least."""
    count = rows.shape[-2]
    if count >= _TILE:
        return multiply(rows, kernel)

    def padded(rows: jax.Array, kernel: jax.Array | Quantized) -> jax.Array:
        spare = [(0, _TILE - count if axis == rows.ndim - 2 else 0) for axis in range(rows.ndim)]
        return multiply(jnp.pad(rows, spare), kernel)[..., :count, :]

    return lax.platform_dependent(rows, kernel, cuda=padded, rocm=padded, default=multiply)


def _in_terms(x: jax.Array) -> jax.Array:
    """float32 [...] as a sum of three terms in bfloat16, [3, ...]: 24 bits of mantissa in three times 8.

    Few rows are free where reading the kernel is what takes the time, and three times as many are still few.
    """
    terms, rest = [], x
    for _ in range(3):
        # not `astype` there and back, which XLA takes for the identity
        terms.append(lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - terms[-1]
    return jnp.stack(terms).astype(jnp.bfloat16)


def columns(kernel: jax.Array | Quantized, index: jax.Array) -> jax.Array:
    """Some columns of a kernel in either layout, or quantized: index [...] to [..., in]."""
    if is_quantized(kernel):
        taken = kernel.take(index.reshape(-1)).dense(kernel.dtype)
        return taken.T.reshape(*index.shape, -1)
    if kernel.ndim == 2:
        return jnp.moveaxis(jnp.take(kernel, index, axis=1), 0, -1)
    block, column = jnp.divmod(index, kernel.shape[-1])
    return kernel[block, :, column]


def fewer_columns(kernel: jax.Array | Quantized, ids: jax.Array) -> jax.Array | Quantized:
    """A kernel [in, n] of some columns [n] of another one, quantized where that is."""
    return kernel.take(ids) if is_quantized(kernel) else columns(kernel, ids).T
