"""Record what every source offers at every position of given answers, for `replay` to make drafts of.

Chances are recorded as the sources have them, before calibration.

What a source that depends on the text alone offers at a position does not depend on how decoding came there. So one
pass over an answer says what all sources offer everywhere, and which of it would have been right is known: it is the
answer.

Some things depend on the way. Probes are recorded as if every token had all of its own, and a replay takes those that
the newest token would have had, its own or borrowed ones. Token Recycling and Jacobi decoding also learn from refused
candidates, and a recording has none: their replay is too low. Lookahead's window moves once per step, in a recording
once per token: its replay is too high. Methods that draft along paths are recorded with 10 candidates below each node;
where decoding asks for fewer, siblings share their chances otherwise, and the replay is approximate, unless they are
recorded with the very shape that is replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.draft import Accepted, Draft, Offer
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.method import ReadChunk, Step
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.shape import Best, StaticTree
from jaxspec.decoding.source import DeviceSource
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.budget import smallest_draft
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.job import bucket, prefill_chunk
from jaxspec.generation.prompts import pad_predictions, pad_tokens
from jaxspec.model.cache import commit
from jaxspec.model.rows import run_rows
from jaxspec.training.calibration import BINS_PER_NAT, IDENTITY, NATS, fit
from jaxspec.trees import State, make_plan
from jaxspec.trees.spec import RANKS

Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its answer
_WIDTH = 12  # nodes of the shape that recording pretends, which decides how many candidates sources give


@dataclasses.dataclass(frozen=True)
class Recording:
    """The offers of sources behind every token of one answer but its last.

    Attributes:
      answer: [T + 1] int, ids of the answer.
      offers: of each source, arrays [T, M, W].
    """

    answer: np.ndarray
    offers: list[Offer]

    def along_answer(self, source: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """A source's candidates along the answer, by distance d = 0, 1, ...: of the T - d positions with a token there.

        Yields:
          `reached` [T - d] bool, whether all the answer's tokens before that one were among the candidates;
          `here` [T - d, W] bool, which candidates there are; of those that depend on the ones before them, the ones
          behind the answer's tokens, which means nothing where not `reached`;
          `right` [T - d, W] bool, which of these are the answer's token; and `log_p` [T - d, W].
        """
        offer = self.offers[source]
        T, M, _ = offer.tokens.shape
        known = np.broadcast_to(offer.known, offer.tokens.shape)
        reached, above = np.ones(T, bool), np.zeros(T, int)  # above: which candidate the answer's last token was
        for d in range(min(M, T)):
            reached, above, here = reached[: T - d], above[: T - d], known[: T - d, d]
            if offer.parent is not None and d:
                here = here & (offer.parent[: T - d, d] == above[:, None])
            right = here & (offer.tokens[: T - d, d] == self.answer[1 + d :, None])
            yield reached, here, right, offer.log_p[: T - d, d]
            reached, above = reached & right.any(axis=1), right.argmax(axis=1)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks that a source gives to the tokens of recorded answers.

    Attributes:
      along_answers: of every answer, [T, M] int: at each position the rank of the token that comes at each distance;
        -1 where it is no candidate. Where candidates depend on those before them, it stands behind the answer's tokens.
      accuracy: [M, 10], how often the candidate of each rank at each distance is the token that comes. Where candidates
        depend on those before them, of the positions at which the text was among those.
    """

    along_answers: list[np.ndarray]
    accuracy: np.ndarray


