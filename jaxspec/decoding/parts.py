"""Readings in parts: what a chunk adds to one is cut out, kept, and put back for a prompt that begins alike.

    prompt A  |chunk 1|chunk 2|chunk 3|rest    cut after each whole chunk
    prompt B  |chunk 1|chunk 2| ...            join 1 and 2, and read on

What is joined is what reading would write, bit by bit, for all chunks are read by the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.prompt import Reading, begin
from jaxspec.decoding.state import Decoding, divided_state
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache

_CAPACITIES = (1024, 2048)  # at which shapes of method states are compared


@flax.struct.dataclass
class Part:
    """What the last chunk of a prompt's reading, a whole one of W tokens, has added.

    Attributes:
      cache: its keys and values, L x [1, K, W, Dh].
      method_states: of each source; of leaves with slots the W + 1 slots that observing the chunk before it may have
        written, other leaves whole.
      last: the chunk, which waits to be observed.
    """

    cache: Cache
    method_states: list[PyTree]
    last: ReadChunk


@jax.jit
def cut(decoding: Decoding, reading: Reading) -> Part:
    """The part of the last chunk of one prompt's reading, as a copy: the reading's buffers will be donated."""
    last = reading.last
    W = last.hidden.shape[1]

    def slots(x: jax.Array, axis: int, at: jax.Array, size: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, at, min(size, x.shape[axis]), axis)

    def state(x: jax.Array, axis: int) -> jax.Array:
        return jnp.copy(x) if axis < 0 else slots(x, axis, _observed(last), W + 1)

    keys_and_values = jax.tree.map(lambda x: slots(x, 2, last.first[0], W), reading.cache)
    states = jax.tree.map(state, reading.method_states, _slot_axes(decoding))
    return divided_state(Part(keys_and_values, states, jax.tree.map(jnp.copy, last)))


def joined(base: Base, decoding: Decoding, parts: Sequence[Part], capacity: int) -> Reading | None:
    """The reading of the chunks whose parts these are, the first one first; None of no chunks.

    Args:
      base: as in `read`.
      decoding: likewise.
      parts: what `cut` took from readings of the same tokens.
      capacity: S, slots of the cache.
    """
    reading, memory = None, None
    for part in parts:
        memory = _blank(base, decoding, batch=1, capacity=capacity) if memory is None else memory
        reading = _put(decoding, memory, part)
        memory = reading.memory
    return reading


_blank = jax.jit(begin, static_argnames=("batch", "capacity"))


@functools.partial(jax.jit, donate_argnames=("memory",))
def _put(decoding: Decoding, memory: tuple[Cache, list[PyTree]], part: Part) -> Reading:
    """The reading after a further chunk; `memory` is that of the chunks before."""
    last, (cache, states) = part.last, memory

    def write(old: jax.Array, new: jax.Array, axis: int, at: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(old, new, at, axis)

    def state(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        return jnp.copy(new) if axis < 0 else write(old, new, axis, _observed(last))

    cache = jax.tree.map(lambda old, new: write(old, new, 2, last.first[0]), cache, part.cache)
    states = jax.tree.map(state, states, part.method_states, _slot_axes(decoding))
    return divided_state(Reading(cache, states, jax.tree.map(jnp.copy, last)))


def _observed(last: ReadChunk) -> jax.Array:
    """The first slot of the chunk before the last one, which methods have observed; of the first chunk 0."""
    return jnp.maximum(last.first[0] - last.hidden.shape[1], 0)


def _slot_axes(decoding: Decoding) -> Any:
    """Of each leaf of the method states the axis along which it has a slot per position, or -1."""

    def shapes(capacity: int) -> Any:
        methods = [source.method for source in decoding.drafter.sources]
        return jax.eval_shape(lambda: [method.init_state(decoding.base, 1, capacity) for method in methods])

    def axis(small: jax.ShapeDtypeStruct, large: jax.ShapeDtypeStruct) -> int:
        return next((i for i in range(small.ndim) if small.shape[i] != large.shape[i]), -1)

    return jax.tree.map(axis, *map(shapes, _CAPACITIES))
