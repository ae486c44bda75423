"""Lookahead and Jacobi decoding, step by step beside the same algorithms in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import method_text
from jaxspec.drafters import load_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import Jacobi, Lookahead
from tests.helpers.decoding import begin
from tests.helpers.methods import union
from tests.helpers.tiny import make_prompts

LENGTH = 64


@pytest.fixture(scope="module")
def model(tiny):
    return dataclasses.replace(tiny, eos=())


@pytest.fixture(scope="module")
def say(model):
    """The base's greedy token after each of some texts, each read from its first token on."""
    forward = jax.jit(lambda params, tokens: model.decoder.apply({"params": params}, tokens))

    def after(texts):
        padded = np.zeros((8, LENGTH), np.int32)
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        logits = np.asarray(forward(model.params, padded))
        return [int(np.argmax(logits[i, len(text) - 1])) for i, text in enumerate(texts)]

    return after


def texts_of(prompts, state):
    return [[*p, *np.asarray(state.tokens[i, : state.counts[i]]).tolist()] for i, p in enumerate(prompts)]


def pool_of(state, method, row):
    """{token: its n-grams, the newest first}."""
    pool = np.asarray(state.method_states[0]["pool"])[row].reshape(-1, method.guesses, method.levels)
    return {key: kept for key, ngrams in enumerate(pool) if (kept := [n.tolist() for n in ngrams if n[0] >= 0])}


def look_ahead(method, say, text, window, pool):
    """A step of the window: what a column says in addition is said of the text and the tokens that it sees."""
    columns = [[level[j] for level in window] for j in range(method.window)]
    columns[0][0] = text[-1]
    first = [column[0] for column in columns]
    newest = say([[*text[:-1], *first[: j + 1], *column[1:]] for j, column in enumerate(columns)])
    for column, token in zip(columns, newest, strict=True):
        key, *following = [*column, token]
        others = [ngram for ngram in pool.get(key, []) if ngram != following]
        pool[key] = [following, *others][: method.guesses]
    return [*window[1:], newest]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 4, 2), (1, 3, 2), (4, 2, 3)])
def test_window_and_pool_are_those_of_the_plain_algorithm(model, say, sizes):
    method, prompts = Lookahead(*sizes), [[3, 1, 4, 1, 5], [9, 2, 6]]
    drafter = union([method], model, 1 + method.guesses * method.levels + method.further_rows)
    decoding, state = begin(drafter, prompts, 24)
    windows = np.asarray(state.method_states[0]["window"]).tolist()
    assert all({t for level in w for t in level} <= {*p} for w, p in zip(windows, prompts, strict=True))
    pools, most = [{} for _ in prompts], 0
    for _ in range(10):
        before = texts_of(prompts, state)
        state = decode(decoding, state, 1)
        for row, (text, after) in enumerate(zip(before, texts_of(prompts, state), strict=True)):
            guesses, new = pools[row].get(text[-1], []), after[len(text) :]
            right = [sum(np.cumprod([a == b for a, b in zip(guess, new, strict=False)])) for guess in guesses]
            assert len(new) == 1 + max(right, default=0) or len(after) == len(prompts[row]) + 24
            windows[row] = look_ahead(method, say, text, windows[row], pools[row])
            found = np.asarray(state.method_states[0]["window"])[row]
            assert found.tolist() == windows[row] and pool_of(state, method, row) == pools[row]
            most = max(most, len(new))
    assert most > 1 and max(map(len, pools[0].values())) <= method.guesses


def test_ngrams_of_a_token_are_kept_by_how_lately_they_came():
    """One after the other also where several of a window have one token; what comes again moves to the front."""
    method = Lookahead(window=4, ngram=2, guesses=2)
    pool = jnp.full((1, 5, 2), -1, jnp.int32)
    pool = method.remember(pool, jnp.array([[[1, 2], [1, 3], [4, 0], [1, 2]]]))
    assert pool[0, 1].tolist() == [2, 3] and pool[0, 4].tolist() == [0, -1]
    pool = method.remember(pool, jnp.array([[[1, 0], [4, 0], [4, 1], [4, 2]]]))
    assert pool[0, 1].tolist() == [0, 2] and pool[0, 4].tolist() == [2, 1] and pool[0, 0].tolist() == [-1, -1]


def test_a_row_sees_the_first_level_up_to_its_column_and_its_column_up_to_its_level():
    sees = Lookahead(window=3, ngram=4).sees().astype(int)
    assert sees[[2, 4, 8]].tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


@pytest.mark.slow
def test_jacobis_guesses_are_what_the_base_said_behind_the_last_ones(model, say):
    method, prompts = Jacobi(length=4), [[3, 1, 4, 1, 5], [9, 2, 6]]
    drafter = union([method], model, 5).with_tree("chain:4")
    decoding, state = begin(drafter, prompts, 24)
    guesses, most = np.asarray(state.method_states[0]).tolist(), 0
    for _ in range(10):
        before = texts_of(prompts, state)
        state = decode(decoding, state, 1)
        for row, (text, after) in enumerate(zip(before, texts_of(prompts, state), strict=True)):
            said = say([[*text, *guesses[row][:d]] for d in range(5)])
            right = sum(np.cumprod([a == b for a, b in zip(guesses[row], said, strict=False)]))
            assert after[len(text) :] == said[: right + 1][: len(after) - len(text)]
            guesses[row] = (said[right + 1 :] + [said[-1]] * 4)[:4]
            assert np.asarray(state.method_states[0])[row].tolist() == guesses[row]
            most = max(most, right)
    assert most > 0


@pytest.mark.slow
def test_rows_are_counted_and_sizes_leave_the_window_whole(model):
    drafter = load_drafter("lookahead:window=4,ngram=3,guesses=2", model, tree="own")
    assert (drafter.num_nodes, drafter.num_rows, drafter.shape.spec) == (1 + 2 * 2, 1 + 2 * 2 + 7, "best:12")
    assert drafter.with_tree("chain:2").num_rows == 3 + 7
    joined = load_drafter("suffix+lookahead", model, tree="best:6@1,8@2,10@3")
    assert joined.num_nodes == 10 - 5 and joined.on_device.shape.sizes == (1, 3, 5)
    prompts = make_prompts(4)
    first, second = (generate(joined, prompts, 16, batch_size=4) for _ in range(2))
    assert [a.tokens for a in first] == [a.tokens for a in generate(load_drafter("autoregressive", model), prompts, 16)]
    assert all(a.compile_seconds == 0 for a in second)
    with pytest.raises(UserError, match="a size needs 6 rows, the root and the method's own, or is the root alone, 1"):
        joined.with_tree("best:5@1,8@2")


def test_settings_name_what_was_tuned_for_them(model):
    plain, other = (load_drafter(name, model) for name in ("lookahead", "lookahead:window=4"))
    assert other.source.method == Lookahead(window=4) and method_text(other.source.method) == "lookahead:window=4"
    assert plain.digest != other.digest and plain.digest == load_drafter("suffix", model).digest


@pytest.mark.parametrize("name", ["window", "ngram", "guesses"])
def test_sizes_of_nothing_are_refused(name):
    with pytest.raises(UserError, match=f"lookahead: {name} must be at least"):
        Lookahead(**{name: 0})
    with pytest.raises(UserError, match="length must be at least 1"):
        Jacobi(length=0)
