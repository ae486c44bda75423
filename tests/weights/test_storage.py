"""How an adapter's weights are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.weights.storage import as_stored, pack, unpack

WEIGHTS = {
    "first": {"kernel": jax.random.normal(jax.random.key(0), (2, 24, 5)) * jnp.array([1e-3, 1, 0.1, 0, 0.3])},
    "near_one": jnp.eye(24, 9) + 1e-3 * jax.random.normal(jax.random.key(2), (24, 9)),
    "masks": jax.random.normal(jax.random.key(1), (3, 24)),
    "bias": jnp.full(4, 1 / 3),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_what_is_measured_is_what_is_read(dtype):
    """A training rounds its weights with `as_stored` before it counts how often they are right."""
    read = unpack(pack(WEIGHTS, dtype))
    rounded = as_stored(WEIGHTS, dtype)
    assert {value.dtype.name for value in read.values()} == {"float32"}
    np.testing.assert_array_equal(read["first/kernel"], rounded["first"]["kernel"])
    np.testing.assert_array_equal(read["near_one"], rounded["near_one"])
    np.testing.assert_array_equal(read["masks"], rounded["masks"])
    np.testing.assert_array_equal(read["bias"], rounded["bias"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_integers_stay_as_they_are(dtype):
    """Of a datastore, whose numbers no float32 can tell apart."""
    whole = {"order": np.array([0, 2**24 + 1, -1], np.int32), "table": np.arange(64, dtype=np.int32).reshape(16, 4)}
    for name, read in unpack(pack(whole, dtype)).items():
        np.testing.assert_array_equal(read, whole[name])
        assert read.dtype == np.int32


def test_int8_rounds_every_column_of_a_matrix_by_itself_and_nothing_else():
    tensors = pack(WEIGHTS, "int8")
    assert tensors["first/kernel"].dtype == np.int8 and tensors["first/kernel:scale"].shape == (2, 1, 5)
    assert tensors["masks"].dtype == tensors["bias"].dtype == np.float16  # three rows are not worth a scale each
    kernel = np.asarray(WEIGHTS["first"]["kernel"])
    step = np.abs(kernel).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(unpack(tensors)["first/kernel"] - kernel) <= step * 0.501)  # also in the column of zeros


def test_a_matrix_that_learned_from_the_identity_keeps_what_it_learned():
    error = unpack(pack(WEIGHTS, "int8"))["near_one"] - np.asarray(WEIGHTS["near_one"])
    assert np.abs(error).max() < 5e-5  # scales of the whole diagonal would round to steps of 8e-3


def test_weights_that_do_not_fit_16_bits_are_refused():
    with pytest.raises(UserError, match=r"do not fit float16; continue with --resume --train.adapter-dtype float32"):
        as_stored({"w": jnp.array([1e6])}, "float16")


@pytest.mark.parametrize(
    "change", [{"x:scale": None}, {"x:scale": np.ones((1, 3), np.float16)}, {"x:identity": np.ones(2)}]
)
def test_int8_without_its_scales_is_refused(change):
    tensors = pack({"x": jnp.eye(12, 9)}, "int8") | change
    with pytest.raises(ValueError, match="tensor 'x' is int8, and its scales are missing or misshapen"):
        unpack({name: value for name, value in tensors.items() if value is not None})
