"""The frozen decoder: LLaMA and its relatives as one pure Flax Linen module.

It knows nothing of trees or methods. Rows come in as embeddings with their positions and a mask that says which
rows see each other; the cache holds everything older. Nothing is written to the cache here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.model.attention import (
    Context,
    Scoring,
    attend_packed,
    capped,
    causal_context,
    masks_of,
    normalised,
    of_layer,
    reach_of,
    unpacked,
)
from jaxspec.model.blocks import columns, product, products
from jaxspec.model.cache import Cache, usual_on_tpu
from jaxspec.model.dtypes import wide
from jaxspec.model.padding import pad_rows
from jaxspec.model.quantized import Quantized, is_quantized
from jaxspec.model.rope import rope_angles
from jaxspec.parallel.sharding import divided


@dataclasses.dataclass(frozen=True)
class Skip:
    """Parts of layers that a pass leaves out: what they would add to the rows is missing.

    Attributes:
      attention: layers without their attention.
      mlp: layers without their MLP.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()


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


def held(module: nn.Module, name: str, shape: tuple[int, ...]) -> jax.Array:
    """A module's kernel in the layout it is held in; `init` makes a plain one of this shape."""
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, nn.initializers.normal(0.02), shape)


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


def finished(config: ModelConfig, logits: jax.Array) -> jax.Array:
    """Logits [..., V] as products with a vocabulary projection leave them, scaled and capped as the base has it."""
    return capped(scaled(logits, config.logit_scale), config.logit_cap)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Rows times a constant in their own dtype; as they are where it is 1."""
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


class Decoder(nn.Module):
    """A LLaMA-style decoder. Use it functionally: `decoder.apply({"params": frozen}, ..., method="rows")`.

    Attributes:
      config: shapes and constants.
      remat: recompute activations in the backward pass.
      exact: everything but the weights is float32, and products are as exact as with weights in float32.
      least_rows: of a pass, of the whole batch together; fewer are padded (see `blocks.least_rows`).
    """

    config: ModelConfig
    remat: bool = False
    exact: bool = False
    least_rows: int = 1

    def setup(self) -> None:
        c = self.config
        layer = nn.remat(Layer) if self.remat else nn.jit(Layer)  # alike layers are traced and lowered once
        self.layers = [layer(c) for _ in range(c.num_layers)]
        self.norm = norm_of(c)
        self.lm_head = held(self, "lm_head", (c.hidden_size, c.vocab_size))
        if not c.tie_embeddings:
            self.embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, R] to embeddings [B, R, D].

        Tied models keep the one matrix as [D, V], the layout the vocabulary projection wants: gathering a
        few columns costs microseconds, a projection through [V, D] milliseconds.
        """
        c = self.config
        x = columns(self.lm_head, tokens) if c.tie_embeddings else self.embedding[tokens]
        return scaled(x.astype(jnp.float32) if self.exact else x, c.embedding_scale)

    def rows(
        self, x: jax.Array, context: Context, layers: tuple[int, int] | None = None, skip: Skip = Skip()
    ) -> tuple[jax.Array, Cache]:
        """Run rows through the layers.

        Args:
          x: [B, R, D] embeddings, or hidden states when starting above layer 0.
          context: where the rows stand and what they see.
          layers: run layers [first, last) only; default all.
          skip: what to leave out of them.

        Returns:
          Hidden states [B, R, D] before the final norm, and the rows' own keys and values, one
          [B, K, R, Dh] per layer run, None where its attention is left out; those of rows that padded the pass come
          behind them, for slices of every layer would be dear.
        """
        count = x.shape[1]
        x, context = pad_rows(x, context, self.least_rows)
        mask = context.mask
        assert mask.ndim == 4 and mask.shape[1] * mask.shape[2] == x.shape[1], (mask.shape, x.shape)
        first, last = layers or (0, self.config.num_layers)
        keys, values, masks, angles = [], [], {}, {}
        for i in range(first, last):
            window = self.config.window(i)
            local = self.config.local_rope_theta is not None and window is not None
            if window not in masks:
                masks[window] = masks_of(context, window)
            if local not in angles:
                angles[local] = rope_angles(self.config, context.positions, local, context.long)
            row_mask, cache_mask = masks[window]
            cached, prefix = of_layer(context.cache, i), of_layer(context.prefix, i)
            seen = (angles[local], row_mask, cached, cache_mask, prefix, reach_of(context, window))
            layer, k, v = self.layers[i], None, None
            x = divided(x, "batch")
            if i not in (*skip.attention, *skip.mlp):
                x, (k, v) = layer(x, *seen)
            elif i not in skip.attention:
                x, (k, v) = layer.attend(x, *seen)
            elif i not in skip.mlp:
                x = layer.feed(x)
            keys.append(k)
            values.append(v)
        return x[:, :count], Cache(tuple(keys), tuple(values))

    def final_norm(self, x: jax.Array) -> jax.Array:
        """The norm between the last layer and the vocabulary projection. [..., D]."""
        return self.norm(x)

    def project(self, x: jax.Array) -> jax.Array:
        """Normalised hidden states [..., D] to logits [..., V] in float32."""
        return finished(self.config, product(x, self.lm_head, preferred_element_type=wide(x)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [B, T, V] of whole sequences [B, T] without a cache: the plain forward pass."""
        x, _ = self.rows(self.embed(tokens), causal_context(*tokens.shape))
        return self.project(self.final_norm(x))


@functools.lru_cache(maxsize=16)
def abstract_params(config: ModelConfig, dtype: str | jnp.dtype = "float32") -> dict:
    """Shapes and dtypes of the parameters."""

    def typed(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.ShapeDtypeStruct(x.shape, param_dtype(name, dtype))

    one_layer = Decoder(dataclasses.replace(config, num_layers=1))
    params = jax.eval_shape(one_layer.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    layer = params.pop("layers_0")  # they are all alike, and tracing dozens takes time
    params |= {f"layers_{i}": layer for i in range(config.num_layers)}
    return jax.tree.map_with_path(typed, params)


def for_products(params: Any, dtype: jnp.dtype) -> Any:
    """A pytree of parameters as products in `dtype` take them; norms and quantized kernels stay as they are."""

    def typed(path: tuple, x: jax.Array | Quantized) -> jax.Array | Quantized:
        return x if is_quantized(x) or "norm" in jax.tree_util.keystr(path) else x.astype(dtype)

    return jax.tree.map_with_path(typed, params, is_leaf=is_quantized)


def param_dtype(path: str, dtype: str | jnp.dtype) -> jnp.dtype:
    """dtype of one parameter of weights in `dtype`: norms are float32."""
    return jnp.dtype("float32" if "norm" in path else dtype)
