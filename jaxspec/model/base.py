"""The base as one argument: a decoder bound to its frozen parameters, passed through jit as a pytree."""

from __future__ import annotations

import flax.struct
import jax

from jaxspec.model.cache import Cache
from jaxspec.model.decoder import Decoder


@flax.struct.dataclass
class Base:
    """The frozen decoder and its parameters. Pass it as an argument; never close over it.

    Attributes:
      params: the frozen parameters.
      decoder: the Flax module (static).
    """

    params: dict
    decoder: Decoder = flax.struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.decoder.config.vocab_size

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, R] to embeddings [B, R, D]."""
        return self.decoder.apply({"params": self.params}, tokens, method="embed")

    def rows(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache | None = None,
        visible: jax.Array | None = None,
        layers: tuple[int, int] | None = None,
        prefix: Cache | None = None,
        sees_prefix: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Run rows through layers; see `Decoder.rows`."""
        args = (x, positions, mask, cache, visible, layers, prefix, sees_prefix)
        return self.decoder.apply({"params": self.params}, *args, method="rows")

    def normed(self, x: jax.Array) -> jax.Array:
        """Hidden states after the final norm, [..., D]."""
        return self.decoder.apply({"params": self.params}, x, method="final_norm")

    def project(self, x: jax.Array) -> jax.Array:
        """Normalised hidden states [..., D] to float32 logits [..., V]."""
        return self.decoder.apply({"params": self.params}, x, method="project")

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [..., D] of the last layer to float32 logits [..., V]."""
        return self.project(self.normed(x))
