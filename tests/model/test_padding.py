"""Passes of few rows, filled up as GPUs want them: the rows' results are those of the rows alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.attention import Context
from jaxspec.model.cache import Cache
from jaxspec.model.padding import pad_rows
from tests.helpers.model import VARIANTS, random_base, run_layers


def context_of(config, rng, batch, rows, prefix=False):
    """Rows of a chain with one branch, behind caches of unequal length."""

    def layers(*shape):
        return tuple(
            jnp.asarray(rng.standard_normal((*shape, config.head_dim)), jnp.float32) for _ in range(config.num_layers)
        )

    mask = np.tri(rows, dtype=bool)
    mask[-1, 1:-1] = False
    lengths = jnp.arange(3, 3 + batch)[:, None]
    shape, K = (batch, config.num_kv_heads, 12), config.num_kv_heads
    own = Cache(layers(K, 2), layers(K, 2)) if prefix else None
    sees = jnp.asarray(rng.random((1, rows, 2)) < 0.5) if prefix else None
    masks = jnp.broadcast_to(jnp.asarray(mask), (batch, 1, rows, rows))
    return Context(lengths + jnp.arange(rows), masks, Cache(layers(*shape), layers(*shape)), lengths, own, sees)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("batch, rows, prefix", [(1, 1, False), (1, 5, True), (3, 2, True), (2, 4, False)])
def test_padding_changes_no_row(variant, batch, rows, prefix):
    base, rng = random_base(VARIANTS[variant]), np.random.default_rng(0)
    config = base.decoder.config
    context = context_of(config, rng, batch, rows, prefix)
    x = jnp.asarray(rng.standard_normal((batch, rows, config.hidden_size)), jnp.float32)
    tiled = base.replace(decoder=base.decoder.clone(least_rows=8))
    expected, found = run_layers(base, x, context), run_layers(tiled, x, context)
    for a, b in zip((expected[0], *expected[1].keys), (found[0], *found[1].keys), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_pads_see_themselves_alone_and_enough_rows_get_none():
    config, rng = VARIANTS["llama"], np.random.default_rng(0)
    context = context_of(config, rng, 2, 3)
    x, padded = pad_rows(jnp.ones((2, 3, 4)), context, 8)
    assert x.shape == (2, 4, 4) and not x[:, 3].any()
    np.testing.assert_array_equal(padded.mask[0, 0, 3], [False, False, False, True])
    np.testing.assert_array_equal(padded.mask[:, :, :3, :3], context.mask)
    assert pad_rows(x, padded, 8)[1] is padded
