"""The kernels that read and write all layers' caches, interpreted on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model import gpu, gpu_cache
from jaxspec.model.cache import Cache, commit, gather_rows


def random_cache(rng, layers, batch, length, dtype):
    arrays = jnp.asarray(rng.normal(size=(2, layers, batch, 2, length, 12)), dtype)
    return Cache(*(tuple(part) for part in arrays))


@pytest.mark.parametrize("layers", [1, 3])
def test_they_equal_what_other_devices_run(monkeypatch, layers):
    """With caches of another type than the rows, in kernels of at most four arrays, up to the last slot and beyond."""
    rng = np.random.default_rng(0)
    cache, rows = random_cache(rng, layers, 3, 20, "bfloat16"), random_cache(rng, layers, 3, 6, "float32")
    path, lengths = jnp.asarray(rng.integers(0, 6, (3, 3))), jnp.array([0, 17, 19])
    launched = []

    def both(cache, rows, path, lengths):
        picked = gather_rows(rows, path)
        return picked, commit(cache, picked, lengths)

    expected = jax.jit(both)(cache, rows, path, lengths)
    launch = gpu_cache.launch
    monkeypatch.setattr(gpu_cache, "launch", lambda *args, **options: launched.append(args) or launch(*args, **options))
    monkeypatch.setattr(gpu_cache, "_ARRAYS", 4)
    monkeypatch.setattr(gpu, "_INTERPRET", True)
    found = jax.jit(lambda *args: both(*args))(cache, rows, path, lengths)
    assert len(launched) == (2 if layers == 1 else 4)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_path_may_be_longer_than_the_rows(monkeypatch):
    """In a small size of a deep draft the last node repeats: all of the path is written into the cache."""
    rng = np.random.default_rng(1)
    rows, path = random_cache(rng, 2, 2, 2, "float32"), jnp.asarray(rng.integers(0, 2, (2, 5)))
    expected = jax.jit(gather_rows)(rows, path)
    monkeypatch.setattr(gpu, "_INTERPRET", True)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda *args: gather_rows(*args))(rows, path), expected)


def test_a_lone_row_needs_no_picking():
    rows = random_cache(np.random.default_rng(0), 1, 2, 1, "float32")
    assert gather_rows(rows, jnp.zeros((2, 1), jnp.int32)) is rows
