"""Kernels of 8 or 4 bits, and products with them, against the same kernels written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.model import small_products
from jaxspec.model.blocks import Corrected, columns, merged, product, products
from jaxspec.model.quantized import GROUPS, dense, fits, form_of, quantize
from tests.helpers.model import quick_jit

ROWS, COLUMNS = 192, 200


@functools.cache
def kernel(*shape, seed=0):
    return 0.05 * jax.random.normal(jax.random.key(seed), shape or (ROWS, COLUMNS))


def quantized(form, *shape):
    return quantize(kernel(*shape), form, "float32")


def with_minima(small):
    """Numbers without a sign, as GGUF's Q4_1 has them."""
    return small.replace(minima=-7 * small.scales)


KERNELS = {
    **{form: functools.partial(quantized, form) for form in GROUPS},
    "minima": lambda *shape: with_minima(quantized("int4", *shape)),
    "groups of int8": lambda *shape: _of_groups(quantized("int8", *shape)),
}


def _of_groups(small):
    """Scales that differ from group to group, as GGUF's Q8_0 has them."""
    factors = 1 + jax.random.uniform(jax.random.key(1), (small.shape[-2] // 32, 1))
    return small.replace(scales=(small.scales * factors).astype(jnp.float16))


def rows(*shape, seed=2):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 4.5), ("int4-64", 4.25)])
def test_bits_and_errors(form, bits):
    """A weight is off by half a step at most, of its column or group; but the one that would take the next number."""
    small = quantized(form)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(small.replace(scales=small.scales if form != "int8" else None)))
    assert 8 * held / kernel().size == bits
    assert small.shape == kernel().shape and small.size == kernel().size and small.dtype == jnp.float32
    assert form_of(small) == form
    groups = kernel().reshape(-1, GROUPS[form] or ROWS, COLUMNS)
    step = jnp.max(jnp.abs(groups), axis=1, keepdims=True) / (127 if form == "int8" else 8)
    error = jnp.abs(small.dense(jnp.float32).reshape(groups.shape) - groups)
    assert jnp.all(error <= (0.51 if form == "int8" else 2.1) * step)
    assert jnp.sqrt(jnp.mean(error**2)) < (0.01 if form == "int8" else 0.1) * 0.05


@pytest.mark.parametrize("form", GROUPS)
def test_zeros_and_single_numbers_are_kept(form):
    zeros = jnp.zeros((64, 2))
    np.testing.assert_array_equal(quantize(zeros, form, "float32").dense(jnp.float32), zeros)
    one = zeros.at[40, 1].set(-0.25)
    np.testing.assert_allclose(quantize(one, form, "float32").dense(jnp.float32), one, rtol=1e-3)


def test_groups_must_divide_the_rows():
    assert fits((48, 8), "int8") and not fits((48, 8), "int4") and not fits((32, 8), "int4-64")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(ROWS,), (1, ROWS), (2, 5, ROWS), (70, ROWS)])
def test_a_product_is_that_of_the_kernel_written_out(name, shape):
    small, x = KERNELS[name](), rows(*shape)
    assert_close(quick_jit(product)(x, small), x @ small.dense(jnp.float32))


@pytest.mark.parametrize("name", KERNELS)
def test_parts_of_columns_make_the_product_and_its_gradient(name, monkeypatch):
    """Also where parts do not divide the columns."""
    monkeypatch.setattr(small_products, "_PART", {"cpu": 64 * ROWS, "default": 128 * ROWS})
    small, x = KERNELS[name](), rows(3, ROWS)

    def loss(x, multiply):
        return jnp.sum(jnp.sin(multiply(x)))

    found = jax.jit(jax.value_and_grad(functools.partial(loss, multiply=lambda x: product(x, small))))(x)
    wanted = jax.value_and_grad(functools.partial(loss, multiply=lambda x: x @ small.dense(jnp.float32)))(x)
    jax.tree.map(assert_close, found, wanted)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_side_by_side(name):
    small, x = KERNELS[name](2, ROWS, COLUMNS), rows(3, ROWS)
    assert_close(quick_jit(products)(x, small), jnp.stack([x @ each for each in small.dense(jnp.float32)]))
    gradient = jax.grad(lambda x: jnp.sum(products(x, small) ** 2))(x)
    assert_close(gradient, jax.grad(lambda x: jnp.sum((x @ small.dense(jnp.float32)) ** 2))(x))


