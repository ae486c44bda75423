"""What the tests of all methods need: names for settings, and trained pytrees without training."""

import jax
import jax.numpy as jnp
import numpy as np


def settings(method):
    """A test's name for a method: the settings that are not its defaults."""
    changed = [f"{k}={v}" for k, v in vars(method).items() if getattr(type(method)(), k) != v]
    return "-".join([method.name, *changed])


def trained(method, base, seed=3, scale=0.1, noise=9):
    """A pytree in which nothing is zero, the identity, the base's, or equal among the rows of a probe."""
    trainable = jax.jit(lambda base: method.init(jax.random.key(seed), base))(base)
    rng = np.random.default_rng(noise)  # not in JAX, which would compile a program for every shape
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + scale * rng.normal(size=x.shape), jnp.float32), trainable)
