"""The key/value cache: one preallocated buffer per layer, written only after acceptance.

Slot s of a batch row holds the key and value of the token at position s. A row's length says how many slots
are valid; what lies beyond is garbage that the next commit overwrites:

    length 5, path of 3 accepted   |t0 t1 t2 t3 t4| .  .  .  .      before
    commit writes the whole path   |t0 t1 t2 t3 t4  r  a  b| x .    after: length 8, x is never looked at
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxspec.config import ModelConfig


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
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index[:, None, :, None], axis=2), rows)


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

    def write(buffer: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), (0, length, 0))

    return jax.tree.map(lambda buffer, new: jax.vmap(write)(buffer, new, lengths), cache, rows)


def laid_out_to_read(cache: Cache) -> Cache:
    """The cache in the layout that attention reads, on TPUs: slots along the lanes.

    Where branches of a program read the cache, XLA gives it the layout in which it is written, and every branch copies
    the whole cache into this one first (seen for v5e).
    """

    def place(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout((0, 1, 3, 2)))

    return lax.platform_dependent(cache, tpu=lambda cache: jax.tree.map(place, cache), default=lambda cache: cache)
