"""Prompts, read in chunks of equal width: it bounds the memory of attention, and a server decodes in between.

read      sources observe the chunk before; next chunk -> cache, hidden states
start     first token; sources observe each row's last chunk; first draft
prefill   both, over whole prompts

A source observes a chunk together with the token after it, which at the end of a prompt is the first one emitted. So
every chunk waits in `Reading.last` until that token is known, and the logits are computed once per prompt.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.pace import Pace
from jaxspec.decoding.penalties import Seen, tokens_of
from jaxspec.decoding.scores import Scores
from jaxspec.decoding.state import DecodeState, Decoding, divided_state
from jaxspec.decoding.stats import Stats
from jaxspec.decoding.unread import empty_unread
from jaxspec.model.attention import causal_context, continued_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit, commit_after, empty_cache
from jaxspec.model.rows import read_layers


@flax.struct.dataclass
class Reading:
    """State of B prompts of unequal length that are being read.

    Attributes:
      cache: keys and values of what was read.
      method_states: of each source, after all chunks but the last one.
      last: of each row, the last chunk of its prompt so far; the token after it is not known yet.
    """

    cache: Cache
    method_states: list[PyTree]
    last: ReadChunk

    @property
    def lengths(self) -> jax.Array:
        """[B] int32, tokens read."""
        return self.last.first + self.last.length

    @property
    def memory(self) -> tuple[Cache, list[PyTree]]:
        """Cache and method states, whose buffers `start` takes over; those of `last` it cannot use."""
        return self.cache, self.method_states


@functools.partial(jax.jit, static_argnames=("capacity",), donate_argnames=("reading",))
def read(
    base: Base,
    decoding: Decoding,
    reading: Reading | None,
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    *,
    capacity: int,
) -> Reading:
    """Read the next chunk of some prompts.

    Args:
      base: in the form that is fastest for a chunk's rows.
      decoding: constants of the generation.
      reading: of the chunks before, of the same width; None at the start.
      tokens: [B, W] int32, padded on the right.
      lengths: [B] int32, how many of the W there are; 0 where a prompt ended in an earlier chunk.
      seeds: [B] uint32, of sampling.
      capacity: S, slots of the cache.
    """
    B, W = tokens.shape
    if reading is None:
        (cache, states), context = begin(base, decoding, B, capacity), causal_context(B, W)
    else:
        states = _observe(decoding, reading, jnp.where(lengths > 0, W, 0), tokens[:, 0], seeds)
        # In rows that ended, too: what is written there lies behind the prompt, and is never looked at.
        cache, context = reading.cache, continued_context(reading.cache, reading.last.first + W, W)
    hidden, kv, taps = read_layers(base, tokens, decoding.drafter.taps(base), context)
    first = context.positions[:, 0]
    last = ReadChunk(jnp.pad(tokens, ((0, 0), (0, 1))), hidden, first, lengths, taps)
    if reading is None:
        cache = commit(cache, kv, first)
    else:
        last = last.updated(last, reading.last)
        cache = commit_after(cache, kv, first, jnp.argmax(hidden[:, -1], axis=-1))
    return divided_state(Reading(cache, states, last))


def begin(base: Base, decoding: Decoding, batch: int, capacity: int) -> tuple[Cache, list[PyTree]]:
    """Cache and method states of `batch` prompts of which nothing was read."""
    states = [source.method.init_state(decoding.base, batch, capacity) for source in decoding.drafter.sources]
    return empty_cache(base.decoder.config, batch, capacity, base.dtype), states


def _observe(
    decoding: Decoding, reading: Reading, lengths: jax.Array, following: jax.Array, seeds: jax.Array
) -> list[PyTree]:
    """Method states after the last chunk, `lengths` [B] tokens of it, and the token after it, `following` [B]."""
    drafter, last, rows = decoding.drafter, reading.last, jnp.arange(len(lengths))
    trees, position = drafter.shape.begin(len(lengths)), last.first + lengths
    contexts = decoding.draft_contexts(trees, seeds, following, position, reading.cache)
    chunk = last.replace(tokens=last.tokens.at[rows, lengths].set(following), length=lengths)
    return drafter.observe(contexts, chunk, reading.method_states)


@functools.partial(jax.jit, static_argnames=("width", "best"), donate_argnames=("memory",))
def start(
    base: Base,
    decoding: Decoding,
    memory: tuple[Cache, list[PyTree]],
    last: ReadChunk,
    limits: jax.Array,
    seeds: jax.Array,
    first: jax.Array | None = None,
    prompt_tokens: jax.Array | None = None,
    predicted: jax.Array | None = None,
    idle: jax.Array | int = 0,
    *,
    width: int,
    best: int | None = None,
) -> DecodeState:
    """The state once prompts are read: the first token emitted, the first draft made.

    Args:
      base: that read them.
      decoding: constants of the generation.
      memory: `Reading.memory`; donated.
      last: `Reading.last`.
      limits: [B] int32, tokens to emit; 0 for rows that only pad the batch.
      seeds: [B] uint32, of sampling.
      first: [B] int32, a given first token; None: the base's choice.
      prompt_tokens: [B, V] bool, the tokens that the prompts have, where the sampler has penalties for them; else None.
      predicted: [B, E] int32, what the user expects of the answers (see `Method.expect`); None: nothing.
      idle: int32 scalar, `Pace.idle` of the texts before these.
      width: room of the output buffer, at least the largest limit.
      best: K, scores to keep of every token; None: the state has no room for any.
    """
    reading, B, shape = Reading(*memory, last), len(limits), decoding.drafter.shape
    if predicted is not None:
        expected = decoding.drafter.expect(base, reading.method_states, predicted)
        reading = reading.replace(method_states=expected)
    cache, lengths = reading.cache, reading.lengths
    logits = base.logits(last.last(last.hidden))
    seen = None if prompt_tokens is None else Seen.begin(prompt_tokens)
    first = decoding.first_token(logits, seeds, lengths, seen) if first is None else first
    states = _observe(decoding, reading, last.length, first, seeds)
    trees, room = shape.begin(B), width + shape.depth + 1
    counts = jnp.minimum(limits, 1)
    done = (counts >= limits) | decoding.ends(first[:, None])[:, 0]
    finite = jnp.all(jnp.isfinite(logits), axis=-1) | (limits == 0) if decoding.checks_logits else None
    if finite is not None:
        done |= ~finite
    costs = decoding.costs
    pace = None if costs is None else Pace.begin(~done, decoding.drafts, idle)
    offers = decoding.offers(decoding.draft_contexts(trees, seeds, first, lengths, cache), states, done, pace)
    stats = Stats.zero(B, len(decoding.drafter.sources), shape.depth, predicted is not None)
    state = DecodeState(
        cache=cache,
        lengths=lengths,
        tokens=jnp.zeros((B, room), jnp.int32).at[:, 0].set(first),
        drafted_by=jnp.zeros((B, room), jnp.int32),
        counts=counts,
        limits=limits,
        done=done,
        draft=shape.draft(trees, first, offers, pace, costs),
        method_states=states,
        unread=empty_unread(decoding, last),
        seeds=seeds,
        stats=stats.with_offers(offers, ~done),
        pace=pace,
        scores=None if best is None else Scores.begin(logits, first, room, best),
        finite=finite,
        seen=None if seen is None else seen.after(first[:, None], counts[:, None] > 0),
    )
    return divided_state(state)


def prefill(
    base: Base,
    decoding: Decoding,
    tokens: np.ndarray,
    lengths: np.ndarray,
    limits: jax.Array,
    seeds: jax.Array,
    *,
    capacity: int,
    chunk: int,
    width: int,
    first: jax.Array | None = None,
    predicted: jax.Array | None = None,
    idle: int = 0,
) -> DecodeState:
    """Read whole prompts and start to decode.

    Args:
      base: in the form that is fastest for a chunk's rows.
      decoding: constants of the generation.
      tokens: [B, T] int32, padded on the right.
      lengths: [B] int32; both lie on the host, for they say how many chunks there are.
      limits: as in `start`.
      seeds: likewise.
      capacity: S, slots of the cache.
      chunk: W, tokens to run at once, a divisor of T.
      width: as in `start`.
      first: likewise.
      predicted: likewise.
      idle: likewise.
    """
    base, reading = base.for_texts(lengths + limits), None
    decoding = decoding.replace(base=decoding.base.for_texts(lengths + limits))
    for at in range(0, max(lengths), chunk):
        part, left = tokens[:, at : at + chunk], np.clip(lengths - at, 0, chunk)
        reading = read(base, decoding, reading, part, left, seeds, capacity=capacity)
    has = None
    if decoding.sampler.penalties is not None:
        has = tokens_of([row[:length] for row, length in zip(tokens, lengths, strict=True)], base.vocab_size)
    rows = (reading.memory, reading.last, limits, seeds)
    return start(base, decoding, *rows, first, has, predicted, np.int32(idle), width=width)
