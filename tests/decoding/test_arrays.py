import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.arrays import overwrite


def test_rows_are_overwritten_from_places_of_their_own():
    """What does not fit is dropped, and moves nothing."""
    buffer, new, at = np.arange(18).reshape(3, 6), 100 + np.arange(9).reshape(3, 3), np.array([0, 2, 5])
    expected = buffer.copy()
    for row, place in enumerate(at):
        expected[row, place : place + 3] = new[row, : max(0, 6 - place)][:3]
    np.testing.assert_array_equal(overwrite(jnp.array(buffer), jnp.array(new), jnp.array(at)), expected)
