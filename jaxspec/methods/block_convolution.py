"""DFlash 2's convolutions: each row of a block is mixed with the ones just before it, around attention and around MLP.

    y[i] = sum over taps t of (weights[t] + change[i, t]) * x[i - t]          nothing stands before the first row

Weights are one per channel; row i itself says by how much they change, for a group of channels at once. One projection
of what stands before the attention or the MLP makes the changes of both convolutions, that before it and that after.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.model.blocks import product
from jaxspec.model.layers import held


class BlockConvolution(nn.Module):
    """A function of rows between two convolutions, which at first change nothing.

    Attributes:
      width: D.
      taps: T, a row and so many less one before it.
      group: channels that share a change, a divisor of D.
    """

    width: int
    taps: int
    group: int

    def setup(self) -> None:
        self.weights = self.param("weights", _identity, (2, self.taps, self.width))  # before and after
        shape = (self.width, 2 * self.taps * (self.width // self.group))
        self.kernel = held(self, "kernel", shape, nn.initializers.zeros)

    def __call__(self, x: jax.Array, between: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
        """x [B, G * rows, D], blocks of so many rows, to what comes out behind the second convolution, likewise."""
        changes = product(x, self.kernel).reshape(*x.shape[:-1], 2, self.taps, -1)
        y = between(convolved(x, self.weights[0], changes[..., 0, :, :], rows))
        return convolved(y, self.weights[1], changes[..., 1, :, :], rows)


def convolved(x: jax.Array, weights: jax.Array, changes: jax.Array, rows: int) -> jax.Array:
    """Rows mixed with those before them.

    Args:
      x: [B, G * rows, D].
      weights: [T, D].
      changes: [B, G * rows, T, N], of N groups of channels.
      rows: of a block.
    """
    taps, groups = changes.shape[-2:]
    blocks = x.reshape(x.shape[0], -1, rows, groups, x.shape[-1] // groups)
    changes = changes.reshape(*blocks.shape[:3], taps, groups, 1)
    mixed = jnp.zeros_like(blocks)
    for tap in range(taps):
        before = jnp.pad(blocks, ((0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)))[:, :, :rows]
        mixed += before * (weights[tap].reshape(groups, -1).astype(x.dtype) + changes[..., tap, :, :])
    return mixed.reshape(x.shape)


def _identity(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Weights [2, T, D] that pass on the row itself."""
    return jnp.zeros(shape).at[:, 0].set(1)
