"""Filters against an obvious reference, noise that depends on seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.sampling import best, make_row_sampler, make_sampler
from tests.helpers.model import quick_jit

filtered = quick_jit(lambda sampler, logits: sampler.filtered(logits))
noise_of = quick_jit(lambda sampler, seeds, positions, tokens: sampler.noise(seeds, positions, tokens))


def reference(logits, config):
    """Sort-based filters for one row of logits."""
    logits = logits.astype(np.float64) / config.temperature
    order = np.argsort(-logits, kind="stable")
    keep = np.ones(len(logits), bool)
    if config.top_k:
        keep[order[config.top_k :]] = False
    if config.top_p < 1:
        p = np.where(keep, np.exp(logits - logits.max()), 0)
        p = p / p.sum()
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= config.top_p]] = False
    if config.min_p:
        keep &= np.exp(logits - logits.max()) >= config.min_p
    return keep


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(0.7, top_k=5),
        SamplingConfig(1.0, top_k=3_000_000_000),
        SamplingConfig(1.0, top_p=0.6),
        SamplingConfig(1.3, top_p=1e-6),
        SamplingConfig(1.0, min_p=0.1),
        SamplingConfig(0.9, top_k=20, top_p=0.8, min_p=0.05),
    ],
)
def test_filters_keep_what_sorting_keeps(config):
    logits = np.random.default_rng(0).normal(0, 3, (4, 3, 97)).astype(np.float32)
    kept = np.isfinite(filtered(make_sampler(config), logits))
    for row in np.ndindex(4, 3):
        np.testing.assert_array_equal(kept[row], reference(logits[row], config))


def test_filters_scale_what_they_keep():
    logits = jnp.array([[1.0, 3.0, 2.0]])
    filtered = make_sampler(SamplingConfig(0.5, top_k=2)).filtered(logits)
    np.testing.assert_allclose(filtered, [[-np.inf, 6.0, 4.0]])


def test_equal_logits_are_kept_together():
    filtered = make_sampler(SamplingConfig(1.0, top_k=1)).filtered(jnp.array([[2.0, -0.0, 2.0]]))
    np.testing.assert_array_equal(np.isfinite(filtered), [[True, False, True]])


def test_greedy_leaves_logits_alone_and_has_no_noise():
    sampler = make_sampler(SamplingConfig(0.0, top_k=2, top_p=0.1))
    logits = jnp.array([[0.5, 2.0, 1.0]])
    np.testing.assert_array_equal(sampler.filtered(logits), logits)
    assert not np.any(sampler.noise(jnp.zeros(1, jnp.uint32), jnp.zeros((1, 1), jnp.int32), jnp.arange(3)))


def test_noise_depends_on_seed_and_position_alone():
    sampler = make_sampler(SamplingConfig(1.0))
    seeds = np.array([3, 3, 4], np.uint32)
    noise = np.asarray(noise_of(sampler, seeds, np.array([[7, 8], [8, 9], [7, 8]]), np.arange(50)))
    np.testing.assert_array_equal(noise[0, 1], noise[1, 0])
    assert not np.allclose(noise[0, 0], noise[0, 1])
    assert not np.allclose(noise[0, 0], noise[2, 0])


def test_the_best_token_is_the_first_of_several():
    scores = jnp.array([[1.0, 3.0, 3.0, -jnp.inf], [-jnp.inf, -jnp.inf, -2.0, -2.0]])
    np.testing.assert_array_equal(best(scores), [1, 2])
    assert best(scores).dtype == jnp.int32


def test_noise_is_that_of_jax_random():
    """jax.random with the key of a seed, into which a position is folded; drafts of rejection sampling by a stream."""
    seed, position, size = 2**32 - 5, 1234, 300
    sampler = make_sampler(SamplingConfig(1.0))
    for independent in (False, True):
        key = jax.random.key(np.uint32(seed))
        key = jax.random.fold_in(key, np.uint32(2**32 - 1)) if independent else key
        expected = jax.random.gumbel(jax.random.fold_in(key, position), (size,))
        drawing = sampler.replace(independent=independent)
        noise = noise_of(drawing, np.array([seed], np.uint32), np.array([[position]]), np.arange(size))
        np.testing.assert_allclose(noise[0, 0], expected, rtol=1e-6, atol=1e-6)


def test_noise_of_a_token_does_not_depend_on_the_others():
    sampler = make_sampler(SamplingConfig(1.0))

    def noise(tokens):
        return np.asarray(noise_of(sampler, np.array([7], np.uint32), np.array([[2, 3]]), tokens))

    some = np.array([41, 3, 17])
    np.testing.assert_allclose(noise(some), noise(np.arange(50))[..., some], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("independent", [False, True])
def test_a_token_at_every_position_compiles_in_no_time(independent):
    """Forty rounds of hashing in one loop, and LLVM compiles for hours; this test then does not end."""
    sampler = make_sampler(SamplingConfig(1.0)).replace(independent=independent)
    seeds, positions, tokens = jnp.array([7], jnp.uint32), jnp.arange(4)[None], jnp.array([[[3], [1], [4], [1]]])
    whole = jax.jit(sampler.noise)(seeds, positions, jnp.arange(5))
    some = jax.jit(sampler.noise)(seeds, positions, tokens)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, tokens, axis=-1), rtol=1e-6, atol=1e-6)


def test_noise_draws_from_the_distribution():
    """Gumbel noise on log p draws token i with probability p_i."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    sampler = make_sampler(SamplingConfig(1.0))
    noise = np.asarray(noise_of(sampler, np.zeros(1, np.uint32), np.arange(8000)[None], np.arange(4)))[0]
    drawn = np.bincount(np.argmax(np.log(p) + noise, axis=-1), minlength=4) / 8000
    np.testing.assert_allclose(drawn, p, atol=4 * np.sqrt(0.25 / 8000))


ROWS = [SamplingConfig(), SamplingConfig(0.7, top_k=5), SamplingConfig(1.2), SamplingConfig(1.0, 9, 0.8, 0.05)]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 4, ROWS[2:3] * 4], ids=["mixed", "greedy", "unfiltered"])
def test_rows_have_settings_of_their_own(rows):
    """What a row gets is what the whole batch gets where all have its settings, in whatever company."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (4, 3, 97)), jnp.float32)
    seeds, positions = jnp.arange(4, dtype=jnp.uint32), jnp.arange(12).reshape(4, 3)
    together = make_row_sampler(rows)
    for row, config in enumerate(rows):
        alone = make_sampler(config)
        np.testing.assert_array_equal(together.filtered(logits)[row], alone.filtered(logits)[row])
        noise = jnp.broadcast_to(alone.noise(seeds, positions, jnp.arange(97)), logits.shape)
        np.testing.assert_array_equal(together.noise(seeds, positions, jnp.arange(97))[row], noise[row])
        expected = jax.nn.one_hot(logits[row].argmax(-1), 97)
        expected = alone.distribution(logits)[row] if alone.sampling else expected
        np.testing.assert_array_equal(together.distribution(logits)[row], expected)
        assert together.pick(jnp.array([1]), jnp.array([0]))[row] == alone.sampling
