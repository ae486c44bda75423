"""Record what every source offers at every position of given answers; then any draft can be replayed in no time.

What a source that depends on the text alone offers at a position does not depend on how decoding came there. So one
pass over an answer says what all sources offer everywhere, and which of it would have been right is known: it is the
answer. A replay chooses drafts of these offers as decoding does, and counts steps.

Two things depend on the way. Probes are recorded as if every token had all of its own, and a replay takes away those
that its drafts would not have had. Token Recycling also learns from refused candidates, and a recording has none: its
replay is too low.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match, follow
from jaxspec.decoding.generate import PREFILL_CHUNK, bucket
from jaxspec.decoding.loop import DecodeState, Decoding, prefill, start
from jaxspec.decoding.prompts import pad_tokens
from jaxspec.drafting.draft import Accepted, Draft, Offer
from jaxspec.drafting.drafter import Budget, DeviceDrafter, Drafter
from jaxspec.drafting.method import Seen, Step
from jaxspec.drafting.sampling import make_sampler
from jaxspec.drafting.shape import Best, StaticTree
from jaxspec.drafting.tree import State, make_plan
from jaxspec.model.cache import commit
from jaxspec.model.rows import run_rows

Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its answer
_WIDTH = 12  # nodes of the shape that recording pretends, which decides how many candidates sources give


@dataclasses.dataclass(frozen=True)
class Recording:
    """What sources offer behind every token of one answer but its last.

    Attributes:
      answer: [T + 1] int, ids of the answer.
      offers: of each source, arrays [T, M, W].
    """

    answer: np.ndarray
    offers: list[Offer]


def record(
    drafter: Drafter,
    texts: Sequence[Text],
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Recording]:
    """What the sources of a drafter offer along given answers, one pass of the base per token.

    Args:
      drafter: its sources count, not its shape.
      texts: prompts with answers of at least two tokens, drawn as `sampling` and `seed` say.
      sampling: ranks candidates as in decoding.
      seed: likewise.
      batch_size: texts to run together.
      progress: called with the number of texts done.

    Returns:
      A recording per text, in order.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]) + len(texts[i][1]))
    found: dict[int, Recording] = {}
    decoding = _recording(drafter, sampling)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = [texts[i] for i in chosen]
        batch += [([0], [0, 0])] * (min(batch_size, len(order)) - len(batch))
        offers = _offers(drafter, decoding, batch, seed)
        for row, index in enumerate(chosen):
            answer = np.array(texts[index][1])
            own = jax.tree.map(lambda x, row=row, count=len(answer) - 1: x[:count, row], offers)
            found[index] = Recording(answer, own)
        progress(first + len(chosen))
    return [found[i] for i in range(len(texts))]


def _recording(drafter: Drafter, sampling: SamplingConfig) -> Decoding:
    """What decodes a root with all of its probes and nothing else, and asks sources as a large budget would."""
    device, sources = drafter.on_device, drafter.sources
    trees = tuple(source.tree.arrays(0) for source in sources)
    depth = max(source.method.max_distance for source in sources)
    shape = Best(trees, _WIDTH, 0, 0, depth)
    eos = jnp.array([-1], jnp.int32)
    return Decoding(drafter.model.base, DeviceDrafter(device.sources, shape), make_sampler(sampling), eos, Match())


def _offers(drafter: Drafter, decoding: Decoding, texts: Sequence[Text], seed: int) -> list[Offer]:
    """Of each source, arrays [T, B, M, W] on the host, for answers padded to T + 1 tokens."""
    prompts, answers = zip(*texts, strict=True)
    padded, most = bucket(max(map(len, prompts))), bucket(max(map(len, answers)), 64, 64)
    (tokens, lengths), (forced, _) = pad_tokens(prompts, padded), pad_tokens(answers, most)
    chunk = min(padded, PREFILL_CHUNK)
    capacity = bucket(padded + most + 1, 128, 128)
    cache, prompt = prefill(drafter.model.base, tokens, lengths, capacity=capacity, chunk=chunk)
    prompt = prompt.replace(logits=10.0 * jax.nn.one_hot(forced[:, 0], prompt.logits.shape[-1]))
    greedy = decoding.replace(sampler=make_sampler(SamplingConfig()))
    seeds, limits = np.full(len(texts), seed % 2**32, np.uint32), np.full(len(texts), most, np.int32)
    state = start(greedy, cache, prompt, limits, seeds, width=most)  # emits the first token of each answer
    return jax.device_get(_run(decoding, state, jnp.asarray(forced)))


