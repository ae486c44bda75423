"""A decoder layer whose rows see a context that has keys and values alone: DFlash's, which may start as the base's."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.errors import UserError
from jaxspec.methods.block_convolution import BlockConvolution
from jaxspec.model.attention import attend
from jaxspec.model.layers import MLP, Linear, RMSNorm
from jaxspec.model.rope import rotate
from jaxspec.parallel.sharding import divided


class DraftLayer(nn.Module):
    """A decoder layer whose rows see a context by keys and values that its own projections make of it.

    Queries, and keys with values, are two products: the context has no queries.

    Attributes:
      config: shapes.
      taps: of the convolutions over a block's rows around attention and MLP; 0: there are none.
      group: channels that share a part of their weights.
    """

    config: ModelConfig
    taps: int = 0
    group: int = 16

    def setup(self) -> None:
        c = self.config
        self.q = Linear(c.num_heads * c.head_dim, c.qkv_bias)
        self.kv = Linear(2 * c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o = Linear(c.hidden_size, c.o_bias)
        self.mlp = MLP(c)
        self.attention_norm, self.mlp_norm = RMSNorm(c.rms_norm_eps), RMSNorm(c.rms_norm_eps)
        if c.head_norms:
            self.q_norm, self.k_norm = RMSNorm(c.rms_norm_eps), RMSNorm(c.rms_norm_eps)
        if self.taps:
            self.attention_conv = BlockConvolution(c.hidden_size, self.taps, self.group)
            self.mlp_conv = BlockConvolution(c.hidden_size, self.taps, self.group)

    def keys_values(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normalised states [B, R, D] to rotated keys and values, [B, R, K, Dh]."""
        kv = self.kv(x).reshape(*x.shape[:2], self.config.num_kv_heads, 2, -1)
        k, v = kv[..., 0, :], kv[..., 1, :]
        return rotate(self.k_norm(k) if self.config.head_norms else k, angles, self.config.rotary_factor), v

    def remember(self, context: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, K, T, Dh] of context [B, T, D], which is normalised already."""
        k, v = self.keys_values(context, angles)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def __call__(self, x: jax.Array, angles: jax.Array, mask: jax.Array, *context: tuple | jax.Array) -> jax.Array:
        """Rows [B, R, D] after the layer; what `attend` takes after q, k and v is `mask` [B, G, R / G, R / G] and more.

        Convolutions are over the R / G rows of a block.
        """

        def attention(y: jax.Array) -> jax.Array:
            q = self.q(y).reshape(*x.shape[:2], self.config.num_heads, -1)
            q = rotate(self.q_norm(q) if self.config.head_norms else q, angles, self.config.rotary_factor)
            return self.o(attend(q, *self.keys_values(y, angles), mask, *context).reshape(*x.shape[:2], -1))

        if not self.taps:
            x = divided(x + attention(self.attention_norm(x)), "batch")
            return x + self.mlp(self.mlp_norm(x))
        rows = mask.shape[-1]
        x = divided(x + self.attention_conv(self.attention_norm(x), attention, rows), "batch")
        return x + self.mlp_conv(self.mlp_norm(x), self.mlp, rows)


def checked_width(method: str, shapes: ModelConfig, config: ModelConfig) -> ModelConfig:
    """Shapes of a method's own layers on a base of the shapes `config`. Raises UserError for another width."""
    if shapes.hidden_size != config.hidden_size:
        raise UserError(f"{method}: its width must be the base's {config.hidden_size}, got {shapes.hidden_size}")
    return shapes


def check_plain(method: str, config: ModelConfig, shapes: ModelConfig | None = None) -> None:
    """Raise UserError for a base whose layers a method's own cannot start as copies of.

    Args:
      method: its name.
      config: shapes of the base, whose layers must be of LLaMA's shape.
      shapes: of the method's own layers; None: the base's.
    """
    if config != config.plain_layers():
        raise UserError(f"{method}: its layers cannot start as this base's, which have another shape; use start random")
    if shapes not in (None, config):
        raise UserError(f"{method}: layers of other shapes than the base's cannot start as these; use start random")


def copied_layer(c: ModelConfig, params: PyTree) -> PyTree:
    """A layer of the base as that of a `DraftLayer`: its one product for queries, keys and values is taken apart."""

    def part(leaf: jax.Array, rows: slice) -> jax.Array:  # [..., K * (H / K + 2) * Dh]
        heads = leaf.reshape(*leaf.shape[:-1], c.num_kv_heads, -1, c.head_dim)[..., rows, :]
        return heads.reshape(*leaf.shape[:-1], -1)

    qkv, split = params["attention"]["qkv"], c.num_heads // c.num_kv_heads
    return {
        "q": {name: part(leaf, slice(None, split)) for name, leaf in qkv.items()},
        "kv": {name: part(leaf, slice(split, None)) for name, leaf in qkv.items()},
        **{name: leaf for name, leaf in params["attention"].items() if name != "qkv"},
        **{name: params[name] for name in ("mlp", "attention_norm", "mlp_norm")},
    }
