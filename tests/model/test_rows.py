"""Rows that join late: the same as running the layers one by one, and nothing at all below."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.attention import Context, causal_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.rows import Join, Rows, read_layers, run_rows
from tests.helpers.model import run_layers
from tests.helpers.tiny import make_tiny


@pytest.fixture(scope="module")
def base(request):
    model = make_tiny(seed=1)
    return Base(model.params, model.decoder)


def run(base, rows, cache=None, visible=None):
    """`run_rows`, compiled; of the states those after the last layer alone."""
    states, kv = run_all(base, rows, cache, visible)
    return states[base.decoder.config.num_layers], kv


def run_all(base, rows, cache=None, visible=None):
    return jax.jit(lambda *args: run_rows(args[0], rows, *args[1:]))(base, cache, visible)


def random(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def context(base, B=2, filled=5):
    """A cache of random tokens and how much of it is seen."""
    tokens = jnp.arange(B * filled).reshape(B, filled) % 16
    _, kv = run_layers(base, base.embed(tokens), causal_context(B, filled))
    cache = commit(empty_cache(base.decoder.config, B, 16, jnp.float32), kv, jnp.zeros(B, jnp.int32))
    return cache, jnp.full((B, 1, 1), filled)


def late(base, at, new, B=2, G=1, nodes=3):
    """`nodes` rows from the start and as many as `new` has from layer `at` on."""
    r = nodes + new.shape[2]
    positions = jnp.broadcast_to(5 + jnp.arange(r), (B, G, r))
    mask = jnp.broadcast_to(jnp.tri(r, dtype=bool), (B, G, r, r))
    return Rows(random((B, G, nodes, 32)), positions, mask, (Join(at, lambda x: jnp.concatenate([x, new], axis=2)),))


def test_late_rows_are_computed_from_their_layer_on(base):
    new, (cache, visible) = random((2, 1, 2, 32), 1), context(base)
    rows = late(base, 1, new)
    last, kv = run(base, rows, cache, visible)
    assert [k.shape[2] for k in kv.keys] == [3, 5, 5]  # nothing of them in the layer below

    nodes = Context(rows.positions[:, 0, :3], rows.mask[:, :, :3, :3], cache, visible[:, 0])
    below, kv0 = run_layers(base, rows.x[:, 0], nodes, (0, 1))
    x = jnp.concatenate([below, new[:, 0]], axis=1)
    above, kv1 = run_layers(base, x, Context(rows.positions[:, 0], rows.mask, cache, visible[:, 0]), (1, 3))
    np.testing.assert_allclose(last[:, 0], above, rtol=1e-5, atol=1e-5)
    layers = Cache(kv0.keys + kv1.keys, kv0.values + kv1.values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), kv, layers)


def test_rows_that_join_at_the_first_layer_are_ordinary_rows(base):
    new, (cache, visible) = random((2, 1, 2, 32), 1), context(base)
    rows = late(base, 0, new)
    last, _ = run(base, rows, cache, visible)
    x = jnp.concatenate([rows.x, new], axis=2)[:, 0]
    whole, _ = run_layers(base, x, Context(rows.positions[:, 0], rows.mask, cache, visible[:, 0]))
    np.testing.assert_allclose(last[:, 0], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_groups_without_rows_skip_the_layers_below(base):
    """Training's case: nothing but late rows, each group with its own view of the text."""
    cache, _ = context(base)
    new, visible = random((2, 4, 2, 32), 1), jnp.broadcast_to(jnp.array([1, 3, 5, 2])[None, :, None], (2, 4, 1))
    rows = late(base, 2, new, G=4, nodes=0)
    last, kv = run(base, rows, cache, visible)
    assert len(kv.keys) == 1 and kv.keys[0].shape == (2, 2, 8, 8)
    for group in range(4):
        alone = Rows(
            rows.x[:, :1], rows.positions[:, :1], rows.mask[:, :1], (Join(2, lambda x, g=group: new[:, g : g + 1]),)
        )
        one, _ = run(base, alone, cache, visible[:, group : group + 1])
        np.testing.assert_allclose(last[:, group], one[:, 0], rtol=1e-5, atol=1e-5)


def test_taps_are_the_states_before_layers(base):
    """Of the rows there: before the layer at which others join, of the first ones alone."""
    rows = late(base, 1, random((2, 1, 2, 32), 1))
    cache, visible = context(base)
    tapped, _ = run_all(base, dataclasses.replace(rows, taps=(2, 0, 1)), cache, visible)
    last, _ = run(base, rows, cache, visible)
    assert set(tapped) == {0, 1, 2, 3}
    np.testing.assert_array_equal(tapped[0], rows.x)
    np.testing.assert_allclose(tapped[3], last, rtol=1e-6, atol=1e-6)
    nodes = Context(rows.positions[:, 0, :3], rows.mask[:, :, :3, :3], cache, visible[:, 0])
    below, _ = run_layers(base, rows.x[:, 0], nodes, (0, 1))
    np.testing.assert_allclose(tapped[1][:, 0], below, rtol=1e-5, atol=1e-5)
    everyone = Context(rows.positions[:, 0], rows.mask, cache, visible[:, 0])
    np.testing.assert_allclose(run_layers(base, tapped[2][:, 0], everyone, (2, 3))[0], last[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_late_rows_cost_nothing_below(base):
    """Floating-point operations of the compiled pass, against those of rows that are there from the start."""

    def flops(at):
        def one_pass(base):
            return run_rows(base, late(base, at, jnp.zeros((1, 1, 64, 32)), B=1, nodes=1))[0][3]

        return jax.jit(one_pass).lower(base).compile().cost_analysis()["flops"]

    all_layers, two_layers, one_layer = (flops(at) for at in (0, 1, 2))
    assert two_layers / all_layers == pytest.approx(2 / 3, rel=0.03)
    assert one_layer / all_layers == pytest.approx(1 / 3, rel=0.05)


def test_hidden_states_are_read_on_the_way(base):
    tokens = jnp.arange(12).reshape(2, 6) % 16
    final, cache, read = jax.jit(read_layers, static_argnums=2)(base, tokens, (0, 2, 2))
    whole, kv = run_layers(base, base.embed(tokens), causal_context(2, 6))
    middle, _ = run_layers(base, base.embed(tokens), causal_context(2, 6), layers=(0, 2))
    assert set(read) == {0, 2}
    np.testing.assert_array_equal(read[0], base.embed(tokens))
    np.testing.assert_allclose(read[2], middle, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(final, whole, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), cache, kv)