@jax.jit
def _run(decoding: Decoding, state: DecodeState, forced: jax.Array) -> list[Offer]:
    """Offers behind every forced token [B, T + 1] but the last."""
    drafter, base = decoding.drafter, decoding.base
    root, trees = _root_with_probes(decoding, len(forced)), drafter.shape.begin(len(forced))

    def step(carry: tuple, tokens: tuple[jax.Array, jax.Array]) -> tuple[tuple, list[Offer]]:
        (cache, lengths, states), (token, following) = carry, tokens
        draft, zero = root.replace(tokens=token[:, None]), jnp.zeros_like(token)
        exits, kv = run_rows(base, drafter.rows(base, draft, lengths), cache, lengths[:, None, None])
        exits = tuple(x[:, 0] for x in exits)
        cache = commit(cache, jax.tree.map(lambda x: x[:, :, :1], kv), lengths)
        accepted = Accepted(zero[:, None], zero, zero, following)
        computed = Step(draft, exits, base.logits(exits[-1][:, :1]), accepted)
        seen = Seen(jnp.stack([token, following], axis=1), exits[-1][:, :1], lengths, zero + 1, computed)
        draftings = decoding.draftings(trees, state.seeds, following, lengths + 1)
        states = drafter.observe(draftings, seen, states)
        return (cache, lengths + 1, states), drafter.offer(draftings, states)

    carry = (state.cache, state.lengths, state.method_states)
    pairs = (forced[:, :-2].T, forced[:, 1:-1].T)
    draftings = decoding.draftings(trees, state.seeds, forced[:, 0], state.lengths)
    at_first = drafter.offer(draftings, state.method_states)
    _, rest = lax.scan(step, carry, pairs)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), at_first, rest)


def _root_with_probes(decoding: Decoding, batch: int) -> Draft:
    """A draft of nothing, whose root carries all the probes that there are."""
    distances = max((source.method.probe_distances for source in decoding.drafter.sources), default=0)
    shape = StaticTree(make_plan([State((), (distances,), 0)]).arrays(distances))
    return shape.draft(shape.begin(batch), jnp.zeros(batch, jnp.int32), [])


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What decoding an answer with some shape would take.

    Attributes:
      steps: forward passes after prefill.
      tokens: of the answer, its first left out.
    """

    steps: int
    tokens: int


def replay(recordings: Sequence[Recording], drafter: Drafter, sources: Sequence[int] | None = None) -> list[Replayed]:
    """Steps that a drafter with a budget needs for recorded answers.

    Args:
      recordings: of its sources, or of more.
      drafter: its sources, in the order of `sources`, and its budget, of one size.
      sources: which of the recorded ones they are; default all.

    Returns:
      One of each recording.
    """
    assert isinstance(drafter.shape, Budget) and not drafter.shape.sizes
    shape = drafter.shape.on_device(drafter.sources)
    chosen = range(len(drafter.sources)) if sources is None else sources
    probing = next((i for i, source in enumerate(drafter.sources) if source.method.probe_distances), None)
    return [_replay(recording, shape, chosen, probing) for recording in recordings]


def _replay(recording: Recording, shape: Best, chosen: Sequence[int], probing: int | None) -> Replayed:
    answer, offers = recording.answer, [recording.offers[i] for i in chosen]
    drafts = []
    for known in range(shape.distances + 1):  # distances that the last accepted token had probes for
        mine = list(offers)
        if probing is not None:
            there = np.arange(offers[probing].tokens.shape[1])[:, None] < known
            mine[probing] = offers[probing].replace(known=offers[probing].known & there)
        drafts.append(_accepted(shape, mine, answer))
    at, known, steps = 0, 0, 0
    while at < len(answer) - 1:
        lengths, after = drafts[known]
        steps, at, known = steps + 1, at + int(lengths[at]) + 1, int(after[at])
    return Replayed(steps, len(answer) - 1)


def _accepted(shape: Best, offers: list[Offer], answer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a draft behind each token: its right candidates [T], and for how many distances the last one has probes."""
    count = len(answer) - 1
    size = bucket(count, 64, 64)
    padded = jax.tree.map(lambda x: np.pad(x, [(0, size - count)] + [(0, 0)] * (x.ndim - 1)), offers)
    ahead = np.arange(size)[:, None] + 1 + np.arange(shape.depth + 1)
    wanted = np.where(ahead < len(answer), answer[np.minimum(ahead, len(answer) - 1)], -1)
    lengths, after = jax.device_get(_right(shape, padded, jnp.asarray(wanted)))
    return lengths[:count], after[:count]


@jax.jit
def _right(shape: Best, offers: list[Offer], wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, all positions as one batch, from the tokens ahead of each, [T, P + 1]; -1 beyond the answer."""
    draft = shape.replace(trees=()).draft([], jnp.zeros(len(wanted), jnp.int32), offers)
    accepted = follow(draft, jnp.take_along_axis(wanted, draft.tree.depth, axis=1))
    probes = jnp.take_along_axis(draft.tree.probe_of, accepted.node[:, None, None], axis=1)[:, 0]
    return accepted.length, jnp.sum(probes >= 0, axis=1)
