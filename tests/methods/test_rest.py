"""REST: what is found in a datastore, as a brute-force search finds it, and what is offered of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.methods import Rest
from jaxspec.methods.rest import SEPARATOR, build, spread
from tests.helpers.drafting import drafting_of, offer_after, offered_after, paths_of
from tests.helpers.model import quick_jit


def offered(texts, text, depth=3, **settings):
    """{path: chance of its last token} of what is offered behind a text, from a datastore of texts."""
    method, datastore = build(texts, **settings)
    return offered_after(method, text, depth, datastore)


def brute_force(tokens, last, longest):
    """Places of a datastore that the most of the last tokens lead to, one after the other, and how many tokens do."""
    matched = []
    for place in range(len(tokens)):
        count = 0
        while count < min(longest, len(last)) and place >= count and tokens[place - count] == last[-1 - count]:
            count += 1
        matched.append(count)
    most = max(matched)
    return [place for place, count in enumerate(matched) if count == most] if most else [], most


@pytest.mark.parametrize(("vocab_size", "longest"), [(2, 5), (3, 8), (3, 1), (30, 4)])
def test_halving_finds_what_a_brute_force_search_finds(vocab_size, longest):
    """Texts of any length, empty ones included; texts at hand that are shorter than a match may be; misses; token 0."""
    rng = np.random.default_rng(vocab_size)
    stored = [rng.integers(0, vocab_size, length) for length in (0, 40, *rng.integers(1, 30, 10))]
    method, datastore = build(stored, longest=longest)
    texts = [rng.integers(0, vocab_size + 1, rng.integers(1, 12)) for _ in range(30)] + [stored[1][4:16], [vocab_size]]
    text = np.zeros((len(texts), 16), np.int32)
    for row, each in enumerate(texts):
        text[row, : len(each)] = each
    context = drafting_of(None, text[:, 0], [len(each) - 1 for each in texts], datastore, width=8, depth=3)
    find = quick_jit(lambda context, text: method.find(context.trainable, method.last(context, text)))
    found = zip(texts, *map(np.asarray, find(context, text)), strict=True)
    lengths = set()
    for each, first, count, matched in found:
        places, most = brute_force(datastore["tokens"], each, longest)
        assert (sorted(datastore["order"][first : first + count]), matched) == (places, most)
        lengths.add(most)
    assert {0, longest} <= lengths


@pytest.mark.slow
def test_texts_do_not_run_into_each_other():
    texts = [[1, 2], [3, 4], [3, 5]]
    assert build(texts)[1]["tokens"].tolist() == [SEPARATOR, 1, 2, SEPARATOR, 3, 4, SEPARATOR, 3, 5, SEPARATOR]
    assert offered(texts, [1, 2]) == {}  # the end of its text, not 3
    assert offered(texts, [2, 3, 4]) == {}
    assert offered(texts, [2, 3]).keys() == {(4,), (5,)}  # 2 does not lead to 3


def test_continuations_that_begin_alike_are_one_path():
    found = offered([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [9, 2, 7]], [1, 2])
    assert found.keys() == {(3,), (3, 4), (3, 5), (6,)}  # 9 2 matches less
    assert found[3,] == pytest.approx(2 * found[6,]) and found[3, 4] == pytest.approx(found[3, 5])
    assert found[3,] + found[6,] < 1 and found[3, 4] + found[3, 5] < 1


def test_more_tokens_that_match_and_more_continuations_that_agree_are_trusted_more():
    once, twice = offered([[1, 2, 3]], [1, 2])[3,], offered([[1, 2, 3], [1, 2, 3]], [1, 2])[3,]
    longer = offered([[0, 1, 2, 3]], [0, 1, 2])[3,]
    assert 0 < once < twice < 1 and once < longer < 1


def test_token_0_is_an_ordinary_token():
    assert offered([[1, 0, 0, 2]], [1]).keys() == {(0,), (0, 0), (0, 0, 2)}
    assert offered([[0, 0, 1]], [0, 0]).keys() == {(1,)}
    assert offered([[0, 1]], [5]) == {}  # nothing before a text is taken for it, nor zeros behind it


def test_an_empty_datastore_offers_nothing():
    method = Rest()
    assert offered_after(method, [1, 2], 3, method.init(None, None)) == {}


def test_of_many_places_some_are_taken_evenly():
    assert spread(jnp.array([1, 3, 4, 10]), 4).tolist() == [[0, 1, 2, 3]] * 3 + [[0, 2, 5, 7]]
    assert offered([[1, token] for token in range(2, 10)], [1], continuations=2).keys() == {(2,), (6,)}


def test_every_row_of_a_batch_has_its_own_text():
    texts = [[1, 2, 3, 4], [2, 5], [7, 1]]
    method, datastore = build(texts)
    rows = [[1, 2], [7], [4, 4, 9, 2], [8]]
    text = np.array([row + [6] * (8 - len(row)) for row in rows], np.int32)  # garbage behind them
    offer = offer_after(method, text, np.array([len(row) - 1 for row in rows]), datastore)
    assert offer.tokens.shape == (4, 3, method.continuations)
    offer = jax.tree.map(np.asarray, offer)
    for i, row in enumerate(rows):
        alone = type(offer)(*(x[i : i + 1] for x in (offer.tokens, offer.known, offer.log_p, offer.parent)))
        assert paths_of(alone, 3) == pytest.approx(offered(texts, row))


@pytest.mark.parametrize("name", ["size", "continuations", "longest", "length"])
def test_settings_that_make_no_sense_are_refused(name):
    with pytest.raises(UserError, match=f"{name} must be at least 1, got 0"):
        Rest(**{name: 0})
