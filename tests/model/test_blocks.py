"""Kernels in blocks of columns compute what plain ones do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.base import Base
from jaxspec.model.blocks import columns, product
from jaxspec.weights.layouts import in_blocks
from tests.helpers.model import plain, quick_jit
from tests.helpers.tiny import TINY, make_tiny


def kernel(width, features, seed=0):
    return jax.random.normal(jax.random.key(seed), (width, features))


def in_columns(plain_kernel, block):
    """A kernel in blocks of so many columns."""
    return in_blocks({"kernel": plain_kernel}, lambda _: block)["kernel"]


@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (2, 5, 24), (200, 24), (24,)])
@pytest.mark.parametrize("block", [8, 16, 48])
def test_a_product_is_the_same_in_either_layout(shape, block):
    """Also of so many rows that the blocks are put together first, and of none that divide them."""
    plain_kernel, x = kernel(24, 48), np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    blocked = in_columns(plain_kernel, block)
    assert blocked.shape == (48 // block, 24, block)
    np.testing.assert_allclose(quick_jit(product)(x, blocked), x @ np.asarray(plain_kernel), atol=1e-5)
    widened = functools.partial(product, preferred_element_type=jnp.float32)
    half = jax.eval_shape(widened, x.astype(jnp.bfloat16), blocked.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32 and half.shape == (*shape[:-1], 48)


def test_a_row_alone_is_multiplied_like_one_of_two():
    x, blocks = jax.random.normal(jax.random.key(1), (2, 48)), in_columns(kernel(48, 32), 16)
    np.testing.assert_array_equal(product(x[:1], blocks), product(x, blocks)[:1])


def test_columns_are_found_in_either_layout():
    plain_kernel, index = kernel(24, 48), jnp.array([[0, 47, 8], [7, 16, 31]])
    blocked = in_columns(plain_kernel, 8)
    for held in (plain_kernel, blocked):
        np.testing.assert_array_equal(columns(held, index), np.asarray(plain_kernel).T[np.asarray(index)])


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_in_blocks(tied):
    model = make_tiny(dataclasses.replace(TINY, num_layers=1, tie_embeddings=tied, qkv_bias=True))
    tokens = jnp.array([[3, 0, 15, 7, 7]])
    base = Base(in_blocks(model.params, lambda _: 8), model.decoder)
    assert {leaf.ndim for path, leaf in jax.tree.leaves_with_path(base.params) if path[-1].key == "kernel"} == {3}
    np.testing.assert_allclose(plain(base, tokens), plain(model.base, tokens), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(base.embed(tokens), model.base.embed(tokens))
    ids = np.array([9, 2, 4, 11, 0, 1, 8, 5])
    hidden = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32)

    @jax.jit
    def logits(held):
        return held.drafting(ids).draft_logits(hidden), held.project(hidden)

    for few, whole in map(logits, (base, model.base)):
        np.testing.assert_allclose(few, np.asarray(whole)[:, ids], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("block", [0, 16])
def test_rows_in_float32_times_a_kernel_in_bfloat16(rows, block):
    """As exact as float32 allows, whatever the compiler would like to leave out; rounded rows are far from that."""
    x, held = 30 * jax.random.normal(jax.random.key(1), (rows, 256)), kernel(256, 48).astype(jnp.bfloat16)
    blocked = in_columns(held, block)
    wanted = np.asarray(x, np.float64) @ np.asarray(held, np.float64)
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(held, np.float64))
    found, rounded = jax.jit(product)(x, blocked), jax.jit(product)(x.astype(jnp.bfloat16), blocked)
    assert found.dtype == jnp.float32 and np.max(np.abs(found - wanted) / scale) < 1e-6
    assert np.max(np.abs(rounded - wanted) / scale) > 1e-4