def ranks_of(recordings: Sequence[Recording], source: int) -> Ranks:
    """The ranks of the tokens that come, for one of the recorded sources by its number."""
    offer, along_answers = recordings[0].offers[source], []
    distances, depends = offer.tokens.shape[1], offer.parent is not None
    hits, counted = np.zeros((distances, RANKS)), np.zeros(distances)
    for recording in recordings:
        found = np.full((len(recording.answer) - 1, distances), -1)
        for d, (reached, here, right, log_p) in enumerate(recording.along_answer(source)):
            # behind a leaf nothing is predicted
            counts = reached & (here.any(axis=1) | (d == 0)) if depends else np.ones(len(here), bool)
            order = np.argsort(np.where(here, -log_p, np.inf), axis=1, kind="stable")
            ranked = np.take_along_axis(right, order, axis=1) & counts[:, None]
            found[: len(here), d] = np.where(ranked.any(axis=1), ranked.argmax(axis=1), -1)
            hits[d, : ranked.shape[1]] += ranked[:, :RANKS].sum(axis=0)
            counted[d] += counts.sum()
        along_answers.append(found)
    return Ranks(along_answers, hits / np.maximum(counted, 1)[:, None])


def fit_calibration(
    recordings: Sequence[Recording], source: int, otherwise: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The a and b of every distance, [M][2] (see `calibrated`), for one of the recorded sources by its number.

    Only candidates count whose parents are right.

    Args:
      recordings: of the base's own answers.
      source: its number among those recorded.
      otherwise: [M][2], for distances with too few candidates to tell.
    """
    bins = NATS * BINS_PER_NAT
    tried, right = np.zeros((2, len(otherwise), bins), np.int64)
    for recording in recordings:
        for d, (reached, here, hits, log_p) in enumerate(recording.along_answer(source)):
            place = np.floor(-log_p * BINS_PER_NAT)
            counts = reached[:, None] & here & (place >= 0) & (place < bins)
            np.add.at(tried[d], place[counts].astype(int), 1)
            np.add.at(right[d], place[counts & hits].astype(int), 1)
    return fit(tried, right, otherwise)


def record(
    drafter: Drafter,
    texts: Sequence[Text],
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
    as_drafted: bool = False,
    predictions: Sequence[Sequence[int]] | None = None,
) -> list[Recording]:
    """Record the offers of a drafter's sources along given answers, one pass of the base per token.

    Args:
      drafter: its sources count, and with `as_drafted` its shape.
      texts: prompts with answers of at least two tokens, drawn as `sampling` and `seed` say.
      sampling: ranks candidates as in decoding.
      seed: likewise.
      batch_size: texts to run together.
      progress: called with the number of texts done.
      as_drafted: ask sources for what drafts of the drafter's own shape take, instead of as much as any shape may
        take: for methods that draft along paths, whose replay with that shape is then exact.
      predictions: token ids of what is expected of each answer, which lookups draft from; None: nothing.

    Returns:
      A recording per text, in order.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]) + len(texts[i][1]))
    found: dict[int, Recording] = {}
    decoding = _recording(drafter, sampling, batch_size, as_drafted)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = [texts[i] for i in chosen]
        batch += [([0], [0, 0])] * (min(batch_size, len(order)) - len(batch))
        predicted = None
        if predictions is not None:
            expected = [predictions[i] for i in chosen] + [()] * (len(batch) - len(chosen))
            predicted = pad_predictions(expected, bucket(max(map(len, predictions)) + 2))
        offers = _offers(drafter, decoding, batch, seed, predicted)
        for row, index in enumerate(chosen):
            answer = np.array(texts[index][1])
            own = jax.tree.map(lambda x, row=row, count=len(answer) - 1: x[:count, row], offers)
            found[index] = Recording(answer, own)
        progress(first + len(chosen))
    return [found[i] for i in range(len(texts))]


def _recording(drafter: Drafter, sampling: SamplingConfig, batch_size: int, as_drafted: bool) -> Decoding:
    """The decoding of a root with all of its probes; sources are asked as for that shape or a large one."""
    sources = drafter.sources
    if as_drafted:
        shape = drafter.device_shape
    else:
        trees = tuple(source.tree.arrays(0) for source in sources)
        shape = Best(trees, _WIDTH, 0, 0, max(source.facts.distances for source in sources))
    eos = jnp.array([-1], jnp.int32)
    raw = tuple(_uncalibrated(source) for source in drafter.on_device.sources)
    base = drafter.model.base_for(batch_size * (smallest_draft(sources) - 1))
    return Decoding(base, DeviceDrafter(raw, shape), make_sampler(sampling), eos, Match())


