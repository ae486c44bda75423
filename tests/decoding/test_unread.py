"""Tokens wait for drafters with layers of their own while drafts rest, and are read before the next draft."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.draft import Offer
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Facts, Method
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.methods import Amphista, DFlash, DraftModel, Eagle, Hydra, Medusa, Mtp
from tests.helpers.decoding import begin
from tests.helpers.methods import settings, union
from tests.helpers.tiny import make_prompts

CAPACITY = 128
PROMPTS = [prompt[:8] for prompt in make_prompts(3)]
DEAR = "best:1@1,4@2,8@3"  # for random drafts: they rest most of the time

EAGLE = Eagle(depth=5, confidence=0.1)
HYDRA = Hydra(heads=5, prefix_attention=True)
OTHERS = [HYDRA, Amphista(heads=5), DFlash(block=6, layers=2), Mtp(depth=5), DraftModel(layers=(0, 2), length=5)]


def resting(methods, tiny):
    """A drafter whose drafts rest most of the time."""
    return union(methods, dataclasses.replace(tiny, eos=()), 8).with_tree(DEAR)


def steps_of(drafter, limit=24):
    """What decodes, and the states after prefill and after every step until a row is done, with the texts of then."""
    decoding, state = begin(drafter, PROMPTS, limit, capacity=CAPACITY)
    states = [state]
    while not states[-1].done.any():
        states.append(decode(decoding, jax.tree.map(np.copy, states[-1]), 1))
    return decoding, states[:-1], [texts_of(state) for state in states[:-1]]


def texts_of(state):
    """The prompts with what was emitted."""
    answers = zip(np.asarray(state.tokens).tolist(), state.counts.tolist(), strict=True)
    return [[*prompt, *tokens[:count]] for prompt, (tokens, count) in zip(PROMPTS, answers, strict=True)]


def slots(leaf, row, count):
    """A row of a leaf: of its slots the first ones."""
    kept = [slice(count) if size >= CAPACITY else slice(None) for size in leaf.shape[1:]]
    return np.asarray(leaf)[row, *kept]


def test_the_newest_tokens_wait_while_drafts_rest(tiny):
    """Up to three, and none when a draft is due."""
    decoding, states, texts = steps_of(resting([EAGLE], tiny))
    waiting = np.array([state.unread.length for state in states])
    due = np.array([not decoding.rests(state.pace) for state in states])
    assert set(waiting.ravel().tolist()) == {0, 1, 2, 3}
    assert 0 < due[1:].sum() < len(due) / 2 and not waiting[due].any()
    for state, now in zip(states, texts, strict=True):
        for row, text in enumerate(now):
            count = int(state.unread.length[row])
            assert state.unread.first[row] + count == state.lengths[row] == len(text) - 1 or not count
            assert state.unread.tokens[row, : count + 1].tolist() == text[len(text) - count - 1 :] or not count


def check_remembered(drafter, state, texts):
    """The method state is that of a prompt with the same tokens."""
    assert not state.unread.length.any()
    _, anew = begin(drafter, [text[:-1] for text in texts], 24, capacity=CAPACITY)
    assert anew.tokens[:, 0].tolist() == [text[-1] for text in texts]
    for ours, theirs in zip(*map(jax.tree.leaves, (state.method_states, anew.method_states)), strict=True):
        for row, text in enumerate(texts):
            np.testing.assert_allclose(*(slots(x, row, len(text) - 1) for x in (ours, theirs)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "method", [EAGLE, *(pytest.param(method, marks=pytest.mark.slow) for method in OTHERS)], ids=settings
)
def test_what_was_read_late_is_remembered_like_a_prompt(tiny, method):
    drafter = resting([method], tiny)
    _, states, texts = steps_of(drafter)
    waited = [bool(state.unread.length.any()) for state in states]
    last = max(n for n, waits in enumerate(waited) if not waits)
    assert sum(waited[:last]) > 5
    check_remembered(drafter, states[last], texts[last])


@dataclasses.dataclass(frozen=True)
class Told(Method):
    """Offers what comes in texts, except between two positions, and counts how often it reads each token."""

    name: ClassVar[str] = "told"

    texts: tuple[tuple[int, ...], ...] = ()
    wrong: tuple[int, int] = (0, 0)
    distances: int = 6

    def facts(self, config):
        return Facts(self.distances, own_layers=1, reads_late=True)

    def init_state(self, base, batch, capacity):
        return {name: jnp.zeros((batch, capacity), jnp.int32) for name in ("tokens", "times")}

    def observe(self, context, chunk, method_state):
        rows, place = jnp.arange(len(chunk.first))[:, None], jnp.arange(chunk.hidden.shape[1])
        slots = jnp.where(place < chunk.length[:, None], chunk.first[:, None] + place, CAPACITY)
        tokens = method_state["tokens"].at[rows, slots].set(chunk.tokens[:, :-1], mode="drop")
        return {"tokens": tokens, "times": method_state["times"].at[rows, slots].add(1, mode="drop")}

    def offer(self, context, method_state):
        first, end = self.wrong
        at = context.position[:, None] + 1 + jnp.arange(self.distances)
        tokens = jnp.take_along_axis(jnp.array(self.texts), at, axis=1)
        tokens = jnp.where((at >= first) & (at < end), (tokens + 1) % 16, tokens)[..., None]
        return Offer(tokens, jnp.full(tokens.shape, True), jnp.full(tokens.shape, jnp.log(0.99)), None)


def test_every_token_is_read_once(tiny):
    """Of long accepted paths, which are read in parts, and of steps without a draft, in rows of unequal lengths."""
    model = dataclasses.replace(tiny, eos=())
    plain = generate(autoregressive(model), PROMPTS, 60)
    texts = tuple((*prompt, *answer.tokens, *[0] * 40)[:80] for prompt, answer in zip(PROMPTS, plain, strict=True))
    _, states, texts = steps_of(resting([Told(texts, (20, 40))], tiny), 60)
    emitted = np.diff([state.lengths for state in states], axis=0)
    assert set(range(1, 8)) >= set(emitted.ravel().tolist()) > {1, 5}
    for state, now in zip(states, texts, strict=True):
        [memory] = state.method_states
        for row, text in enumerate(now):
            read = len(text) - 1 - int(state.unread.length[row])
            assert memory["tokens"][row, :read].tolist() == text[:read]
            assert memory["times"][row].tolist() == [1] * read + [0] * (CAPACITY - read)


@pytest.mark.parametrize(
    ("method", "tree"),
    [(Medusa(heads=5), DEAR), (Eagle(depth=2), DEAR), (EAGLE, "best:8")],
    ids=["no_layers", "short_chunks", "one_size"],
)
def test_no_token_waits_where_that_spares_nothing(tiny, method, tree):
    _, state = begin(union([method], tiny, 8).with_tree(tree), make_prompts(1), 24)
    assert state.unread is None
