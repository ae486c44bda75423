"""The layers of the decoder, and what they are made of: norms, products, attention and MLP."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.model.attention import Scoring, attend_packed, normalised, unpacked
from jaxspec.model.blocks import product, products
from jaxspec.model.cache import usual_on_tpu
from jaxspec.model.dtypes import wide

_ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
}


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return normalised(x, scale, self.epsilon)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1, in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        y = x.astype(wide(x))
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * scale + bias).astype(x.dtype)


def norm_of(config: ModelConfig) -> nn.Module:
    """A norm of the base's kind."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.rms_norm_eps)


class Scale(nn.Module):
    """The scale [n] of a norm that is computed elsewhere."""

    size: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("scale", nn.initializers.ones, (self.size,))


class Linear(nn.Module):
    """x @ kernel[in, out], or the kernel in blocks (see `jaxspec.model.blocks`): whichever the parameters hold."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = product(x, held(self, "kernel", (x.shape[-1], self.features)))
        return y + self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else y


def held(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    initial: nn.initializers.Initializer = nn.initializers.normal(0.02),
) -> jax.Array:
    """A module's kernel in the layout it is held in; `init` makes a plain one of this shape by `initial`."""
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, initial, shape)


class Attention(nn.Module):
    """Self-attention of the rows of one step; `context` is what `attend` takes after q, k and v.

    One product makes queries, keys and values: [D, (H + 2K) * Dh], per key/value head its query heads, its key and
    its value. For one row on CPU that is 10% of the whole step faster than three products.
    """

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.qkv = Linear((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.qkv_bias)
        self.o = Linear(c.hidden_size, c.o_bias)
        if c.head_norms or c.joint_norms:
            heads, kv_heads = (c.num_heads, c.num_kv_heads) if c.joint_norms else (1, 1)
            self.q_norm, self.k_norm = Scale(heads * c.head_dim), Scale(kv_heads * c.head_dim)

    def queries_keys_values(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalised states [B, R, D] to rotated queries [B, R, H, Dh], rotated keys and values [B, R, K, Dh]."""
        return unpacked(*self._packed(x), angles, self.config.rms_norm_eps, Scoring.of(self.config))

    def __call__(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        how = Scoring.of(self.config)
        out, k, v = attend_packed(*self._packed(x), angles, self.config.rms_norm_eps, *context, how=how)
        return self.o(out), (k, v)

    def _packed(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """[B, R, K, H/K + 2, Dh], and the scales of the norms of queries and keys."""
        c = self.config
        qkv = usual_on_tpu(self.qkv(x))  # or the kernel would be copied into another layout
        norms = (self.q_norm(), self.k_norm()) if c.head_norms or c.joint_norms else ()
        return qkv.reshape(*x.shape[:2], c.num_kv_heads, -1, c.head_dim), norms


class LinearPair(nn.Module):
    """Two linear maps of the same rows in one product: kernel [2, in, out]."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [2, ..., out]."""
        y = products(x, held(self, "kernel", (2, x.shape[-1], self.features)))
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (2, self.features))
        return y + bias.reshape(2, *[1] * (x.ndim - 1), -1)


class MLP(nn.Module):
    """The feed-forward block: with a gate two products, or one where the parameters hold `gate_up` (see `holds_pairs`).

    Without a gate it is one product before the activation.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, activation = self.config, _ACTIVATIONS[self.config.activation]
        width, bias = c.intermediate_size, c.mlp_bias
        if self.has_variable("params", "gate_up"):
            gate, up = LinearPair(width, bias, name="gate_up")(x)
        elif c.gated:
            gate, up = (Linear(width, bias, name=name)(x) for name in ("gate", "up"))
        else:
            return Linear(c.hidden_size, bias, name="down")(activation(Linear(width, bias, name="up")(x)))
        return Linear(c.hidden_size, bias, name="down")(activation(gate) * up)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each normalised before, after or around, and added to the rows."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.attention, self.mlp = Attention(c), MLP(c)
        if c.norms != "after":
            self.attention_norm = norm_of(c)
        if c.norms != "after" and not c.shared_norm:
            self.mlp_norm = norm_of(c)
        if c.norms != "before":
            self.attention_out_norm, self.mlp_out_norm = norm_of(c), norm_of(c)

    def attend(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The first half; with the rows' keys and values."""
        y, kv = self._attended(x, angles, *context)
        return x + y, kv

    def feed(self, x: jax.Array) -> jax.Array:
        """The second half."""
        return x + self._fed(x)

    def __call__(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y, kv = self._attended(x, angles, *context)
        return (x + (self._fed(x) + y) if self.config.parallel else self.feed(x + y)), kv

    def _attended(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """What attention adds to the rows."""
        c = self.config
        y, kv = self.attention(x if c.norms == "after" else self.attention_norm(x), angles, *context)
        return scaled(y if c.norms == "before" else self.attention_out_norm(y), c.residual_scale), kv

    def _fed(self, x: jax.Array) -> jax.Array:
        """What the MLP adds to the rows."""
        c = self.config
        if c.norms != "after":
            x = self.attention_norm(x) if c.shared_norm else self.mlp_norm(x)
        y = self.mlp(x)
        return scaled(y if c.norms == "before" else self.mlp_out_norm(y), c.residual_scale)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Rows times a constant in their own dtype; as they are where it is 1."""
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
