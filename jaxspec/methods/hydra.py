"""Hydra (Ankner et al., 2024): sequentially dependent heads. Each also reads the tokens drafted before it.

Section 3: the head at distance d reads the last hidden state and the embeddings of the d tokens on the path from the
newest token down to the one whose successor it drafts. So a tree is drafted level by level, every node's children from
that node's own path. Hydra++ (section 3.1) adds a decoder layer between base and heads, deeper heads, and the
base's own distribution as the target.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import DraftContext, Offer, PyTree
from jaxspec.decoding.levels import Parents, offer_levels
from jaxspec.errors import UserError
from jaxspec.methods.heads import Features, HeadMethod, beside, init_beside, init_layer, run_layer
from jaxspec.model.attention import Context, normalised
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.cache import Cache


@dataclasses.dataclass(frozen=True)
class Hydra(HeadMethod):
    """Settings of Hydra; Hydra++ is `prefix_attention`, `blocks=4`, `alignment=1` and `labels=0`.

    Attributes:
      prefix_attention: a decoder layer over all hidden states, whose output the heads read (Hydra++).
      prefix_norm: that layer reads states behind the base's final norm and has a norm of its own after it, as in the
        published code; else the base's final norm stands after it.
      even: the tokens' embeddings are brought to the size of the state. Off in the paper.
      bias: the blocks that read tokens, and projections that are `full`, add a bias, as in the published code.
      dropout: share of the values before every block and before the projection that an update leaves out, at random.
    """

    name: ClassVar[str] = "hydra"

    prefix_attention: bool = False
    prefix_norm: bool = False
    even: bool = True
    bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise UserError(f"hydra: dropout must be at least 0 and below 1, got {self.dropout}")
        if self.prefix_norm and not self.prefix_attention:
            raise UserError("hydra: prefix_norm is of the layer that prefix_attention adds, which is off")

    @property
    def own_layers(self) -> int:
        """The prefix attention layer."""
        return int(self.prefix_attention)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The heads, whose first blocks read states and tokens, [(d + 1) D, D], and the prefix attention layer."""
        for_heads, for_layer = jax.random.split(key)
        trainable = self.init_heads(for_heads, base, self.blocks - 1)
        for d in range(1, self.heads + 1):
            straight = init_beside(base, d)
            bias = {"bias": jnp.zeros(base.decoder.config.hidden_size)} if self.bias else {}
            trainable[f"first{d}"] = {"kernel": straight, "inner": {"kernel": jnp.zeros_like(straight), **bias}, **bias}
        if self.bias and self.lm_head == "full":
            trainable["lm_head_bias"] = jnp.zeros((self.heads, base.vocab_size))
        if self.prefix_attention:
            trainable["prefix_layer"] = init_layer(for_layer, base)
        if self.prefix_norm:
            trainable["prefix_norm"] = {"scale": jnp.ones(base.decoder.config.hidden_size)}
        return trainable

    def adapt(
        self, trainable: PyTree, base: Base, hidden: jax.Array, following: jax.Array, context: Context
    ) -> tuple[Features, Cache]:
        """Prefix attention: every hidden state looks at those before it."""
        if not self.prefix_attention:
            return super().adapt(trainable, base, hidden, following, context)
        hidden = base.normed(hidden) if self.prefix_norm else hidden
        hidden, (keys, values) = run_layer(trainable["prefix_layer"], base, hidden, context, 0)
        return (hidden,), Cache((keys,), (values,))

    def read_by_heads(self, trainable: PyTree, base: Base, features: Features) -> jax.Array:
        """The normalised states [..., D] that heads read, of the features of `adapt`."""
        if not self.prefix_norm:
            return base.normed(features[0])
        return normalised(features[0], trainable["prefix_norm"]["scale"], base.decoder.config.rms_norm_eps)

    def head(
        self, trainable: PyTree, base: Base, hidden: jax.Array, path: jax.Array, seeds: jax.Array | None = None
    ) -> jax.Array:
        """Logits [..., V'] of the head at distance d, from normalised states [..., D] and its d tokens [..., d].

        The first block reads their concatenation, R x + SiLU(L x); further ones are like Medusa's. Dropout is for an
        update, which gives `seeds` [B].
        """
        d = path.shape[-1]

        def drop(x: jax.Array, place: int) -> jax.Array:
            return _dropped(x, self.dropout, seeds, (d, place)) if self.dropout and seeds is not None else x

        x, first = drop(beside(hidden, base.embed(path), self.even), 0), trainable[f"first{d}"]
        x = _linear(first, x) + jax.nn.silu(_linear(first["inner"], x))
        x = self.residual(trainable, x[..., None, :], d - 1, before=lambda x, block: drop(x, block + 1))
        return self.project(trainable, base, drop(x, self.blocks), first=d - 1)[..., 0, :]

    def along(
        self, trainable: PyTree, base: Base, features: Features, path: jax.Array, seeds: jax.Array | None = None
    ) -> jax.Array:
        """Every head reads the path up to its distance; an update drops parts of what it reads."""
        hidden, distances = self.read_by_heads(trainable, base, features), range(1, path.shape[-1] + 1)
        return jnp.stack([self.head(trainable, base, hidden, path[..., :d], seeds) for d in distances], axis=-2)

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """Level by level along the tree: the candidates below a node come from the head that reads the node's path."""
        hidden = self.read_by_heads(context.trainable, context.base, method_state["features"])

        def expand(parents: Parents, _: Sequence[None]) -> tuple[jax.Array, None]:
            at = jnp.broadcast_to(hidden[:, None], (*parents.tokens.shape, hidden.shape[-1]))
            return self.head(context.trainable, context.base, at, parents.path), None

        return offer_levels(context, expand)


def _linear(params: PyTree, x: jax.Array) -> jax.Array:
    """x W, with b where there is one."""
    y = product(x, params["kernel"])
    return y + params["bias"] if "bias" in params else y


def _dropped(x: jax.Array, share: float, seeds: jax.Array, place: tuple[int, int]) -> jax.Array:
    """States [B, ...] without a share of their values, which the others make up for; drawn by text [B] and place."""

    def kept(seed: jax.Array) -> jax.Array:
        key = functools.reduce(jax.random.fold_in, place, jax.random.key(seed))
        return jax.random.bernoulli(key, 1 - share, x.shape[1:])

    return jnp.where(jax.vmap(kept)(seeds), x / (1 - share), 0)
