"""Rotary position embeddings (Su et al., 2021), with the scalings of the LLaMA families."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.model.dtypes import wide


def llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divide long wavelengths by `factor`, keep short ones, blend between (LLaMA 3.1)."""
    turns = scaling.original_max_positions * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def yarn_frequencies(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Keep frequencies of early dimensions, divide those of late ones by `factor`, blend between (YaRN)."""

    def dimension(turns: float) -> float:
        """Where a frequency turns so many times within the original context."""
        return len(frequencies) * np.log(scaling.original_max_positions / (turns * 2 * np.pi)) / np.log(theta)

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    blend = np.clip((np.arange(len(frequencies)) - first) / max(last - first, 1e-3), 0, 1)
    return blend * frequencies / scaling.factor + (1 - blend) * frequencies


def rope_angles(
    config: ModelConfig, positions: jax.Array, local: bool = False, long: jax.Array | None = None
) -> jax.Array:
    """Angles of every row, from that row's own position alone.

    A row must not feel which other rows share its pass, or a tree and autoregressive decoding would differ; so
    `dynamic` scaling too looks at the row's position and not at the length of the sequence. `longrope` has other
    frequencies in long texts: which of its texts are long is said beforehand.

    Args:
      config: the base.
      positions: [B, R] int32.
      local: of layers with a window, where these have a base of their own.
      long: [B] bool, texts that will be longer than the original context; None: those with a position beyond it.

    Returns:
      [B, R, Dh/2] float32; of the dimensions that are rotated, where these are not all.
    """
    size = config.rotary_size
    exponent = np.arange(0, size, 2) / size
    at = positions[..., None].astype(jnp.float32)
    scaling = config.rope_scaling
    if local:
        return at * np.float32(config.local_rope_theta**-exponent)
    if scaling is None:
        return at * np.float32(config.rope_theta**-exponent)
    if scaling.kind == "linear":
        return at * np.float32(config.rope_theta**-exponent / scaling.factor)
    if scaling.kind == "llama3":
        return at * np.float32(llama3_frequencies(config.rope_theta**-exponent, scaling))
    if scaling.kind == "yarn":
        return at * np.float32(yarn_frequencies(config.rope_theta**-exponent, config.rope_theta, scaling))
    if scaling.kind == "longrope":
        if long is None:
            long = jnp.max(positions, axis=-1) >= scaling.original_max_positions
        short, other = (
            np.float32(config.rope_theta**-exponent / np.array(factors))
            for factors in (scaling.short_factors, scaling.long_factors)
        )
        return at * jnp.where(long[:, None, None], other, short)
    # dynamic NTK: past the original context the base grows with the position
    length = jnp.maximum(at + 1, scaling.original_max_positions)
    stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
    theta = config.rope_theta * stretch ** (size / (size - 2))
    return at * theta ** np.float32(-exponent)


def rotate(x: jax.Array, angles: jax.Array, factor: float = 1.0) -> jax.Array:
    """Rotate the two halves of every head by its row's angles.

    Args:
      x: [B, R, heads, Dh].
      angles: [B, R, Dh/2]; where there are fewer, dimensions behind those they rotate stay as they are.
      factor: what is rotated is multiplied by it.

    Returns:
      [B, R, heads, Dh], computed in float32, in the dtype of `x`.
    """
    if (size := 2 * angles.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], angles, factor), x[..., size:]], axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x.astype(wide(x)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
