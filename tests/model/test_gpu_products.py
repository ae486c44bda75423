"""The kernel for products with groups, interpreted on the CPU, and what it is lowered to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxspec.model import gpu
from jaxspec.model.blocks import products
from jaxspec.model.gpu_products import MOST_ROWS, multiply_groups
from tests.model.test_quantized import KERNELS

GROUPED = [name for name in KERNELS if name != "int8"]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(gpu, "_INTERPRET", True)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("rows", [1, 33])
def test_it_equals_the_kernel_written_out(interpreted, name, rows):
    """Columns that are no whole instances, rows that are no power of two, and several kernels side by side."""
    small, x = KERNELS[name](2, 192, 200), jax.random.normal(jax.random.key(0), (rows, 192))
    wanted = jnp.stack([x @ each for each in small.dense(jnp.float32)])
    np.testing.assert_allclose(multiply_groups(x, small), wanted, rtol=1e-4, atol=1e-5)


def test_several_instances_share_the_rows_of_a_column(interpreted):
    small, x = KERNELS["int4"](1056, 130), jax.random.normal(jax.random.key(0), (3, 1056))
    small = jax.tree.map(lambda leaf: leaf[None], small)
    shapes = [each.shape for each in _outputs(jax.make_jaxpr(multiply_groups)(x, small))]
    assert shapes == [(2, 1, 3, 130)]
    np.testing.assert_allclose(multiply_groups(x, small)[0], x @ small.dense(jnp.float32)[0], rtol=1e-4, atol=1e-5)


def test_few_rows_take_it_and_gradients_are_those_of_plain_code(interpreted):
    small = KERNELS["int4"](1, 192, 200)
    for rows, taken in ((MOST_ROWS, 1), (MOST_ROWS + 1, 0)):
        x = jax.random.normal(jax.random.key(0), (rows, 192))
        assert len(_outputs(jax.make_jaxpr(lambda x: products(x, small))(x))) == taken
    x = jax.random.normal(jax.random.key(0), (3, 192))
    gradient = jax.grad(lambda x: jnp.sum(products(x, small) ** 2))(x)
    wanted = jax.grad(lambda x: jnp.sum((x @ small.dense(jnp.float32)[0]) ** 2))(x)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GROUPED)
def test_it_is_lowered_for_gpus(name, monkeypatch):
    small = KERNELS[name](1, 192, 256)
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    x = jnp.ones((8, 192), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
        text = jax.jit(products).trace(x, small).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") >= 1


def _outputs(jaxpr):
    """Of every kernel of a program, its first result."""
    found = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append(equation.outvars[0].aval)
                continue
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    look(getattr(inner, "jaxpr", inner))

    look(jaxpr.jaxpr)
    return found
