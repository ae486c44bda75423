"""Suffix decoding and Token Recycling: what they offer, worked out by hand, and how noise changes it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import Offer, knowing_noise
from jaxspec.decoding.method import ReadChunk, Step
from jaxspec.errors import UserError
from jaxspec.methods import PromptLookup, Suffix, TokenRecycling
from tests.helpers.drafting import draft_of, drafting_of, offered_after, paths_of
from tests.helpers.model import quick_jit
from tests.helpers.tiny import TINY


def test_suffixes_that_go_on_alike_are_one_path():
    """1 2 occurred three times: twice 3 followed, and then 4 and 5; the last time 6."""
    found = offered_after(Suffix(), [1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1, 2, 6, 9, 1, 2])
    assert {(6,), (6, 9), (3,), (3, 4), (3, 5)} <= found.keys()
    assert found[3,] > 0.8 * found[6,] and found[3, 5] > found[3, 4]  # more often, but longer ago; later
    assert found[6,] + found[3,] < 1 and found[3, 4] + found[3, 5] < 1


def test_a_longer_match_is_trusted_more():
    short, long = offered_after(Suffix(), [9, 2, 5, 1, 2]), offered_after(Suffix(), [8, 9, 1, 2, 5, 8, 9, 1, 2])
    assert long[5,] > short[5,] > 0 and offered_after(Suffix(), [1, 2, 3]) == {}


@pytest.mark.parametrize("method", [PromptLookup(), Suffix()], ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("text", "predicted", "drafted"),
    [
        ([1, 2], [6, 1, 2, 3, 4], [(3,), (3, 4)]),  # the prediction ends there
        ([4, 5], [5, 6, 7, 8], [(6,), (6, 7), (6, 7, 8)]),  # its first token
        ([1, 2, 9, 1, 2], [1, 2, 3], [(3,)]),  # it goes before a match of the same length
        ([1, 2], [1, 2], []),  # at its end
        ([0], [0, 0], [(0,)]),
        ([7, 3], [4, 5], []),
    ],
)
def test_a_predicted_text_is_looked_up_too(method, text, predicted, drafted):
    found, path, best = offered_after(method, text, predicted=predicted), (), []
    while below := [longer for longer in found if longer[:-1] == path]:
        path = max(below, key=found.get)
        best.append(path)
    assert best == drafted


def test_a_longer_match_goes_before_the_predicted_text():
    found = offered_after(PromptLookup(), [5, 1, 2, 9, 8, 7, 5, 1, 2], predicted=[1, 2, 3])
    assert found.keys() == {(9,), (9, 8), (9, 8, 7)}


def test_a_predicted_text_is_trusted_more_than_the_text():
    text, longer = [8, 1, 2, 3, 4], [8, 1, 2, 3, 4, 9, 8, 1, 2, 3, 4]
    assert offered_after(PromptLookup(), text, predicted=[*text, 9])[9,] > offered_after(PromptLookup(), longer)[9,]


def test_tokens_are_recycled_from_every_node():
    """Every node's best tokens go to its token's row, the last node's of twins; what was not read has none."""
    method = TokenRecycling(successors=2, length=2)
    context = drafting_of(None, [3], [4], width=4, depth=2)
    table = method.init_state(type("Base", (), {"vocab_size": TINY.vocab_size}), 1, 8)
    logits = np.zeros((1, 4, 16), np.float32)
    for node, (first, second) in enumerate([(4, 5), (6, 7), (8, 9), (10, 11)]):
        logits[0, node, [first, second]] = 2, 1
    draft = draft_of(None, [[3, 4, 3, 5]], jnp.array([[True, True, True, False]]))
    step = Step(draft, {}, jnp.array(logits), None)
    chunk = ReadChunk(jnp.array([[3, 4]]), None, jnp.zeros(1), jnp.ones(1), step=step)
    table = np.array(quick_jit(method.observe)(context, chunk, table))
    assert table[0, 3].tolist() == [8, 9] and table[0, 4].tolist() == [6, 7] and table[0, 5].tolist() == [-1, -1]
    table[0, 8] = [1, 2]
    assert set(paths_of(quick_jit(method.offer)(context, table), 2)) == {(8,), (9,), (8, 1), (8, 2)}


def test_a_chance_with_the_noise_known_is_as_often_right_as_it_says():
    """One candidate whose plain chance is known exactly, at many positions."""
    count, p = 6000, np.array([0.4, 0.3, 0.2, 0.1])
    context = drafting_of(None, [0] * count, range(count), sampling=SamplingConfig(1.0), width=1, depth=1)
    tokens = np.zeros((count, 1, 1), np.int32)
    plain = Offer(tokens, np.ones(tokens.shape, bool), np.full(tokens.shape, np.log(p[0]), np.float32), tokens)
    chance = np.exp(np.asarray(quick_jit(knowing_noise)(context, plain).log_p))[:, 0, 0]
    noise = quick_jit(context.sampler.noise)(context.seeds, context.position[:, None] + 1, np.arange(4))[:, 0]
    won = np.argmax(np.log(p) + np.asarray(noise), axis=-1) == 0
    for part in np.array_split(np.argsort(chance), 8):
        assert won[part].mean() == pytest.approx(chance[part].mean(), abs=0.06)
    assert chance.min() < 0.02 and chance.max() > 0.95


def test_rejection_sampling_leaves_the_noise_that_judges():
    """Candidates that are looked up are not drawn: the text's own noise decides, however drawn ones are ranked."""
    context = drafting_of(None, [0], [3], sampling=SamplingConfig(1.0), width=1, depth=1)
    tokens = np.array([[[1, 2, 3]]])
    offer = Offer(tokens, np.ones(tokens.shape, bool), np.full(tokens.shape, -2.0), np.zeros_like(tokens))
    independent = context.replace(sampler=context.sampler.replace(independent=True))
    known = quick_jit(knowing_noise)
    np.testing.assert_array_equal(known(independent, offer).log_p, known(context, offer).log_p)


def test_greedy_chances_know_of_no_noise():
    context = drafting_of(None, [0], [3], width=1, depth=1)
    offer = Offer(jnp.zeros((1, 1, 1), jnp.int32), jnp.ones((1, 1, 1), bool), jnp.full((1, 1, 1), -1.0))
    assert knowing_noise(context, offer) is offer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Suffix(occurrences=0), "occurrences must be between 1 and 100, got 0"),
        (lambda: Suffix(occurrences=200), "occurrences must be between 1 and 100, got 200"),
        (lambda: Suffix(fading=0), "fading must be above 0 and at most 1, got 0"),
        (lambda: Suffix(fading=float("nan")), "fading must be above 0 and at most 1, got nan"),
        (lambda: TokenRecycling(successors=0), "successors must be at least 1, got 0"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(UserError, match=message):
        make()
