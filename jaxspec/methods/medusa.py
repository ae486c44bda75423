"""Medusa (Cai et al., 2024): independent heads on the last hidden state.

Head k of section 2.1.1 is a residual SiLU block and a vocabulary projection; it starts as the base's own next-token
prediction. This is Medusa-1: the base stays frozen.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import PyTree
from jaxspec.methods.heads import Features, HeadMethod
from jaxspec.model.base import Base


@dataclasses.dataclass(frozen=True)
class Medusa(HeadMethod):
    """Settings; those of `HeadMethod` are all there are.

    Head k counts 0.8^k in the loss (2.2.1), up to a constant factor.
    """

    name: ClassVar[str] = "medusa"

    decay: float = 0.8

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The heads: blocks of zeros and their projections."""
        return self.init_heads(key, base, self.blocks)

    def predict(self, trainable: PyTree, base: Base, features: Features, count: int) -> jax.Array:
        """p_k = softmax(W2 (SiLU(W1 h) + h)), section 2.1.1."""
        [hidden] = features
        x = jnp.broadcast_to(base.normed(hidden)[..., None, :], (*hidden.shape[:-1], count, hidden.shape[-1]))
        return self.project(trainable, base, self.residual(trainable, x))
