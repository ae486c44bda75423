"""Kernels in blocks of columns, the layout in which XLA's CPU backend multiplies a few rows as fast as one.

A plain kernel [in, out] is repacked by every product of two rows or more, which takes longer than the product. In
blocks [out / n, in, n] every block is a small matrix of its own that needs no packing. With n = 64 a step of a 135M
model takes 36 ms on two cores instead of 46 with 8 rows, 182 instead of 156 with 64 (JAX 0.12). From how many rows on
packing pays depends on the kernel, the machine and JAX: `jaxspec.weights.layouts`. A row alone is multiplied as two, by
the code that two rows get. Accelerators want the plain layout. The layouts sum in different orders, so their products
differ by rounding, as those of different numbers of rows do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MANY_ROWS = 128  # with more, even making a plain kernel costs less than it saves
_ALIGNED = 64  # bytes; arrays that begin elsewhere JAX copies

Kernels = dict[tuple, jax.Array]  # by their places in a tree, all of one shape
Copies = dict[tuple[tuple[int, int], int], Kernels]  # in blocks, by shape and columns per block


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


def kernels_by_shape(params: Any, names: Sequence[str] = ("kernel", "lm_head")) -> dict[tuple[int, int], Kernels]:
    """The plain kernels [in, out] of a pytree: its leaves of two axes with one of these names."""
    found: dict[tuple[int, int], Kernels] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        if jax.tree_util.keystr(path[-1:], simple=True) in names and leaf.ndim == 2:
            found.setdefault(leaf.shape, {})[path] = leaf
    return found


def in_blocks(
    params: Any,
    block: Callable[[tuple[int, int]], int],
    names: Sequence[str] = ("kernel", "lm_head"),
    made: Copies | None = None,
) -> Any:
    """A pytree with its kernels in blocks; all other leaves are those of `params`.

    Args:
      params: what holds kernels.
      block: n, a divisor of the columns, for the shape of a kernel; 0 leaves it plain.
      names: of the leaves that `product` multiplies with.
      made: copies made before, which are taken again; those made now are added.
    """
    made, chosen = {} if made is None else made, {}
    for shape, kernels in kernels_by_shape(params, names).items():
        if n := block(shape):
            if (shape, n) not in made:
                made[shape, n] = _side_by_side({path: _blocks(leaf, n) for path, leaf in kernels.items()})
            chosen |= made[shape, n]
    return jax.tree.map_with_path(lambda path, leaf: chosen.get(path, leaf), params) if chosen else params


def _blocks(kernel: jax.Array, block: int) -> np.ndarray:
    """[in, out] to [out / n, in, n], a view."""
    kernel = np.asarray(kernel)
    return kernel.reshape(len(kernel), -1, block).swapaxes(0, 1)


def _side_by_side(arrays: dict[tuple, np.ndarray]) -> Kernels:
    """A copy of NumPy arrays on a CPU, all in one stretch of memory.

    Linux gives large stretches large pages, with which steps of a 135M model take 4 to 7% less time.
    """
    room = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays.values()]
    memory = np.empty(sum(room) + _ALIGNED, np.uint8)
    starts = itertools.accumulate(room[:-1], initial=-memory.ctypes.data % _ALIGNED)

    def place(array: np.ndarray, start: int) -> jax.Array:
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return jax.device_put(copy, may_alias=True)

    with ThreadPoolExecutor() as pool:
        return dict(zip(arrays, pool.map(place, arrays.values(), starts), strict=True))
