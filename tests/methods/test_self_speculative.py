"""Self-speculative decoding: the base without some parts drafts, as sure as it must be, and which parts is searched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import Accepted
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import ReadChunk, Step, abstract_trainable
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import SelfSpeculative
from jaxspec.methods.layer_search import LayerReplay, search_layers
from jaxspec.model.attention import Context, causal_context
from jaxspec.model.cache import commit, empty_cache
from jaxspec.model.decoder import Skip
from jaxspec.trees import chain
from jaxspec.trees.arrays import build_tree
from tests.helpers.decoding import begin
from tests.helpers.drafting import batched, draft_of, drafting_of
from tests.helpers.methods import untrained_drafter
from tests.helpers.tiny import TINY, make_prompts

PARTS = SelfSpeculative(length=4, skip_attention=(1,), skip_mlp=(0,), threshold=0.0)


@pytest.fixture(scope="module")
def model(tiny):
    return dataclasses.replace(tiny, eos=())


def drafter(model, method):
    return untrained_drafter(method, model, chain(method.length))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0)], ids=["greedy", "sampling"])
def test_the_whole_base_is_always_right(model, sampling):
    """A chain of four makes five tokens per step, whatever is drawn: the first and eight steps are 41."""
    whole = SelfSpeculative(length=4, threshold=0.0)
    for answer in generate(drafter(model, whole), make_prompts(4), 41, sampling=sampling, seed=3, batch_size=2):
        assert (answer.steps, answer.tokens_per_step) == (8, 5.0)
        assert answer.accepted == answer.offered == [8] * 4 and answer.draft_passes == 4 * 8


@pytest.mark.slow
def test_it_drafts_what_its_parts_say_behind_the_bases_own_keys_and_values(model):
    """A draft made token by token is what the parts say, in one pass, of the newest token and of the draft."""
    text = jnp.array([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])
    base, M = model.base, PARTS.length
    _, kv = base.rows(base.embed(text[:, :-1]), causal_context(2, 6))
    cache = commit(empty_cache(TINY, 2, 16, base.dtype), kv, jnp.zeros(2, jnp.int32))
    context = drafting_of(None, text[:, -1], [6, 6], base=base, width=2, depth=M, cache=cache)
    draft = jax.jit(lambda d: PARTS.offer(d, PARTS.init_state(base, 2, 16)))
    offer = draft(context)
    drafted = jnp.concatenate([text[:, -1:], offer.tokens[..., 0]], axis=1)
    mask = jnp.broadcast_to(jnp.tri(M, dtype=bool), (2, 1, M, M))
    rows = Context(jnp.broadcast_to(6 + jnp.arange(M), (2, M)), mask, cache, jnp.full((2, 1), 6))
    hidden, _ = base.rows(base.embed(drafted[:, :-1]), rows, skip=PARTS.skip)
    log_p, best = jax.lax.top_k(jax.nn.log_softmax(base.logits(hidden)), 2)
    np.testing.assert_array_equal(offer.tokens, best)
    np.testing.assert_allclose(offer.log_p, log_p, rtol=1e-4, atol=1e-5)
    assert offer.known.all()
    assert draft(context.replace(active=jnp.array([False, True]))).known.any(axis=(1, 2)).tolist() == [False, True]
    unskipped, _ = base.rows(base.embed(drafted[:, :-1]), rows)
    assert (jnp.argmax(base.logits(unskipped), axis=-1) != offer.tokens[..., 0]).any()


@pytest.mark.slow
def test_without_nearly_everything_the_text_is_the_same(model):
    least = SelfSpeculative(skip_attention=(0, 1, 2), skip_mlp=(0, 1, 2), threshold=0.0)
    prompts = make_prompts(6)
    ours = generate(drafter(model, least), prompts, 24, batch_size=3)
    assert [a.tokens for a in ours] == [a.tokens for a in generate(autoregressive(model), prompts, 24)]
    assert sum(sum(a.accepted) for a in ours) < sum(sum(a.offered) for a in ours)


@pytest.mark.slow
def test_drafting_stops_behind_a_token_that_it_is_unsure_of(model):
    """A chain has one token at least. Where nothing need be accepted, the threshold never rises."""

    def lengths(threshold):
        method, found = dataclasses.replace(PARTS, threshold=threshold, acceptance=0.0), []
        decoding, state = begin(drafter(model, method), make_prompts(4), 24)
        for _ in range(6):
            state = decode(decoding, state, 1)
            found += (state.draft.valid.sum(axis=1) - 1).tolist()
        return found

    assert {*lengths(0.0)} == {4}
    assert min(lengths(0.3)) == 1 and max(lengths(0.3)) > 1


def test_the_threshold_follows_what_is_accepted():
    """Down by a tenth of 0.01 while more than nine tenths are accepted, else up; unmoved by a step without a draft."""
    method, tree = SelfSpeculative(), batched(build_tree([(0,), (0, 0)]))
    state = {"threshold": jnp.array([0.6]), "accepted": jnp.array([0.9])}
    context = drafting_of(None, [0], [0], width=1, depth=2)

    def after(state, accepted, valid):
        draft = draft_of(tree, [[0, 1, 2]], jnp.array([valid]))
        outcome = Accepted(jnp.zeros((1, 3), int), jnp.array([accepted]), jnp.zeros(1, int), jnp.zeros(1, int))
        step = Step(draft, {}, jnp.zeros((1, 3, 4)), outcome)
        return method.observe(context, ReadChunk(jnp.zeros((1, 3), int), None, None, None, {}, step), state)

    def numbers(state):
        return {name: float(value[0]) for name, value in state.items()}

    both = after(state, 2, [True, True, True])
    assert numbers(both) == pytest.approx({"accepted": 0.95, "threshold": 0.599})
    half = after(both, 1, [True, True, True])
    assert numbers(half) == pytest.approx({"accepted": 0.725, "threshold": 0.6})
    assert numbers(after(half, 0, [True, False, False])) == numbers(half)


def without(model, layer):
    """The base with a layer that adds nothing to the rows."""
    params = jax.tree.map(lambda x: x, model.params)
    own = params[f"layers_{layer}"]
    own["attention"]["o"]["kernel"] = jnp.zeros_like(own["attention"]["o"]["kernel"])
    own["mlp"]["down"]["kernel"] = jnp.zeros_like(own["mlp"]["down"]["kernel"])
    return dataclasses.replace(model, params=params)


@pytest.fixture(scope="module")
def idle(model):
    """A base whose middle layer does nothing, and answers of its own."""
    idle, prompts = without(model, 1), make_prompts(4)
    answers = generate(autoregressive(idle), prompts, 24)
    return idle, [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]


def test_the_search_finds_what_does_nothing(idle):
    model, texts = idle
    notes = []
    found = search_layers(model.base, texts, 3, 12, lambda done, note: notes.append((done, note)))
    assert found.skip == Skip((1,), (1,)) and found.tokens == 1 + found.drafted and found.cost < 1
    assert [done for done, _ in notes] == list(range(1, 13)) and "tokens per step" in notes[-1][1]


def test_a_replay_accepts_all_of_the_whole_base_and_less_of_parts_that_matter(idle):
    model, texts = idle
    replay = LayerReplay(model.base, texts, 3)
    whole, less = replay(Skip()), replay(Skip((0, 2), (0, 2)))
    assert whole.tokens == 1 + whole.drafted and whole.cost == 1
    assert less.tokens < 1 + less.drafted and less.cost < whole.cost


def test_the_adapter_is_its_settings(model, tmp_path):
    for name, method in (("one", PARTS), ("other", dataclasses.replace(PARTS, skip_mlp=()))):
        save_adapter(tmp_path / name, Adapter(method, {}, model.fingerprint, {}))
    one, other = (load_drafter("self_speculative", model, tmp_path / name, tree="own") for name in ("one", "other"))
    assert one.source.method == PARTS and one.plan.depth == 4 and one.digest != other.digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_mlp": (1, 3)}, "this base has the layers 0 to 2, none 3 to skip"),
        ({"skip_attention": (-1,)}, "this base has the layers 0 to 2, none -1 to skip"),
        ({"threshold": 1.5}, "threshold must be between 0 and 1, got 1.5"),
        ({"acceptance": -0.1}, "acceptance must be between 0 and 1, got -0.1"),
        ({"length": 0}, "length must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        abstract_trainable(SelfSpeculative(**settings), TINY)