@pytest.mark.parametrize("name", KERNELS)
def test_columns_and_their_part_of_a_product(name):
    small, x, ids = KERNELS[name](), rows(3, ROWS), jnp.array([7, 0, 199, 8])
    whole = small.dense(jnp.float32)
    np.testing.assert_array_equal(columns(small, ids.reshape(2, 2)), whole.T[ids].reshape(2, 2, ROWS))
    assert_close(product(x, small.take(ids)), x @ whole[:, ids])


@pytest.mark.parametrize("form", GROUPS)
def test_half_rows_are_summed_in_float32(form):
    """A kernel that stands in for bfloat16 gives that dtype, unless another one is asked for."""
    small, x = quantize(kernel(), form, "bfloat16"), rows(3, ROWS).astype(jnp.bfloat16)
    y = product(x, small, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32 and product(x, small).dtype == jnp.bfloat16 and small.dtype == jnp.bfloat16
    np.testing.assert_allclose(y, x.astype(jnp.float32) @ small.dense(jnp.float32), atol=0.02)


def test_the_gradient_keeps_no_kernel_written_out():
    """Of a chain of products: numbers are what lies between the passes, and a part at a time is written out."""

    def loss(x, kernels):
        return jnp.sum(functools.reduce(lambda x, kernel: jnp.tanh(product(x, kernel)), kernels, x))

    width, x = 1024, jax.ShapeDtypeStruct((4, 1024), jnp.float32)
    make = functools.partial(quantize, form="int4", dtype="float32")
    kernels = [jax.eval_shape(make, jax.ShapeDtypeStruct((width, width), jnp.float32))] * 6
    memory = jax.jit(jax.grad(loss)).lower(x, kernels).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * 4 * width * width  # of six


def test_a_correction_stays_beside_a_quantized_kernel():
    small, x = quantized("int8"), rows(3, ROWS)
    corrected = Corrected(small, rows(ROWS, 4, seed=3), rows(4, COLUMNS, seed=4))
    tree = {"kernel": corrected}
    assert merged(tree)["kernel"] is corrected
    whole = small.dense(jnp.float32) + corrected.down @ corrected.up
    np.testing.assert_allclose(product(x, corrected), x @ whole, rtol=1e-3, atol=1e-3)


def test_a_tree_is_written_out():
    tree = {"norm": jnp.ones(3), "kernel": quantized("int4")}
    written = dense(tree)
    assert written["norm"] is tree["norm"]
    np.testing.assert_array_equal(written["kernel"], tree["kernel"].dense(jnp.float32))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
def test_products_over_a_mesh(name, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    small, x = KERNELS[name](), rows(3, ROWS)

    def lies(leaf):
        whole = spec == P("x") and leaf.shape[0] % 2
        return jax.device_put(leaf, NamedSharding(mesh, P() if whole else spec))

    def loss(x, kernel):
        return jnp.sum(jnp.sin(product(x, kernel)))

    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss))(x, jax.tree.map(lies, small))
    jax.tree.map(assert_close, found, jax.value_and_grad(loss)(x, small.dense(jnp.float32)))


def test_devices_without_a_kernel_say_so(monkeypatch):
    assert "and more time" in small_products.small_note(quantized("int8"), False)  # here
    for capable, backend, divided, said in (
        (True, "gpu", False, ("", "")),
        (True, "gpu", True, ("", "in parts or one by one")),
        (False, "gpu", False, ("written out in 16 bits", "in parts or one by one")),
        (False, "tpu", False, ("", "in parts or one by one")),
    ):
        monkeypatch.setattr(small_products, "has_kernels", lambda capable=capable: capable)
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for form, words in zip(("int8", "int4"), said, strict=True):
            note = small_products.small_note(KERNELS[form](), divided)
            assert words in note and bool(note) == bool(words)
