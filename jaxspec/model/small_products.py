"""Products with kernels of few bits, forwards and backwards, which write no kernel out (see `jaxspec.model.quantized`).

With a scale per column the product is scaled, and accelerators read the numbers as they are. On CPUs, and with groups
where no kernel of `jaxspec.model.gpu_products` runs, a few columns at a time are written out, which stay in the cache
of a CPU. Over a mesh the compiler divides plain code alone: there a kernel with groups is written out, one at a time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.model.dtypes import wide
from jaxspec.model.gpu import either, has_kernels
from jaxspec.model.quantized import Quantized

_PART = {"cpu": 2**20, "default": 2**22}  # weights that are written out at a time


def small_products(rows: jax.Array, kernels: Quantized, dtype: jnp.dtype) -> jax.Array:
    """Rows [R, in] times kernels side by side [C, in, out]: [C, R, out] in `dtype`, summed in float32 or wider.

    Numbers and scales are constants: gradients are those of the rows.
    """
    return _products(rows, kernels, jnp.dtype(dtype).name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products(rows: jax.Array, kernels: Quantized, dtype: str) -> jax.Array:
    if _on_mesh():
        forward = _scaled if kernels.by_column else _at_once
        return forward(rows, kernels).astype(dtype)
    if kernels.by_column:
        parts, scaled = functools.partial(_in_parts, _PART["cpu"]), _scaled
        return lax.platform_dependent(rows, kernels, cpu=parts, default=scaled).astype(dtype)
    return _grouped(rows, kernels).astype(dtype)


def _forward(rows: jax.Array, kernels: Quantized, dtype: str) -> tuple[jax.Array, tuple[Quantized, jax.Array]]:
    return _products(rows, kernels, dtype), (kernels, jnp.zeros(0, rows.dtype))


def _backward(dtype: str, kept: tuple[Quantized, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    kernels, like = kept
    # or what the forward pass writes out would be kept for this one
    kernels, gradient = lax.optimization_barrier((kernels, gradient))
    if _on_mesh():
        backward = _scaled_back if kernels.by_column else _at_once_back
        return backward(gradient, kernels).astype(like.dtype), None
    cpu, other = (functools.partial(_in_parts_back, size) for size in _PART.values())
    default = _scaled_back if kernels.by_column else other
    return lax.platform_dependent(gradient, kernels, cpu=cpu, default=default).astype(like.dtype), None


_products.defvjp(_forward, _backward)


def _on_mesh() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def _multiply(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    """[R, in] times [C, in, n]: [C, R, n] in float32 or wider."""
    everywhere = jnp.broadcast_to(rows, (len(kernels), *rows.shape))
    return lax.dot_general(everywhere, kernels, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide(rows))


def _multiply_back(gradient: jax.Array, kernels: jax.Array) -> jax.Array:
    """[C, R, n] times the transposes of [C, in, n], summed over C: [R, in] in float32 or wider."""
    each = lax.dot_general(gradient, kernels, (((2,), (2,)), ((0,), (0,))), preferred_element_type=wide(gradient))
    return jnp.sum(each, axis=0)


def _scaled(rows: jax.Array, kernels: Quantized) -> jax.Array:
    return _multiply(rows, kernels.values.astype(rows.dtype)) * kernels.scales


def _scaled_back(gradient: jax.Array, kernels: Quantized) -> jax.Array:
    return _multiply_back((gradient * kernels.scales).astype(gradient.dtype), kernels.values.astype(gradient.dtype))


def _at_once(rows: jax.Array, kernels: Quantized) -> jax.Array:
    parts = zip(kernels.split_rows(rows), kernels.dense_parts(rows.dtype), strict=True)
    return sum(_multiply(*part) for part in parts)


def _at_once_back(gradient: jax.Array, kernels: Quantized) -> jax.Array:
    return kernels.join_rows([_multiply_back(gradient, part) for part in kernels.dense_parts(gradient.dtype)])


def _width(size: int, kernels: Quantized) -> tuple[int, int, int]:
    """Columns of a part of so many weights, how many such parts there are, and how many columns are left.

    There are two at least: XLA would write out what is no loop long before it is multiplied, all kernels at once.
    """
    count, rows, columns = kernels.shape
    width = min(max(size // (count * rows) // 64 * 64, 64), -(-columns // 2))
    return width, *divmod(columns, width)


def _in_parts(size: int, rows: jax.Array, kernels: Quantized) -> jax.Array:
    """A part of the columns after the other."""
    width, parts, rest = _width(size, kernels)
    y = lax.map(lambda i: _at_once(rows, kernels.part(i * width, width)), jnp.arange(parts))  # [parts, C, R, width]
    y = jnp.moveaxis(y, 0, 2).reshape(len(kernels.values), len(rows), -1)
    if rest:
        y = jnp.concatenate([y, _at_once(rows, kernels.part(parts * width, rest))], axis=-1)
    return y


def _in_parts_back(size: int, gradient: jax.Array, kernels: Quantized) -> jax.Array:
    """The same of the gradient, [R, in]."""
    width, parts, rest = _width(size, kernels)

    def of_part(start: jax.Array | int, width: int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(gradient, start, width, axis=2)
        return _at_once_back(part, kernels.part(start, width))

    nothing = jnp.zeros((gradient.shape[1], kernels.shape[1]), wide(gradient))
    total = lax.fori_loop(0, parts, lambda i, total: total + of_part(i * width, width), nothing)
    return total + of_part(parts * width, rest) if rest else total


def _grouped(rows: jax.Array, kernels: Quantized) -> jax.Array:
    """Kernels with groups: by a kernel of ours where it runs, else in parts."""
    from jaxspec.model.gpu_products import MOST_ROWS, multiply_groups  # imports Pallas only when it runs

    cpu, other = (functools.partial(_in_parts, size) for size in _PART.values())

    def plain(rows: jax.Array, kernels: Quantized) -> jax.Array:
        return lax.platform_dependent(rows, kernels, cpu=cpu, default=other)

    if len(rows) <= MOST_ROWS and has_kernels():
        return either(multiply_groups, plain, rows, kernels)
    return plain(rows, kernels)


def small_note(kernel: Quantized, divided: bool) -> str:
    """One line for users whose device multiplies such kernels by slower code than others do; empty for all others.

    `divided` says whether the weights are, over several devices.
    """
    if jax.default_backend() == "cpu":
        return "weights in few bits take less memory on a CPU, and more time than float32: see docs/small-weights.md"
    if kernel.by_column and (jax.default_backend() != "gpu" or has_kernels()):
        return ""
    if kernel.by_column:
        return "int8 weights save memory and not time on this GPU: they are written out in 16 bits for every product"
    if has_kernels() and not divided:
        return ""
    return (
        "weights in groups have no kernel of their own on these devices: they are written out for every product, in "
        "parts or one by one; int8 has a scale per column"
    )
