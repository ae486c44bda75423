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
    attend_packed,
    causal_context,
    masks_of,
    normalised,
    of_layer,
    reach_of,
    unpacked,
)
from jaxspec.model.blocks import columns, product, products, wide
from jaxspec.model.cache import Cache, usual_on_tpu
from jaxspec.model.padding import pad_rows
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


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return normalised(x, scale, self.epsilon)


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
        self.o = Linear(c.hidden_size)
        if c.head_norms:
            self.q_norm, self.k_norm = Scale(c.head_dim), Scale(c.head_dim)

    def queries_keys_values(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalised states [B, R, D] to rotated queries [B, R, H, Dh], rotated keys and values [B, R, K, Dh]."""
        return unpacked(*self._packed(x), angles, self.config.rms_norm_eps)

    def __call__(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, k, v = attend_packed(*self._packed(x), angles, self.config.rms_norm_eps, *context)
        return self.o(out), (k, v)

    def _packed(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """[B, R, K, H/K + 2, Dh], and the scales of the norms of queries and keys."""
        K, Dh = self.config.num_kv_heads, self.config.head_dim
        qkv = usual_on_tpu(self.qkv(x))  # or the kernel would be copied into another layout
        return qkv.reshape(*x.shape[:2], K, -1, Dh), (self.q_norm(), self.k_norm()) if self.config.head_norms else ()


class LinearPair(nn.Module):
    """Two linear maps of the same rows in one product: kernel [2, in, out]."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [2, ..., out]."""
        return products(x, held(self, "kernel", (2, x.shape[-1], self.features)))


class MLP(nn.Module):
    """The gated feed-forward block: two products, or one where the parameters hold `gate_up` (see `holds_pairs`)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = self.config.intermediate_size
        if self.has_variable("params", "gate_up"):
            gate, up = LinearPair(width, name="gate_up")(x)
        else:
            gate, up = (Linear(width, name=name)(x) for name in ("gate", "up"))
        return Linear(self.config.hidden_size, name="down")(nn.silu(gate) * up)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each normalised before and added back."""

    config: ModelConfig

    def setup(self) -> None:
        self.attention_norm, self.mlp_norm = (RMSNorm(self.config.rms_norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(self.config), MLP(self.config)

    def attend(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The first half; with the rows' keys and values."""
        y, kv = self.attention(self.attention_norm(x), angles, *context)
        return x + y, kv

    def feed(self, x: jax.Array) -> jax.Array:
        """The second half."""
        return x + self.mlp(self.mlp_norm(x))

    def __call__(
        self, x: jax.Array, angles: jax.Array, *context: tuple | jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, kv = self.attend(x, angles, *context)
        return self.feed(x), kv


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
        self.norm = RMSNorm(c.rms_norm_eps)
        self.lm_head = held(self, "lm_head", (c.hidden_size, c.vocab_size))
        if not c.tie_embeddings:
            self.embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, R] to embeddings [B, R, D].

        Tied models keep the one matrix as [D, V], the layout the vocabulary projection wants: gathering a
        few columns costs microseconds, a projection through [V, D] milliseconds.
        """
        x = columns(self.lm_head, tokens) if self.config.tie_embeddings else self.embedding[tokens]
        return x.astype(jnp.float32) if self.exact else x

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
        angles = rope_angles(self.config, context.positions)
        keys, values, masks = [], [], {}
        for i in range(first, last):
            window = self.config.window(i)
            if window not in masks:
                masks[window] = masks_of(context, window)
            row_mask, cache_mask = masks[window]
            cached, prefix = of_layer(context.cache, i), of_layer(context.prefix, i)
            seen = (angles, row_mask, cached, cache_mask, prefix, reach_of(context, window))
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
        return product(x, self.lm_head, preferred_element_type=wide(x))

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
    """A pytree of float parameters as products in `dtype` take them; norms stay as they are."""

    def typed(path: tuple, x: jax.Array) -> jax.Array:
        return x if "norm" in jax.tree_util.keystr(path) else x.astype(dtype)

    return jax.tree.map_with_path(typed, params)


def param_dtype(path: str, dtype: str | jnp.dtype) -> jnp.dtype:
    """dtype of one parameter of weights in `dtype`: norms are float32."""
    return jnp.dtype("float32" if "norm" in path else dtype)
