"""Rotary position embeddings (Su et al., 2021), with the scalings of the LLaMA families."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.model.blocks import wide


def llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divide long wavelengths by `factor`, keep short ones, blend between (LLaMA 3.1)."""
    turns = scaling.original_max_positions * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_angles(config: ModelConfig, positions: jax.Array) -> jax.Array:
    """Angles of every row, from that row's own position alone.

    A row must not feel which other rows share its pass, or a tree and autoregressive decoding would differ; so
    `dynamic` scaling too looks at the row's position and not at the length of the sequence.

    Args:
      config: the base.
      positions: [B, R] int32.

    Returns:
      [B, R, Dh/2] float32.
    """
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    at = positions[..., None].astype(jnp.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return at * np.float32(config.rope_theta**-exponent)
    if scaling.kind == "linear":
        return at * np.float32(config.rope_theta**-exponent / scaling.factor)
    if scaling.kind == "llama3":
        return at * np.float32(llama3_frequencies(config.rope_theta**-exponent, scaling))
    # dynamic NTK: past the original context the base grows with the position
    length = jnp.maximum(at + 1, scaling.original_max_positions)
    stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
    theta = config.rope_theta * stretch ** (config.head_dim / (config.head_dim - 2))
    return at * theta ** np.float32(-exponent)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate the two halves of every head by its row's angles.

    Args:
      x: [B, R, heads, Dh].
      angles: [B, R, Dh/2].

    Returns:
      [B, R, heads, Dh], computed in float32, in the dtype of `x`.
    """
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(wide(x)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
