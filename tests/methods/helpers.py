"""What the tests of all methods need: names for settings, and trained pytrees without training."""

import jax


def settings(method):
    """A test's name for a method: the settings that are not its defaults."""
    changed = [f"{k}={v}" for k, v in vars(method).items() if getattr(type(method)(), k) != v]
    return "-".join([method.name, *changed])


def trained(method, base, seed=3):
    """A pytree in which nothing is zero, the identity, the base's, or equal among the rows of a probe."""
    trainable = method.init(jax.random.key(seed), base)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(9), x.shape), trainable)
