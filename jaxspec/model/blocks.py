"""Products with a kernel in either layout: plain [in, out], or in blocks of columns [out / n, in, n].

XLA's CPU backend repacks a plain kernel for every product of two rows or more, which takes longer than the product. A
block is a small matrix that needs no packing. `jaxspec.weights.layouts` chooses and makes the layouts. A single row is
multiplied as two rows, by the code that two rows get. The layouts sum in different orders, so their products differ by
rounding, as those of different numbers of rows do.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

_MANY_ROWS = 128  # with more, even making a plain kernel costs less than it saves


@flax.struct.dataclass
class Corrected:
    """A kernel with a correction of low rank beside it, kernel + down @ up (LoRA).

    Kept apart in training, so that no gradient as large as the kernel is ever made.

    Attributes:
      kernel: [in, out].
      down: [in, r].
      up: [r, out].
    """

    kernel: jax.Array
    down: jax.Array
    up: jax.Array

    def merged(self) -> jax.Array:
        """[in, out] in the kernel's own dtype."""
        correction = jnp.matmul(self.down, self.up, precision="highest")
        return (self.kernel.astype(wide(self.kernel)) + correction).astype(self.kernel.dtype)


def merged(params: Any) -> Any:
    """A parameter tree with every correction added to its kernel."""

    def is_corrected(leaf: Any) -> bool:
        return isinstance(leaf, Corrected)

    return jax.tree.map(lambda x: x.merged() if is_corrected(x) else x, params, is_leaf=is_corrected)


def product(x: jax.Array, kernel: jax.Array | Corrected, **options: Any) -> jax.Array:
    """x [..., in] times a kernel, [in, out], in blocks [out / n, in, n] or corrected: [..., out].

    Rows in float32 are multiplied with a kernel in bfloat16 as exactly as with one in float32.
    """
    if isinstance(kernel, Corrected):
        down, up = kernel.down.astype(x.dtype), kernel.up.astype(x.dtype)
        return product(x, kernel.kernel, **options) + (x @ down) @ up
    if (x.dtype, kernel.dtype) == (jnp.float32, jnp.bfloat16):
        high, middle, low = product(_in_terms(x), kernel, preferred_element_type=jnp.float32)
        return high + (middle + low)
    if kernel.ndim == 2:
        return jnp.matmul(x, kernel, **options)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > _MANY_ROWS:
        return jnp.matmul(x, kernel.swapaxes(0, 1).reshape(x.shape[-1], -1), **options)
    count = len(rows)
    rows = jnp.repeat(rows, 2, axis=0) if count == 1 else rows
    everywhere = jnp.broadcast_to(rows, (len(kernel), *rows.shape))
    y = lax.dot_general(everywhere, kernel, (((2,), (1,)), ((0,), (0,))), **options)[:, :count]  # [out / n, R, n]
    return y.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


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


def wide(x: jax.Array) -> jnp.dtype:
    """The dtype of sums over `x`: float32, or its own where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def columns(kernel: jax.Array, index: jax.Array) -> jax.Array:
    """Some columns of a kernel in either layout: index [...] to [..., in]."""
    if kernel.ndim == 2:
        return jnp.moveaxis(jnp.take(kernel, index, axis=1), 0, -1)
    block, column = jnp.divmod(index, kernel.shape[-1])
    return kernel[block, :, column]
