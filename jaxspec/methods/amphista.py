"""Amphista (2024): bi-directionally dependent heads on states adapted in stages.

Section 3.1: two causal decoder layers with caches of their own adapt the base's hidden state and the embedding of the
token sampled from it; the first half of the heads reads the first layer, the second half the second. Section 3.2: the
auto-embedding block lets all heads look at each other before each projects to the vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import check_least
from jaxspec.errors import UserError
from jaxspec.methods.heads import Features, HeadMethod, beside, init_beside, init_layer, run_layer
from jaxspec.model.attention import Context
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.cache import Cache
from jaxspec.model.layers import Attention, RMSNorm


@dataclasses.dataclass(frozen=True)
class Amphista(HeadMethod):
    """Settings; the variants of Tables 4 and 5 are these options, and Medusa is what is left without any.

    The paper does not give the weights of its two losses (equation 7); both default to 1.

    Attributes:
      adaptation_layers: 2 in stages; 1 for all heads ("One-Adaptation-Layer"); 0 ("w/o Staged-Adaptation"), which
        leaves no place for the sampled token either.
      sampled_token: the adaptation layers read the embedding of the token sampled from the state.
      position_encoding: a learned vector per head before the self-attention (equation 4).
      self_attention_layers: of the auto-embedding block; 0 leaves it out, 2 is Amphista-alpha (A.2.3).
      even: the sampled token's embedding is brought to the size of the state. Off in the paper.
    """

    name: ClassVar[str] = "amphista"

    alignment: float = 1.0
    adaptation_layers: int = 2
    sampled_token: bool = True
    position_encoding: bool = True
    self_attention_layers: int = 1
    even: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptation_layers not in (0, 1, 2):
            raise UserError(f"amphista: adaptation_layers must be 0, 1 or 2, got {self.adaptation_layers}")
        if self.adaptation_layers == 2 and self.heads < 2:
            raise UserError("amphista: two adaptation layers need at least 2 heads, got 1")
        check_least(self, self_attention_layers=0)

    @property
    def own_layers(self) -> int:
        """The adaptation layers."""
        return self.adaptation_layers

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """Adaptation layers with their input matrices, heads, head positions [K, D] and self-attention layers."""
        c = base.decoder.config
        for_heads, for_stages, for_attention = jax.random.split(key, 3)
        trainable = self.init_heads(for_heads, base, self.blocks)
        for i in range(1, self.adaptation_layers + 1):
            layer = init_layer(jax.random.fold_in(for_stages, i), base)
            trainable[f"stage{i}"] = {"kernel": init_beside(base, int(self.sampled_token)), "layer": layer}
        if self.position_encoding and self.self_attention_layers:
            trainable["positions"] = jnp.zeros((self.heads, c.hidden_size))
        for i in range(self.self_attention_layers):
            x = jnp.zeros((1, self.heads, c.hidden_size))
            params = SelfAttention(c.plain_layers()).init(jax.random.fold_in(for_attention, i), x)["params"]
            params["attention"]["o"] = jax.tree.map(jnp.zeros_like, params["attention"]["o"])
            trainable[f"self_attention{i + 1}"] = params
        return trainable

    # Section 3.1: staged adaptation layers

    def adapt(
        self, trainable: PyTree, base: Base, hidden: jax.Array, following: jax.Array, context: Context
    ) -> tuple[Features, Cache]:
        """h^i = layer_i(fc_i([h^(i-1); e])), e the embedding of the sampled token (equation 1)."""
        features, keys, values = [], (), ()
        sampled = base.embed(following)[..., None, :]  # [B, R, 1, D]
        for i in range(self.adaptation_layers):
            stage = trainable[f"stage{i + 1}"]
            x = beside(hidden, sampled, self.even) if self.sampled_token else hidden
            hidden, (k, v) = run_layer(stage["layer"], base, product(x, stage["kernel"]), context, i)
            features, keys, values = [*features, hidden], (*keys, k), (*values, v)
        return tuple(features) or (hidden,), Cache(keys, values)

    # Section 3.2: the auto-embedding block

    def predict(self, trainable: PyTree, base: Base, features: Features, count: int) -> jax.Array:
        """MLPs on their stage's state (2), positions (4), self-attention over the heads (5), projections (6).

        The MLPs are Medusa's residual blocks, and the self-attention is normalised before and added to its input, so
        that the block starts as nothing.
        """
        stages = [base.normed(x) for x in features]
        x = jnp.stack([stages[0 if k < self.heads // 2 else -1] for k in range(self.heads)], axis=-2)  # [..., K, D]
        x = self.residual(trainable, x)
        if "positions" in trainable:
            x = x + trainable["positions"]
        heads = x.reshape(-1, *x.shape[-2:])
        for i in range(self.self_attention_layers):
            heads = SelfAttention(base.decoder.config.plain_layers()).apply(
                {"params": trainable[f"self_attention{i + 1}"]}, heads
            )
        return self.project(trainable, base, heads.reshape(x.shape)[..., :count, :])


class SelfAttention(nn.Module):
    """Bi-directional self-attention over the heads, added to its input. Positions are not rotated: they are learned."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[X, K, D] to [X, K, D]."""
        c, (X, K, _) = self.config, x.shape
        angles, everyone = jnp.zeros((X, K, c.rotary_size // 2)), jnp.ones((X, 1, K, K), bool)
        normed = RMSNorm(c.rms_norm_eps, name="norm")(x)
        return x + Attention(c, name="attention")(normed, angles, everyone)[0]
