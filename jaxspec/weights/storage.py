"""Storage of weights such as an adapter's: as they are, in 16 bits, or as int8 with a scale per column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import UserError
from jaxspec.parallel.processes import host
from jaxspec.weights.shards import map_safetensors

PyTree = Any

# Behind the name of an int8 tensor: what its whole numbers are multiplied with, and how many identities are added.
_SCALE, _IDENTITY = ":scale", ":identity"
_SMALLEST = np.finfo(np.float16).smallest_subnormal  # scale, of columns of zeros
_FEWEST_ROWS = 8  # of a matrix whose columns are worth a scale each


def pack(trainable: PyTree, dtype: str) -> dict[str, np.ndarray]:
    """The tensors of an adapter's file by name.

    Args:
      trainable: the pytree, float32 and int32.
      dtype: float32, float16, bfloat16, or int8: matrices [..., in, out] as whole numbers from -127 to 127 with a
        float16 scale [..., 1, out] per column, everything else in float16. Of a matrix that learned from the identity,
        its difference from that: else the diagonal would set all scales. Integers stay as they are.
    """
    tensors = {}
    for name, leaf in flax.traverse_util.flatten_dict(trainable, sep="/").items():
        if dtype == "int8" and _is_matrix(leaf):
            values, scale, identity = map(host, _quantize(leaf))
            tensors |= {name: values, name + _SCALE: scale} | ({name + _IDENTITY: identity} if identity else {})
        else:
            tensors[name] = host(leaf if _is_whole(leaf) else leaf.astype(_plain(dtype)))
    return {name: np.asarray(x, order="C") for name, x in tensors.items()}  # safetensors writes memory as it lies


def unpack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of an adapter's file by name: what `pack` was given, but for its rounding.

    Raises ValueError for an int8 tensor without its scales.
    """
    weights = dict(tensors)
    for name in [name for name, value in tensors.items() if value.dtype == np.int8]:
        scale, identity = weights.pop(name + _SCALE, None), weights.pop(name + _IDENTITY, np.float32(0))
        values = weights[name]
        if scale is None or scale.shape != (*values.shape[:-2], 1, values.shape[-1]) or identity.shape:
            raise ValueError(f"tensor {name!r} is int8, and its scales are missing or misshapen")
        weights[name] = _dequantize(values, scale, identity)
    return {name: x if x.dtype.kind in "iu" else x.astype(np.float32, copy=False) for name, x in weights.items()}


def read_weights(file: Path) -> dict[str, np.ndarray]:
    """The weights in a file by name, as `unpack` has them. Raises UserError naming the file."""
    try:
        return unpack({name: np.array(x) for name, x in map_safetensors(file).items()})
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None


def check_shapes(file: Path, tensors: Mapping[str, Any], expected: Mapping[str, Any], whose: str) -> None:
    """Raise UserError for the first tensor of a file that is missing or misshapen; `whose` shapes are expected."""
    for name, like in expected.items():
        if name not in tensors:
            raise UserError(f"{file}: tensor {name!r} is missing")
        if tensors[name].shape != like.shape:
            shape, needed = list(tensors[name].shape), list(like.shape)
            raise UserError(f"{file}: tensor {name!r} has shape {shape}, {whose} needs {needed}")


def as_stored(trainable: PyTree, dtype: str) -> PyTree:
    """Weights rounded as in an adapter's file of that dtype. Raises UserError where some do not fit."""

    def rounded(leaf: jax.Array) -> jax.Array:
        if dtype == "int8" and _is_matrix(leaf):
            return _dequantize(*_quantize(leaf))
        return leaf.astype(_plain(dtype)).astype(jnp.float32)

    trainable = jax.tree.map(rounded, trainable)
    if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(trainable)):
        raise UserError(f"some weights do not fit {dtype}; continue with --resume --train.adapter-dtype float32")
    return trainable


def _is_whole(leaf: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def _is_matrix(leaf: jax.Array) -> bool:
    return not _is_whole(leaf) and leaf.ndim >= 2 and leaf.shape[-2] >= _FEWEST_ROWS


def _plain(dtype: str) -> str:
    return "float16" if dtype == "int8" else dtype


def _quantize(leaf: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[..., in, out] as int8, the scale of every column [..., 1, out], and how many identities to add []."""
    identity = jnp.round(jnp.mean(jnp.diagonal(leaf, axis1=-2, axis2=-1))).astype(jnp.float32)
    rest = leaf - identity * jnp.eye(*leaf.shape[-2:])
    largest = jnp.max(jnp.abs(rest), axis=-2, keepdims=True)
    scale = jnp.maximum((largest / 127).astype(jnp.float16), _SMALLEST)
    values = jnp.clip(jnp.round(rest / scale.astype(jnp.float32)), -127, 127)
    return values.astype(jnp.int8), scale, identity


def _dequantize(values: jax.Array, scale: jax.Array, identity: jax.Array) -> jax.Array:
    return values.astype(np.float32) * scale.astype(np.float32) + identity * np.eye(
        *values.shape[-2:], dtype=np.float32
    )
