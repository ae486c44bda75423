"""How an adapter's weights are stored: as they are, in 16 bits, or matrices as int8 with a scale per column."""

from __future__ import annotations

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.draft import PyTree
from jaxspec.errors import UserError
from jaxspec.parallel.processes import host

_SCALE = ":scale"  # behind the name of an int8 tensor: the name of its scales
_FEWEST_ROWS = 8  # of a matrix whose columns are worth a scale each


def pack(trainable: PyTree, dtype: str) -> dict[str, np.ndarray]:
    """The tensors of an adapter's file by name.

    Args:
      trainable: the pytree, float32.
      dtype: float32, float16, or int8: matrices [..., in, out] as whole numbers from -127 to 127 with a float32 scale
        [..., 1, out] per column, everything else in float16.
    """
    flat = flax.traverse_util.flatten_dict(trainable, sep="/")
    tensors = {}
    for name, leaf in flat.items():
        if dtype == "int8" and _is_matrix(leaf):
            values, scale = _quantize(leaf)
            tensors |= {name: host(values), name + _SCALE: host(scale)}
        else:
            tensors[name] = host(leaf.astype(_plain(dtype)))
    return tensors


def unpack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of an adapter's file by name, float32: what `pack` was given, but for its rounding."""
    scales = {name: tensors[name] for name in tensors if name.endswith(_SCALE)}
    return {
        name: value.astype(np.float32) * (scales[name + _SCALE] if value.dtype == np.int8 else 1)
        for name, value in tensors.items()
        if name not in scales
    }


def as_stored(trainable: PyTree, dtype: str) -> PyTree:
    """Weights rounded as in an adapter's file of that dtype. Raises UserError where some do not fit."""

    def rounded(leaf: jax.Array) -> jax.Array:
        if dtype == "int8" and _is_matrix(leaf):
            values, scale = _quantize(leaf)
            return values.astype(jnp.float32) * scale
        return leaf.astype(_plain(dtype)).astype(jnp.float32)

    trainable = jax.tree.map(rounded, trainable)
    if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(trainable)):
        raise UserError(f"some weights do not fit {dtype}; continue with --resume --train.adapter-dtype float32")
    return trainable


def _is_matrix(leaf: jax.Array) -> bool:
    return leaf.ndim >= 2 and leaf.shape[-2] >= _FEWEST_ROWS


def _plain(dtype: str) -> str:
    return "float16" if dtype == "int8" else dtype


def _quantize(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., in, out] as int8, and what a step of it means [..., 1, out]."""
    largest = jnp.max(jnp.abs(leaf), axis=-2, keepdims=True).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.round(leaf / scale).astype(jnp.int8), scale
