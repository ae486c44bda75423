"""One step, and the jitted loop that repeats it.

step      rows through the base -> accept -> commit -> emit -> observe -> offer -> draft
decode    while_loop over step, until every row is done or `max_steps` have run
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.arrays import overwrite
from jaxspec.decoding.draft import Accepted, Draft
from jaxspec.decoding.method import ReadChunk, Step, node_rows
from jaxspec.decoding.pace import in_cheapest_steps
from jaxspec.decoding.state import DecodeState, Decoding, divided_state
from jaxspec.decoding.stats import count
from jaxspec.decoding.unread import observe
from jaxspec.model.cache import Cache, commit_after, gather_rows
from jaxspec.model.rows import run_rows


def step(decoding: Decoding, state: DecodeState) -> DecodeState:
    """One forward pass: verify the draft, keep what survives, draft again."""
    decoding = decoding.replace(base=decoding.base.for_texts(state.text_lengths))
    drafter, shape, draft = decoding.drafter, decoding.drafter.shape, state.draft
    size = None if draft.size is None else jnp.max(jnp.where(state.done, 0, draft.size))
    if size is None or draft.tokens.size <= drafter.free_rows:  # what is beyond a size is not valid
        (states, logits, accepted, kv), added = verify(decoding, draft.tree.num_nodes, True, state), True
    else:
        with_added = [number >= shape.alone for number in range(len(shape.sizes))]
        sizes = [functools.partial(verify, decoding, *each) for each in zip(shape.sizes, with_added, strict=True)]
        states, logits, accepted, kv = lax.switch(size, sizes, state)
        added = size >= shape.alone

    cache = commit_after(state.cache, kv, state.lengths, accepted.bonus)
    lengths = state.lengths + accepted.length + 1

    text = jnp.concatenate([draft.tokens[:, :1], _new_tokens(draft, accepted)], axis=1)  # [B, P + 2]
    layers = decoding.base.decoder.config.num_layers

    def on_path(x: jax.Array) -> jax.Array:  # [B, R, D] to [B, P + 1, D]
        return jnp.take_along_axis(x, accepted.path[..., None], axis=1)

    taps = {at: on_path(states[at]) for at in drafter.taps(decoding.base)}
    verified = Step(draft, states, logits, accepted, added)
    chunk = ReadChunk(text, on_path(states[layers]), state.lengths, accepted.length + 1, taps, verified)
    trees = shape.follow(draft, accepted.node)
    contexts = decoding.draft_contexts(trees, state.seeds, accepted.bonus, lengths, cache)
    stats = count(state.stats, draft, accepted, ~state.done)
    if state.scores is not None:
        wanted = decoding.scored & ~state.done
        state = state.replace(scores=state.scores.append(logits, accepted.path, text[:, 1:], state.counts, wanted))
    if state.finite is not None:
        state = _check(state, logits, accepted)
    was_done, state = state.done, _emit(state, draft, accepted, text[:, 1:], decoding.ends(text[:, 1:]))
    pace, costs = state.pace, decoding.costs
    if pace is not None:
        paid, time = jnp.any(draft.pays & ~was_done), in_cheapest_steps(costs)[:, size]
        pace = pace.after(accepted.length + 1, time, ~state.done, paid, added)
    memory, unread = observe(decoding, contexts, chunk, state, pace)
    offers = decoding.offers(contexts, memory, state.done, pace)
    new_draft = shape.draft(trees, accepted.bonus, offers, pace, costs)
    state = state.replace(
        cache=cache,
        lengths=jnp.where(state.done, state.lengths, lengths),
        draft=new_draft,
        method_states=memory,
        unread=unread,
        stats=stats.with_offers(offers, ~state.done),
        pace=pace,
    )
    return divided_state(state)


def verify(
    decoding: Decoding, num_nodes: int, added: bool, state: DecodeState
) -> tuple[dict[int, jax.Array], jax.Array, Accepted, Cache]:
    """Run the first nodes of the draft, with the rows that a method adds or without; see what survives.

    Only reads the cache.

    Returns:
      Hidden states [B, rows there, D] by layer and logits [B, N, V], zeros for the rows left out; the outcome, and the
      accepted path's keys and values.
    """
    base, drafter, draft = decoding.base, decoding.drafter, state.draft.first(num_nodes)
    trees = [draft.tree] * len(drafter.sources)
    contexts = decoding.draft_contexts(trees, state.seeds, draft.tokens[:, 0], state.lengths, state.cache)
    rows = drafter.rows(base, contexts, draft, state.lengths, state.method_states)
    left_out = dict.fromkeys((*rows.taps, base.decoder.config.num_layers), state.draft.tree.num_nodes - num_nodes)
    if not added:
        left_out = {layer: count + rows.there(layer) - num_nodes for layer, count in left_out.items()}
        rows = dataclasses.replace(node_rows(base, draft, state.lengths), taps=rows.taps)
    states, kv = run_rows(base, rows, state.cache, state.lengths[:, None, None])
    logits = base.logits(states[base.decoder.config.num_layers][:, 0, :num_nodes])
    predicted = state.lengths[:, None] + 1 + jnp.arange(draft.tree.max_depth + 1)
    penalised = logits
    if state.seen is not None:
        penalised = decoding.sampler.penalties(logits, state.seen, state.seen.at_nodes(draft.tree, draft.tokens))
    admitted = decoding.admitted(penalised, state.counts[:, None] + draft.tree.depth)
    accepted = decoding.acceptance(draft, admitted, decoding.sampler, state.seeds, predicted)

    def whole(layer: int, x: jax.Array) -> jax.Array:  # [B, 1, rows there, D] to [B, rows there and left out, D]
        zeros = jnp.zeros((len(x), left_out[layer], x.shape[-1]), x.dtype)
        return jnp.concatenate([x[:, 0, :num_nodes], zeros, x[:, 0, num_nodes:]], axis=1)

    states = {layer: whole(layer, x) for layer, x in states.items()}
    logits = jnp.pad(logits, ((0, 0), (0, state.draft.tree.num_nodes - num_nodes), (0, 0)))
    return states, logits, accepted, gather_rows(kv, accepted.path)


def _check(state: DecodeState, logits: jax.Array, accepted: Accepted) -> DecodeState:
    """End rows whose logits along the accepted path are not all finite; where one is not, their largest is not."""
    largest = jnp.take_along_axis(jnp.max(jnp.abs(logits), axis=-1), accepted.path, axis=1)  # [B, P + 1]
    finite = state.finite & (state.done | jnp.all(jnp.isfinite(largest), axis=1))
    return state.replace(finite=finite, done=state.done | ~finite)


def _new_tokens(draft: Draft, accepted: Accepted) -> jax.Array:
    """The token after each node of the accepted path, [B, P + 1]: the next candidate, at its end the bonus."""
    path_tokens = jnp.take_along_axis(draft.tokens, accepted.path, axis=1)
    is_bonus = jnp.arange(path_tokens.shape[1]) == accepted.length[:, None]
    return jnp.where(is_bonus, accepted.bonus[:, None], jnp.roll(path_tokens, -1, axis=1))


def _emit(state: DecodeState, draft: Draft, accepted: Accepted, new: jax.Array, ends: jax.Array) -> DecodeState:
    """Append the accepted candidates and the bonus, up to the first of them that `ends` the text or the limit."""
    place = jnp.arange(new.shape[1])
    sources = jnp.roll(jnp.take_along_axis(draft.sources, accepted.path, axis=1), -1, axis=1)
    ends = ends & (place <= accepted.length[:, None])
    end = jnp.min(jnp.where(ends, place, new.shape[1]), axis=1)  # the first place that ends the text
    until_end = jnp.minimum(end, accepted.length) + 1
    emitted = jnp.where(state.done, 0, jnp.minimum(until_end, state.limits - state.counts))
    counts = state.counts + emitted
    # What a row appends beyond its new count is garbage that nobody reads.
    return state.replace(
        tokens=overwrite(state.tokens, new, state.counts),
        drafted_by=overwrite(state.drafted_by, jnp.where(place < accepted.length[:, None], sources, 0), state.counts),
        counts=counts,
        seen=None if state.seen is None else state.seen.after(new, place < emitted[:, None]),
        done=state.done | (end < emitted) | (counts >= state.limits),
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def decode(decoding: Decoding, state: DecodeState, max_steps: jax.Array) -> DecodeState:
    """Step until every row is done or `max_steps` have run (streaming calls again for more)."""

    def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        steps, state = carry
        return (steps < max_steps) & ~jnp.all(state.done)

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        steps, state = carry
        return steps + 1, step(decoding, state)

    return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(state: DecodeState, new: DecodeState, rows: jax.Array) -> DecodeState:
    """Replace batch rows by freshly started ones: every leaf of the state has a batch axis.

    Args:
      state: B rows.
      new: F rows of the same capacity and buffer width.
      rows: [F] int32, where they go; an index of B drops a row that only pads.
    """
    if new.pace is not None:
        new = new.replace(pace=new.pace.joining(state.pace))
    return divided_state(jax.tree.map(lambda old, fresh: old.at[rows].set(fresh, mode="drop"), state, new))
