"""The key/value cache: one preallocated buffer per layer, written only after acceptance.

Slot s of a batch row holds the key and value of the token at position s. A row's length says how many slots
are valid; what lies beyond is garbage that the next commit overwrites:

    length 5, path of 3 accepted   |t0 t1 t2 t3 t4| .  .  .  .      before
    commit writes the whole path   |t0 t1 t2 t3 t4  r  a  b| x .    after: length 8, x is never looked at
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxspec.config import ModelConfig
from jaxspec.model.gpu import either
from jaxspec.model.gpu_cache import pick_rows, takes, write_rows
from jaxspec.parallel.sharding import over_mesh

_NAMES = ("batch", "heads")  # of the dimensions of keys and values that a mesh divides


@flax.struct.dataclass
class Cache:
    """Keys and values of every layer.

    Attributes:
      keys: L arrays [B, K, S, Dh], rotated.
      values: L arrays [B, K, S, Dh].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def capacity(self) -> int:
        """S, slots per batch row."""
        return self.keys[0].shape[2]


def empty_cache(config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
    """A cache of zeros: `batch` rows of `capacity` slots."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return Cache(keys, values)


def gather_rows(rows: Cache, index: jax.Array) -> Cache:
    """Pick rows out of a step's keys and values.

    Args:
      rows: the rows' own keys and values, L x [B, K, R, Dh].
      index: [B, P] int32, which rows.

    Returns:
      L x [B, K, P, Dh].
    """
    arrays, structure = jax.tree.flatten(rows)
    if all(x.shape[2] == index.shape[1] == 1 for x in arrays):  # a lone root
        return rows

    def plain(arrays: list[jax.Array], index: jax.Array) -> list[jax.Array]:
        return [_pick(x, index) for x in arrays]

    picked = either(pick_rows, plain, arrays, index) if takes(arrays) else plain(arrays, index)
    return jax.tree.unflatten(structure, picked)


@jax.jit  # one trace for all layers
def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """[B, K, R, Dh] and [B, P] to [B, K, P, Dh]."""
    return jnp.take_along_axis(x, index[:, None, :, None], axis=2)


def commit(cache: Cache, rows: Cache, lengths: jax.Array) -> Cache:
    """Write every batch row's new entries at its own length.

    The caller sees to it that `lengths + P <= S`: `dynamic_update_slice` would clamp silently and overwrite
    accepted entries.

    Args:
      cache: L x [B, K, S, Dh].
      rows: L x [B, K, P, Dh].
      lengths: [B] int32.

    Returns:
      The cache with P slots of every batch row overwritten.
    """
    buffers, structure = jax.tree.flatten(cache)
    new = jax.tree.leaves(rows)

    def plain(buffers: list[jax.Array], new: list[jax.Array], lengths: jax.Array) -> list[jax.Array]:
        return [_write(*each, lengths) for each in zip(buffers, new, strict=True)]

    operands = (buffers, new, lengths)
    written = either(write_rows, plain, *operands) if takes(new, buffers) else plain(*operands)
    return jax.tree.unflatten(structure, written)


@jax.jit  # one trace for all layers
@jax.vmap
def _write(buffer: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
    """[K, S, Dh] with [K, P, Dh] written at a slot."""
    return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (0, length, 0))


def commit_after(cache: Cache, rows: Cache, at: jax.Array, result: jax.Array) -> Cache:
    """`commit` at slots `at` [B] that does not begin before a `result` [B] int32 of all layers, 0 or more, is there.

    The slots are the same whatever the result. Making them depend on it keeps XLA from writing the rows of an early
    layer before all layers have read the cache, for which it would copy the cache (barriers are gone by then).
    """
    return commit(*pin_layouts(cache, rows), jnp.maximum(at, jnp.minimum(result, 0)))


def pin_layouts(cache: Cache, rows: Cache) -> tuple[Cache, Cache]:
    """A cache and what will be written into it, in layouts that spare copies of the cache.

    On TPUs XLA would give the cache another layout within the loop, and copy all of it in every call. On CPUs, where
    branches of a program read the cache, it would copy all of it in every step to look at what is overwritten.
    """
    return lax.platform_dependent(
        cache,
        rows,
        tpu=lambda cache, rows: (_usual(cache, _NAMES), rows),
        default=lambda cache, rows: (cache, _usual(rows, _NAMES)),
    )


def usual_on_tpu(x: jax.Array) -> jax.Array:
    """States [B, R, D] in the usual layout, D along the lanes, where XLA for TPUs would choose another one."""
    usual = functools.partial(_usual, names=("batch", None, "heads"))
    return lax.platform_dependent(x, tpu=usual, default=lambda x: x)


def _usual(tree: Any, names: Sequence[str | None]) -> Any:
    """Arrays, the first dimensions of which have `names` on the mesh, in the usual layout.

    Each device constrains its own part: the XLA of JAX 0.10 cannot divide a constraint, and would gather the arrays.
    """

    def constrained(tree: Any) -> tuple[Any]:
        return (jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree),)

    sizes = dict(zip(names, jax.tree.leaves(tree)[0].shape, strict=False))
    [usual] = over_mesh(constrained, (sizes["batch"], sizes["heads"]), [names], [names])(tree)
    return usual
