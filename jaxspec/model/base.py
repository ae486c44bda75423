"""The base as one argument: a decoder bound to its frozen parameters, passed through jit as a pytree."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.model.attention import Context
from jaxspec.model.blocks import fewer_columns, product
from jaxspec.model.cache import Cache
from jaxspec.model.decoder import Decoder, Skip, finished
from jaxspec.model.dtypes import wide
from jaxspec.model.quantized import Quantized


@flax.struct.dataclass
class DraftVocabulary:
    """The tokens that may be drafted, where these are not all: a smaller projection, and candidates are mapped back.

    Attributes:
      ids: [V'] int32.
      columns: [D, V'], their part of the vocabulary projection, quantized where that is.
    """

    ids: jax.Array
    columns: jax.Array | Quantized


@flax.struct.dataclass
class Base:
    """The frozen decoder and its parameters. Pass it as an argument; never close over it.

    Attributes:
      params: the frozen parameters.
      decoder: the Flax module (static).
      draft_vocabulary: what may be drafted; None: every token. The base's own logits never depend on it.
      text_lengths: [B] int32, tokens that the texts of a batch will have, prompt and answer together; None: as many as
        a pass holds.
    """

    params: dict
    decoder: Decoder = flax.struct.field(pytree_node=False)
    draft_vocabulary: DraftVocabulary | None = None
    text_lengths: jax.Array | None = None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.decoder.config.vocab_size

    @property
    def num_drafts(self) -> int:
        """V', tokens that may be drafted."""
        return self.vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary.ids)

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of hidden states, caches and, unless the decoder is `exact`, weights (norms are float32)."""
        return jnp.dtype("float32") if self.decoder.exact else self.params["lm_head"].dtype

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, R] to embeddings [B, R, D]."""
        return self.decoder.apply({"params": self.params}, tokens, method="embed")

    def rows(
        self, x: jax.Array, context: Context, layers: tuple[int, int] | None = None, skip: Skip = Skip()
    ) -> tuple[jax.Array, Cache]:
        """Run rows through layers; see `Decoder.rows`. Keys and values are those of the rows alone."""
        hidden, kv = self.padded_rows(x, context, layers, skip)
        return hidden, jax.tree.map(lambda a: a[:, :, : x.shape[1]], kv)

    def padded_rows(
        self, x: jax.Array, context: Context, layers: tuple[int, int] | None = None, skip: Skip = Skip()
    ) -> tuple[jax.Array, Cache]:
        """Run rows through layers; see `Decoder.rows`. Keys and values of padding may follow those of the rows."""
        if context.long is None and self.long is not None:
            context = context.replace(long=self.long)
        return self.decoder.apply({"params": self.params}, x, context, layers, skip, method="rows")

    def for_texts(self, lengths: jax.Array) -> Base:
        """This base for a batch of texts that will be so long, prompt and answer together: lengths [B] int32.

        Where rotary frequencies depend on it, they are chosen once per text: those of keys in a cache cannot change.
        A draft model chooses its own.
        """
        return self.replace(text_lengths=lengths)

    @property
    def long(self) -> jax.Array | None:
        """[B] bool, texts that will be longer than the original context; None unless frequencies depend on it."""
        scaling = self.decoder.config.rope_scaling
        if self.text_lengths is None or scaling is None or scaling.kind != "longrope":
            return None
        return self.text_lengths > scaling.original_max_positions

    def normed(self, x: jax.Array) -> jax.Array:
        """Hidden states after the final norm, [..., D]."""
        return self.decoder.apply({"params": self.params}, x, method="final_norm")

    def project(self, x: jax.Array) -> jax.Array:
        """Normalised hidden states [..., D] to float32 logits [..., V]."""
        return self.decoder.apply({"params": self.params}, x.astype(self.dtype), method="project")

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [..., D] of the last layer to float32 logits [..., V]."""
        return self.project(self.normed(x))

    def drafting(self, ids: jax.Array) -> Base:
        """This base with a draft vocabulary: ids [V'] int32."""
        return self.replace(draft_vocabulary=DraftVocabulary(ids, _projection(self.params["lm_head"], ids)))

    def draft_logits(self, x: jax.Array) -> jax.Array:
        """Normalised hidden states [..., D] to float32 logits of the tokens that may be drafted, [..., V']."""
        if self.draft_vocabulary is None:
            return self.project(x)
        return self.finished(self.draft_products(x))

    def draft_products(self, x: jax.Array) -> jax.Array:
        """The same before logits are scaled and capped."""
        kernel = self.params["lm_head"] if self.draft_vocabulary is None else self.draft_vocabulary.columns
        return product(x.astype(self.dtype), kernel, preferred_element_type=wide(x))

    def finished(self, logits: jax.Array) -> jax.Array:
        """Products with a vocabulary projection as logits: scaled and capped as the base's own are."""
        return finished(self.decoder.config, logits)

    def draft_part(self, x: jax.Array) -> jax.Array:
        """The part for tokens that may be drafted: [..., V] to [..., V']."""
        return x if self.draft_vocabulary is None else x[..., self.draft_vocabulary.ids]

    def draft_whole(self, x: jax.Array, fill: float) -> jax.Array:
        """[..., V'] to [..., V], with a value for the tokens that may not be drafted."""
        if self.draft_vocabulary is None:
            return x
        return jnp.full((*x.shape[:-1], self.vocab_size), fill, x.dtype).at[..., self.draft_vocabulary.ids].set(x)

    def draft_ids(self, index: jax.Array) -> jax.Array:
        """Places in the draft vocabulary to token ids."""
        return index if self.draft_vocabulary is None else self.draft_vocabulary.ids[index]

    def draft_places(self, tokens: jax.Array) -> jax.Array:
        """Token ids to places in the draft vocabulary; -1 for those that may not be drafted."""
        if self.draft_vocabulary is None:
            return tokens
        ids = self.draft_vocabulary.ids
        return jnp.full(self.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids)))[tokens]


@jax.jit
def _projection(lm_head: jax.Array | Quantized, ids: jax.Array) -> jax.Array | Quantized:
    """The columns [D, V'] of some tokens [V']."""
    return fewer_columns(lm_head, ids)
