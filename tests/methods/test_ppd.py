"""PPD: masks, ensembles and the extensions of section 4.4."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.method import abstract_trainable
from jaxspec.errors import UserError
from jaxspec.methods import PPD
from jaxspec.model.base import Base
from tests.helpers.methods import batch_of, predict, sequence, trained


def test_masks_are_those_of_the_thesis():
    """Section 4.4.3 with two prompt tokens of two EPTs: rows V1 V2 (distance 1), V3 V4 (distance 2)."""
    distance, ept = np.array([1, 1, 2, 2]), np.array([0, 1, 0, 1])

    def sees(mask):
        return np.asarray(PPD(mask=mask).sees(distance, ept)).astype(int).tolist()

    assert sees("ensemble") == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert sees("decoder") == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert sees("encoder") == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert sees("causal") == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert sees("alone") == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_an_ensemble_of_equal_tokens_is_one_token(tiny):
    base, batch = Base(tiny.params, tiny.decoder), batch_of(sequence(tiny), [[3, 11]])
    one = trained(PPD(), base)
    five = {"embeddings": jnp.repeat(one["embeddings"], 5, axis=1)}
    single = predict(PPD(), one, base, batch)
    np.testing.assert_allclose(predict(PPD(ensemble=5), five, base, batch), single, rtol=1e-4, atol=1e-4)


def test_prompt_tokens_start_as_text_tokens(tiny):
    base = Base(tiny.params, tiny.decoder)
    embeddings = np.asarray(PPD(ensemble=4).init(jax.random.key(0), base)["embeddings"]).reshape(-1, 32)
    table = np.asarray(tiny.params["embedding"])
    assert all(np.any(np.all(np.isclose(table, e), axis=1)) for e in embeddings)


def test_prompt_tokens_start_as_a_given_phrase(tiny):
    """All EPTs of a distance, then those of the next; a phrase that is too short starts again."""
    base, table = Base(tiny.params, tiny.decoder), np.asarray(tiny.params["embedding"])
    for method, ids in (
        (PPD(initial=[7, 2], ensemble=2), [[7, 2], [7, 2], [7, 2]]),
        (PPD(initial=(7, 2, 5, 9)), [[7], [2], [5]]),
    ):
        np.testing.assert_array_equal(method.init(jax.random.key(0), base)["embeddings"], table[np.array(ids)])
        assert hash(method)


def test_a_phrase_must_be_tokens_of_the_base(tiny):
    with pytest.raises(UserError, match=r"initial must be token ids, .* got 'Next word'"):
        PPD(initial="Next word")
    size = tiny.config.vocab_size
    with pytest.raises(UserError, match=rf"token ids below {size}, .* got \[-1, {size}\]"):
        abstract_trainable(PPD(initial=(3, -1, size)), tiny.config)


def test_settings_are_hashable_and_shapes_follow_them(tiny):
    method = dataclasses.replace(PPD(), ensemble=7, distances=2, aggregation="learned")
    shapes = jax.tree.map(lambda x: x.shape, abstract_trainable(method, tiny.config))
    assert shapes == {"embeddings": (2, 7, 32), "weights": (2, 7)} and hash(method)


def test_a_prefix_per_distance(tiny):
    """Figure 4.4: prompt token 1 sees its own prefix, not that of prompt token 2."""
    base, method = Base(tiny.params, tiny.decoder), PPD(prefix_tokens=2, distances=2, mask="encoder")
    trainable, batch = trained(method, base), batch_of(sequence(tiny), [[7]])
    before = predict(method, trainable, base, batch)
    second = jax.tree.map(lambda x: x.at[:, :, 2:].add(1.0), trainable["prefix"])
    after = predict(method, trainable | {"prefix": second}, base, batch)
    np.testing.assert_array_equal(before[0, 0, 0], after[0, 0, 0])
    assert not np.allclose(before[0, 0, 1], after[0, 0, 1])


def test_a_head_of_their_own_starts_as_the_bases(tiny):
    base, batch = Base(tiny.params, tiny.decoder), batch_of(sequence(tiny), [[3, 11]])
    key = jax.random.key(0)
    plain, own = PPD(), PPD(head="one_stage")
    a, b = (predict(m, m.init(key, base), base, batch) for m in (plain, own))
    np.testing.assert_array_equal(a, b)
    louder = own.init(key, base) | {"head": 2 * base.params["lm_head"]}
    np.testing.assert_allclose(predict(own, louder, base, batch), 2 * a, rtol=1e-5)


@pytest.mark.slow
def test_exits_are_normalised_before_they_are_averaged(tiny):
    """Section 4.4.5 with two exits, against reading each exit alone."""
    base, batch = Base(tiny.params, tiny.decoder), batch_of(sequence(tiny), [[3, 11]])
    method = PPD(multi_exit=2)
    trainable = trained(method, base)

    def exits(method):
        return jax.jit(lambda *given: method.probe(*given, 3)[1])(trainable, base, batch)

    early, late = exits(method)
    np.testing.assert_allclose(late, exits(PPD())[0], rtol=1e-5, atol=1e-5)
    wanted = (base.logits(early[..., 0, :]) + base.logits(late[..., 0, :])) / 2
    np.testing.assert_allclose(predict(method, trainable, base, batch), wanted, rtol=1e-4, atol=1e-4)
