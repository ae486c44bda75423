"""The control of Hidden Transfer's Figure 3: tokens ahead, read off middle layers by projections of their own."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Facts, Method
from jaxspec.methods.losses import future_loss
from jaxspec.model.base import Base
from jaxspec.model.rows import read_layers


@dataclasses.dataclass(frozen=True)
class EarlyExit(Method):
    """One vocabulary projection per distance, trained on a layer's hidden state. It predicts and does not draft.

    Attributes:
      layers: the layer read for each distance.
    """

    name: ClassVar[str] = "early_exit"
    adjustable: ClassVar[tuple[str, ...]] = ()

    layers: tuple[int, ...] = (10, 14, 18)

    def facts(self, config: ModelConfig) -> Facts:
        """A projection per distance."""
        return Facts(len(self.layers), adapter="trained")

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """M projections [D, V], each a copy of the base's."""
        return {f"head{d}": base.params["lm_head"].astype(jnp.float32) for d in range(1, len(self.layers) + 1)}

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] at every insertion point."""
        return self._logits(trainable, base, batch)[1]

    def _logits(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Final hidden states of the text [B, T, D], and the logits."""
        frozen, _, read = read_layers(base, batch.tokens, self.layers)
        rows = jnp.arange(batch.tokens.shape[0])[:, None]
        heads = [
            base.normed(read[layer][rows, batch.points]) @ trainable[f"head{d}"]
            for d, layer in enumerate(self.layers, 1)
        ]
        return frozen, jnp.stack(heads, axis=2)

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Divergence from the base's own distribution, averaged over all targets."""
        frozen, student = self._logits(trainable, base, batch)
        return future_loss(student, base, frozen, batch, range(1, len(self.layers) + 1))