def _uncalibrated(source: DeviceSource) -> DeviceSource:
    """A source whose chances are as it has them."""
    tables = jnp.broadcast_to(jnp.array(IDENTITY), source.calibrations.tables.shape)
    return source.replace(calibrations=source.calibrations.replace(tables=tables))


def _offers(
    drafter: Drafter, decoding: Decoding, texts: Sequence[Text], seed: int, predicted: np.ndarray | None
) -> list[Offer]:
    """The offers of each source, arrays [T, B, M, W] on the host, for answers padded to T + 1 tokens."""
    prompts, answers = zip(*texts, strict=True)
    padded, most = bucket(max(map(len, prompts))), bucket(max(map(len, answers)), 64, 64)
    (tokens, lengths), (forced, _) = pad_tokens(prompts, padded), pad_tokens(answers, most)
    seeds, limits = np.full(len(texts), seed % 2**32, np.uint32), np.array([*map(len, answers)], np.int32)
    sizes = {"capacity": bucket(padded + most + 1, 128, 128), "chunk": min(padded, prefill_chunk()), "width": most}
    prompts = (tokens, lengths, limits, seeds)
    state = prefill(drafter.model.base, decoding, *prompts, **sizes, first=forced[:, 0], predicted=predicted)
    return jax.device_get(_run(decoding, state, jnp.asarray(forced)))


@jax.jit
def _run(decoding: Decoding, state: DecodeState, forced: jax.Array) -> list[Offer]:
    """Offers behind every forced token [B, T + 1] but the last."""
    decoding = decoding.replace(base=decoding.base.for_texts(state.text_lengths))
    drafter, base = decoding.drafter, decoding.base
    layers = base.decoder.config.num_layers
    root, trees = _root_with_probes(decoding, len(forced)), drafter.shape.begin(len(forced))

    def step(carry: tuple, tokens: tuple[jax.Array, jax.Array]) -> tuple[tuple, list[Offer]]:
        (cache, lengths, memory), (token, following) = carry, tokens
        draft, zero = root.replace(tokens=token[:, None]), jnp.zeros_like(token)
        contexts = decoding.draft_contexts(trees, state.seeds, token, lengths, cache)
        rows = drafter.rows(base, contexts, draft, lengths, memory)
        states, kv = run_rows(base, rows, cache, lengths[:, None, None])
        states = {layer: x[:, 0] for layer, x in states.items()}
        last, taps = states[layers][:, :1], {at: states[at][:, :1] for at in drafter.taps(base)}
        cache = commit(cache, jax.tree.map(lambda x: x[:, :, :1], kv), lengths)
        accepted = Accepted(zero[:, None], zero, zero, following)
        computed = Step(draft, states, base.logits(last), accepted)
        text = jnp.stack([token, following], axis=1)
        chunk = ReadChunk(text, last, lengths, zero + 1, taps, computed)
        contexts = decoding.draft_contexts(trees, state.seeds, following, lengths + 1, cache)
        memory = drafter.observe(contexts, chunk, memory)
        return (cache, lengths + 1, memory), drafter.offer(contexts, memory)

    carry = (state.cache, state.lengths, state.method_states)
    pairs = (forced[:, :-2].T, forced[:, 1:-1].T)
    contexts = decoding.draft_contexts(trees, state.seeds, forced[:, 0], state.lengths, state.cache)
    at_first = drafter.offer(contexts, state.method_states)
    _, rest = lax.scan(step, carry, pairs)
    offers = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), at_first, rest)
    return [offer.replace(passes=None) for offer in offers]


def _root_with_probes(decoding: Decoding, batch: int) -> Draft:
    """A draft of nothing, whose root carries all the probes that there are."""
    distances = max((facts.probes for facts in decoding.drafter.facts(decoding.base)), default=0)
    shape = StaticTree(make_plan([State((), (distances,), 0)]).arrays(distances))
    return shape.draft(shape.begin(batch), jnp.zeros(batch, jnp.int32), [])
