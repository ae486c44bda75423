"""Tokens that wait to be read by drafters with layers of their own.

Such a drafter runs every token of the text through its layers, for keys and values. Only its drafts need these. While
drafts rest the tokens wait, and a few are read at once, which takes hardly longer than one alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.arrays import write
from jaxspec.decoding.draft import DraftContext, PyTree
from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.pace import Pace
from jaxspec.decoding.state import DecodeState, Decoding

_AT_ONCE = 4  # tokens: most steps make no more, and on CPUs 8 rows of a layer take much longer than 4


def empty_unread(decoding: Decoding, last: ReadChunk) -> ReadChunk | None:
    """No tokens, with room for a step's chunk behind those that may wait; None where all tokens are read at once.

    So they are with short drafts, whose chunks have fewer tokens than are read late at once.

    Args:
      decoding: constants of the generation.
      last: a chunk with the shapes and dtypes of states.
    """
    width = decoding.drafter.shape.depth + 1
    if width < _AT_ONCE or not any(decoding.drafter.reads_late(decoding.base)):
        return None
    zero = jnp.zeros_like(last.length)

    def room(x: jax.Array, more: int = 0) -> jax.Array:
        return jnp.zeros((len(x), _AT_ONCE - 1 + width + more, *x.shape[2:]), x.dtype)

    return ReadChunk(room(last.tokens, 1), room(last.hidden), zero, zero, jax.tree.map(room, last.taps))


def observe(
    decoding: Decoding,
    contexts: Sequence[DraftContext],
    chunk: ReadChunk,
    state: DecodeState,
    pace: Pace | None,
) -> tuple[list[PyTree], ReadChunk | None]:
    """Method states after a step, and the tokens that some sources have still to read.

    Args:
      decoding: constants of the generation.
      contexts: of every source.
      chunk: that the step has read.
      state: after the step, with method states and unread tokens of before.
      pace: after the step.
    """
    drafter, states = decoding.drafter, state.method_states
    if state.unread is None:
        return drafter.observe(contexts, chunk, states), None
    late = drafter.reads_late(decoding.base)
    states = drafter.observe(contexts, chunk, states, [not waits for waits in late])
    unread = _joined(state.unread, chunk.replace(length=jnp.where(decoding.wanted(state.done), chunk.length, 0)))
    due = ~decoding.rests(pace) | jnp.any(unread.length >= _AT_ONCE)

    def is_due(carry: tuple[list[PyTree], ReadChunk]) -> jax.Array:
        return due & jnp.any(carry[1].length > 0)

    def read(carry: tuple[list[PyTree], ReadChunk]) -> tuple[list[PyTree], ReadChunk]:
        states, unread = carry
        now, later = _divided(unread)
        return drafter.observe(contexts, now, states, late), later

    return lax.while_loop(is_due, read, (states, unread))


def _joined(unread: ReadChunk, chunk: ReadChunk) -> ReadChunk:
    """Unread tokens with those of a chunk behind them."""
    first = jnp.where(unread.length > 0, unread.first, chunk.first)
    tokens, hidden, taps = write(_arrays(unread), _arrays(chunk), unread.length)
    return ReadChunk(tokens, hidden, first, unread.length + chunk.length, taps)


def _divided(unread: ReadChunk) -> tuple[ReadChunk, ReadChunk]:
    """The unread tokens that are read at once, and those behind them."""
    count = jnp.minimum(unread.length, _AT_ONCE)
    _, hidden, taps = jax.tree.map(lambda x: x[:, :_AT_ONCE], _arrays(unread))
    now = ReadChunk(unread.tokens[:, : _AT_ONCE + 1], hidden, unread.first, count, taps)
    tokens, hidden, taps = jax.tree.map(lambda x: jnp.roll(x, -_AT_ONCE, axis=1), _arrays(unread))
    return now, ReadChunk(tokens, hidden, unread.first + count, unread.length - count, taps)


def _arrays(chunk: ReadChunk) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
    """What a chunk holds of every token."""
    return chunk.tokens, chunk.hidden, chunk.taps
