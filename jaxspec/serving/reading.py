"""A prompt on its way into a slot: read chunk by chunk, so that a long one stalls nobody."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.loop import begin
from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.scores import Scores, score
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.model.attention import continued_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.rows import read_layers


@flax.struct.dataclass
class Reading:
    """How far a prompt has been read: a batch of one row.

    Attributes:
      cache: keys and values of what was read.
      method_states: what each source remembers of it.
      length: [1] int32, tokens read.
    """

    cache: Cache
    method_states: list[PyTree]
    length: jax.Array


@flax.struct.dataclass
class Chunk:
    """A part of a prompt.

    Attributes:
      tokens: [1, W + 1] int32: W tokens at most and the one after the last of them, if the prompt has one.
      length: [1] int32, how many of the W there are.
      last: [1] bool, whether the prompt ends with it.
      seeds: [1] uint32, of sampling.
    """

    tokens: jax.Array
    length: jax.Array
    last: jax.Array
    seeds: jax.Array


@flax.struct.dataclass
class End:
    """What comes out of a chunk; of the last one, what decoding begins with.

    Attributes:
      hidden: [1, W, D], hidden states before the final norm.
      logits: [1, V] float32, the base's after the last token.
      first: [1] int32, the token after it.
    """

    hidden: jax.Array
    logits: jax.Array
    first: jax.Array


@functools.partial(jax.jit, static_argnames=("capacity",))
def nothing_read(decoding: Decoding, *, capacity: int) -> Reading:
    """The reading before its first chunk, in a cache of so many slots."""
    base = decoding.base
    cache = empty_cache(base.decoder.config, 1, capacity, base.dtype)
    states = [source.method.init_state(base, 1, capacity) for source in decoding.drafter.sources]
    return Reading(cache, states, jnp.zeros(1, jnp.int32))


@functools.partial(jax.jit, donate_argnames=("reading",))
def read(base: Base, decoding: Decoding, reading: Reading, chunk: Chunk) -> tuple[Reading, End]:
    """Run one chunk through the base, and show it to the sources.

    Args:
      base: in the form that is fastest for so many rows.
      decoding: of one row.
      reading: what was read before.
      chunk: what comes next.
    """
    W, start = chunk.tokens.shape[1] - 1, reading.length
    context = continued_context(reading.cache, start, W)
    layers = decoding.drafter.taps(base)
    hidden, rows, taps = read_layers(base, chunk.tokens[:, :W], layers, context)
    cache, lengths = commit(reading.cache, rows, start), start + chunk.length
    logits = base.logits(hidden[jnp.arange(1), chunk.length - 1])
    first = decoding.first_token(logits, chunk.seeds, lengths)
    behind = (jnp.arange(W + 1) == chunk.length[:, None]) & chunk.last[:, None]
    text = jnp.where(behind, first[:, None], chunk.tokens)
    contexts = decoding.draft_contexts(decoding.drafter.shape.begin(1), chunk.seeds, first, lengths, cache)
    chunk = ReadChunk(text, hidden, start, chunk.length, taps)
    states = decoding.drafter.observe(contexts, chunk, reading.method_states)
    return Reading(cache, states, lengths), End(hidden, logits, first)


@functools.partial(jax.jit, static_argnames=("width", "best"), donate_argnames=("reading",))
def ready(
    decoding: Decoding, reading: Reading, end: End, limits: jax.Array, seeds: jax.Array, *, width: int, best: int | None
) -> DecodeState:
    """The state of one row that was read to its end, its first token emitted; `best` is how many scores to keep."""
    args = (reading.cache, reading.method_states, end.first, reading.length, limits, seeds)
    state = begin(decoding, *args, width=width)
    if best is None:
        return state
    new = score(end.logits[:, None], end.first[:, None], best)
    room = Scores.zero(1, state.tokens.shape[1], best)
    return state.replace(scores=jax.tree.map(lambda room, new: room.at[:, :1].set(new), room, new))


@functools.partial(jax.jit, static_argnames=("best",))
def prompt_scores(base: Base, end: End, chunk: Chunk, *, best: int) -> Scores:
    """Scores of the tokens after each of a chunk [1, W], for requests that ask for their prompt's."""
    return score(base.logits(end.hidden), chunk.tokens[:, 1:], best)
