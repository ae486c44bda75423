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
    capped,
    causal_context,
    masks_of,
    of_layer,
    reach_of,
)
from jaxspec.model.blocks import columns, product
from jaxspec.model.cache import Cache
from jaxspec.model.dtypes import wide
from jaxspec.model.layers import Layer, held, norm_of, scaled
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


def finished(config: ModelConfig, logits: jax.Array) -> jax.Array:
    """Logits [..., V] as products with a vocabulary projection leave them, scaled and capped as the base has it."""
    return capped(scaled(logits, config.logit_scale), config.logit_cap)


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
