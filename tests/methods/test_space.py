"""SPACE: its loss term by term, what it tunes, and that what it tunes is what decodes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxspec.decoding.method import Batch, abstract_trainable
from jaxspec.drafters.drafter import finalized
from jaxspec.errors import UserError
from jaxspec.methods import SPACE
from jaxspec.model.attention import causal_context
from jaxspec.model.base import Base
from tests.helpers.methods import batch_of, loss_and_gradient, predict, sequence, trained
from tests.helpers.model import plain, quick_jit

TUNINGS = [SPACE(distances=3, tuning=tuning, rank=2) for tuning in ("lora", "full", "none")]
every_tuning = pytest.mark.parametrize(
    "method", [pytest.param(m, id=m.tuning, marks=() if m.tuning == "lora" else pytest.mark.slow) for m in TUNINGS]
)


@pytest.fixture
def base(tiny):
    return Base(tiny.params, tiny.decoder)


@functools.partial(quick_jit, static_argnums=0)
def read_behind(method, trainable, base, tokens):
    """Logits of the tuned base, of a text [1, T] and three masks behind it."""
    own = method.tuned_base(trainable, base)
    x = jnp.concatenate([own.embed(tokens), jnp.broadcast_to(trainable["mask"], (1, 3, 32))], axis=1)
    hidden, _ = own.rows(x, causal_context(*x.shape[:2]))
    return own.logits(hidden)


@pytest.mark.slow
@every_tuning
def test_masks_are_one_token_more(tiny, base, method):
    """Read behind the text by the tuned base: k times the same embedding, at the positions it stands for."""
    tokens, p = sequence(tiny), 7
    trainable = trained(method, base)
    expected = np.asarray(read_behind(method, trainable, base, tokens[:, : p + 1]))
    predicted = np.asarray(predict(method, trainable, base, batch_of(tokens, [[p]])))
    np.testing.assert_allclose(predicted[0, 0], expected[0, p + 1 :], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("p_ar", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_loss_is_equation_4(tiny, base, p_ar):
    """A text of ten tokens, seven of them the answer, cut in one place: every P from a pass of its own, as printed.

    Only the common factor is ours: the loss is per token of the answer.
    """
    k, N, m = 3, 7, 2  # where the sums of equations 1 and 3 have 7 and 5 terms
    method = SPACE(distances=k, p_ar=p_ar, rank=2, weighting="sums")
    text = np.asarray(sequence(tiny, 10))
    X, y = text[0, :-N], dict(enumerate(text[0, -N:], 1))  # y_1 .. y_N
    trainable = trained(method, base)
    own = quick_jit(method.tuned_base)(trainable, base)

    def log_p(logits, behind, token):
        """log P of a token in the row after X and so many others."""
        return log_softmax(np.asarray(logits, np.float64)[0, len(X) + behind - 1])[token]

    read = plain(own, text)
    masked = read_behind(method, trainable, base, text[:, : len(X) + m - 1])  # X, y_1 .. y_{m-1}, [M] .. [M]
    L_AR = -sum(log_p(read, t - 1, y[t]) for t in range(1, N + 1))  # equation 1
    L_SAR = -sum(log_p(masked, t - 1, y[t]) for t in range(1, m + 1))  # equation 3, first sum
    L_SAR -= sum(log_p(masked, t - 1, y[t]) for t in range(m + 1, m + k + 1))  # second sum, y_m counted once
    L = p_ar * L_AR + (1 - p_ar) * L_SAR  # equation 4
    last_before_masks = len(X) + m - 2
    batch = Batch(text, jnp.array([10]), jnp.array([len(X)]), jnp.array([[last_before_masks, -1]]))
    loss, metrics = quick_jit(method.loss)(trainable, base, batch)
    np.testing.assert_allclose(loss, L / N, rtol=1e-4)
    np.testing.assert_allclose(metrics["autoregressive"], L_AR / N, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["sums", "tokens", "terms"])
def test_texts_and_cuts_count_as_weighting_says(tiny, base, weighting):
    """Two texts of unequal lengths, three cuts and one that is none, against counting token by token."""
    method = SPACE(distances=2, p_ar=0.4, tuning="none", weighting=weighting)
    tokens = np.concatenate([sequence(tiny, 12), sequence(tiny, 12, seed=1)])
    starts, lengths, points = [3, 5], [12, 9], [[4, 8], [6, -1]]
    trainable = trained(method, base)
    batch = Batch(tokens, jnp.array(lengths), jnp.array(starts), jnp.array(points))
    said = log_softmax(np.asarray(plain(base, tokens)), axis=-1)
    guessed = log_softmax(np.asarray(predict(method, trainable, base, batch)), axis=-1)
    autoregressive, before, masked, texts = [], [], [], []
    for b in range(2):
        entropy = {t: -said[b, t - 1, tokens[b, t]] for t in range(starts[b], lengths[b])}
        autoregressive += entropy.values()
        cuts = []
        for g, point in enumerate(points[b]):
            if point >= 0:
                chunk = [value for t, value in entropy.items() if t <= point + 1]
                targets = [t for t in (point + 2, point + 3) if t < lengths[b]]
                behind = [-guessed[b, g, t - point - 2, tokens[b, t]] for t in targets]
                before, masked, cuts = before + chunk, masked + behind, [*cuts, sum(chunk) + sum(behind)]
        texts.append(np.mean(cuts))
    terms, tokens = np.mean(before) + np.mean(masked), np.mean(before + masked)
    semi = {"terms": terms, "tokens": tokens, "sums": sum(texts) / len(autoregressive)}[weighting]
    expected = 0.4 * np.mean(autoregressive) + 0.6 * semi
    np.testing.assert_allclose(quick_jit(method.loss)(trainable, base, batch)[0], expected, rtol=1e-4)


@every_tuning
def test_everything_that_is_tuned_moves(tiny, base, method):
    trainable, batch = trained(method, base), batch_of(sequence(tiny), [[4, 9]])

    def loss(trainable, base):
        return method.loss(trainable, base, batch)[0]

    gradients = quick_jit(jax.grad(loss))(trainable, base)
    parts = {"lora": {"mask", "lora"}, "full": {"mask", "base"}, "none": {"mask"}}[method.tuning]
    assert set(gradients) == parts
    assert all(np.max(np.abs(leaf)) > 0 for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_ordinary_fine_tuning_leaves_the_mask_alone(tiny, base):
    method = SPACE(distances=3, p_ar=1.0, tuning="none")
    trainable, batch = trained(method, base), batch_of(sequence(tiny), [[4, 9]])
    (loss, _), gradients = loss_and_gradient(method, trainable, base, 0, batch)
    assert loss > 0 and not np.any(gradients["mask"])


@pytest.mark.parametrize("method", TUNINGS[:2], ids=lambda m: m.tuning)
def test_training_begins_with_the_base_itself(tiny, base, method):
    own = method.tuned_base(method.init(jax.random.key(0), base), base)
    tokens = sequence(tiny)
    expected = plain(base, tokens)
    np.testing.assert_allclose(plain(own, tokens), expected, rtol=1e-5, atol=1e-5)


def test_corrections_sit_where_they_are_wanted(tiny):
    shapes = jax.tree.map(lambda x: x.shape, abstract_trainable(SPACE(rank=4, targets=("qkv", "down")), tiny.config))
    layer = {
        "attention": {"qkv": {"down": (32, 4), "up": (4, 64)}},
        "mlp": {"down": {"down": (48, 4), "up": (4, 32)}},
    }
    assert shapes == {"mask": (32,), "lora": {f"layers_{i}": layer for i in range(3)}}


@pytest.mark.slow
@pytest.mark.parametrize("method", TUNINGS[:2], ids=lambda m: m.tuning)
def test_in_16_bits_the_base_that_settles_is_the_tuned_one_rounded(tiny, method):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tiny.params)
    tiny = dataclasses.replace(tiny, params=params)
    base, tokens = Base(params, tiny.decoder), sequence(tiny)
    trainable = trained(method, base)
    _, own = finalized(method, trainable, tiny)
    assert jax.tree.map(lambda x: x.dtype, own.params) == jax.tree.map(lambda x: x.dtype, params)

    def change(finalized):
        return plain(finalized, tokens).astype(jnp.float32) - plain(base, tokens)

    expected = change(method.tuned_base(trainable, base))
    assert float(jnp.linalg.norm(change(own.base) - expected)) < 0.1 * float(jnp.linalg.norm(expected))


@pytest.mark.parametrize("method", TUNINGS[:2], ids=lambda m: m.tuning)
def test_what_settles_is_a_base_of_its_own(tiny, base, method):
    trainable, tokens = trained(method, base), sequence(tiny)
    kept, own = finalized(method, trainable, tiny)
    assert kept.method == dataclasses.replace(method, tuning="none") and set(kept.trainable) == {"mask"}
    assert own.fingerprint != tiny.fingerprint
    expected = plain(method.tuned_base(trainable, base), tokens)
    np.testing.assert_allclose(plain(own.base, tokens), expected, rtol=1e-3, atol=1e-3)
    assert float(jnp.abs(expected - plain(base, tokens)).max()) > 0.1
    again, same = finalized(kept.method, kept.trainable, own)
    assert again.method is kept.method and same is own


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"p_ar": 1.5}, "p-ar is a share between 0 and 1, got 1.5"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"targets": ("q",)}, "targets must be some of qkv, o, gate, up, down, got q"),
        ({"targets": ()}, "targets must be some of"),
        ({"weighting": "texts"}, "weighting must be one of sums, tokens, terms, got 'texts'"),
        ({"tuning": "some"}, "tuning must be one of full, lora, none, got 'some'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SPACE(**settings)
