"""A draft model (Leviathan et al., 2023; Chen et al., 2023): a second, smaller base drafts what the base verifies.

It reads the text as the base does, into a cache of its own: after every step the accepted tokens and the newest one, in
one pass, whose last row says what may come next. Every further level of the draft takes a pass over the candidates that
are followed. Their keys and values live only while a draft is made.

    observe   |t0 t1 t2 t3 t4| r            the text, and the newest token: the draft model's first prediction
    level 1    t0 t1 t2 t3 t4  r | a b      a pass over the candidates at distance 1 that are followed
    level 2    t0 t1 t2 t3 t4  r   a b | c  and so on; each row sees the text, its own path, and itself

The draft model is any base with the same tokens (`--draft-model`), or is made from the base: some of its layers,
distilled on the base's own answers, with the base's own embeddings and vocabulary projection. Vocabularies may be
padded to different sizes: ids that only one of them has are not drafted. Beyond the papers a draft may be a tree, and
where drafts are chosen per step the draft model stops once no path is probable enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Offer, PyTree
from jaxspec.decoding.levels import Parents, offer_levels
from jaxspec.decoding.method import Batch, Facts, Finalized, Method, ReadChunk, check_least
from jaxspec.errors import UserError
from jaxspec.methods.losses import check_weights, future_loss
from jaxspec.model.attention import Context, causal_context, continued_context
from jaxspec.model.base import Base, DraftVocabulary
from jaxspec.model.blocks import columns
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.decoder import Decoder, param_dtype
from jaxspec.model.quantized import Quantized, dense, is_quantized

_EMBEDDINGS = ("embedding", "lm_head")


@dataclasses.dataclass(frozen=True)
class DraftModel(Method):
    """Settings of a draft model.

    Attributes:
      length: M, tokens of a draft at most.
      layers: of the base, which the draft model begins as; its embeddings stay the base's own.
      shapes: of a draft model that is another base and shares nothing; None: it is made of the base's layers.
      confidence: where drafts are chosen per step, paths less probable than this are not followed; fixed trees are
        always filled.
      beam: where drafts are chosen per step, paths followed on every level.
      alignment: weight in the loss of the divergence from the base's own distribution.
      labels: weight of the cross-entropy of the text.
    """

    name: ClassVar[str] = "draft_model"
    kernels: ClassVar[tuple[str, ...]] = ("kernel", "lm_head")
    adjustable: ClassVar[tuple[str, ...]] = ("confidence", "beam")

    length: int = 8
    layers: tuple[int, ...] = (0,)
    shapes: ModelConfig | None = None
    confidence: float = 0.3
    beam: int = 1
    alignment: float = 1.0
    labels: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", _shapes(self.shapes))
        check_least(self, length=1, beam=1)
        if not 0 < self.confidence < 1:
            raise UserError(f"draft_model: confidence must be between 0 and 1, got {self.confidence}")
        if not self.layers or list(self.layers) != sorted({*self.layers}):
            raise UserError(
                f"draft_model: layers must be different and in ascending order, got {', '.join(map(str, self.layers))}"
            )
        check_weights(self.name, self.alignment, self.labels)

    def facts(self, config: ModelConfig) -> Facts:
        """It drafts as far as it is asked to; other bases come without a tree."""
        layers = len(self.layers) if self.shapes is None else self.shapes.num_layers
        return Facts(
            distances=self.length,
            default_candidates=min(self.length, 4),
            own_layers=self.length * layers,
            reads_late=True,
            adapter="trained",
        )

    # What the draft model is

    def config(self, base: Base) -> ModelConfig:
        """The draft model's shapes. Raises UserError for layers that the base lacks."""
        c = base.decoder.config
        if self.shapes is not None:
            return self.shapes
        if not 0 <= self.layers[0] <= self.layers[-1] < c.num_layers:
            outside = ", ".join(map(str, self.layers))
            raise UserError(f"draft_model: layers must be among 0 to {c.num_layers - 1} of this base, got {outside}")
        return c.of_layers(self.layers)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The base's layers and final norm, or random parameters of the `shapes`.

        Raises UserError for layers that the base lacks, or for shapes of another vocabulary, which cannot be trained.
        """
        config = self.config(base)
        if self.shapes is not None:
            if config.vocab_size != base.vocab_size:
                raise UserError(
                    f"draft_model: it has a vocabulary of {config.vocab_size} tokens and the base one of "
                    f"{base.vocab_size}; both must have the same"
                )
            return Decoder(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        kept = {f"layers_{i}": base.params[f"layers_{layer}"] for i, layer in enumerate(self.layers)}
        return jax.tree.map(lambda x: x.astype(jnp.float32), dense(kept) | {"norm": base.params["norm"]})

    def as_draft_model(self, trainable: PyTree, base: Base) -> Base:
        """The draft model; where it is made of the base's layers, with the base's embeddings."""
        params, vocabulary = dict(trainable), base.draft_vocabulary
        own_columns = params.pop("columns", None)
        if own_columns is not None:
            vocabulary = DraftVocabulary(vocabulary.ids, own_columns)
        if self.shapes is None:
            params |= {name: base.params[name] for name in _EMBEDDINGS if name in base.params}
        return Base(params, base.decoder.clone(config=self.config(base)), vocabulary, base.text_lengths)

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """Parameters in the base's dtype, with a part of its own projection where few tokens may be drafted."""
        weights = base.params["lm_head"].dtype

        def typed(path: tuple, x: jax.Array | Quantized) -> jax.Array | Quantized:
            if is_quantized(x):
                return x.replace(kind=jnp.dtype(weights).name)
            return x.astype(param_dtype(jax.tree_util.keystr(path, simple=True, separator="/"), weights))

        params = jax.tree.map_with_path(typed, trainable, is_leaf=is_quantized)
        if self.shapes is not None and base.draft_vocabulary is not None:
            params |= {"columns": columns(params["lm_head"], base.draft_vocabulary.ids).T}
        return params

    def finalize(self, trainable: PyTree, base: Base) -> Finalized:
        """The adapter, which together with the base's embeddings is a base."""
        return Finalized(self, trainable, base, self.as_draft_model(trainable, base))

    def draft_logits(self, model: Base, base: Base, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] of the draft model to float32 logits [..., V'] of the tokens that the base may draft.

        Of those that the draft model lacks they are -inf.
        """
        logits, own, all_tokens = model.draft_logits(model.normed(hidden)), model.vocab_size, base.vocab_size
        if own == all_tokens:
            return logits
        if base.draft_vocabulary is not None:
            return jnp.where(base.draft_vocabulary.ids < own, logits, -jnp.inf)
        lacking = [(0, 0)] * (logits.ndim - 1) + [(0, max(all_tokens - own, 0))]
        return jnp.pad(logits[..., :all_tokens], lacking, constant_values=-jnp.inf)

    def readable(self, model: Base, tokens: jax.Array) -> jax.Array:
        """The base's tokens as the draft model can read them: one that it lacks becomes its last one."""
        return jnp.minimum(tokens, model.vocab_size - 1)

    # Training

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] at every insertion point: those at distance d have read the d tokens before."""
        return self._predictions(trainable, base, batch, self.length)

    def _predictions(self, trainable: PyTree, base: Base, batch: Batch, count: int) -> jax.Array:
        model, (B, T) = self.as_draft_model(trainable, base), batch.tokens.shape
        hidden, _ = model.rows(model.embed(batch.tokens), causal_context(B, T))
        read = jnp.minimum(batch.points[..., None] + 1 + jnp.arange(count), T - 1)  # [B, G, M']
        return model.draft_logits(model.normed(hidden[jnp.arange(B)[:, None, None], read]))

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Distillation behind every insertion point: what the base says there, or the text, as the weights are."""
        frozen, _ = base.rows(base.embed(batch.tokens), causal_context(*batch.tokens.shape))
        student = self._predictions(trainable, base, batch, 1)
        return future_loss(student, base, frozen, batch, [1], self.alignment, self.labels)

    # Decoding

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The draft model's cache, with room for the newest token, and its hidden state [B, D] there."""
        config = self.config(base)
        cache = empty_cache(config, batch, capacity + 1, base.dtype)
        return {"cache": cache, "newest": jnp.zeros((batch, config.hidden_size), base.dtype)}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Read what the base has read, and the token after it."""
        model, cache = self.as_draft_model(context.trainable, context.base), method_state["cache"]
        read = continued_context(cache, chunk.first, chunk.tokens.shape[1])
        hidden, rows = model.rows(model.embed(self.readable(model, chunk.tokens)), read)
        newest = hidden[jnp.arange(len(hidden)), chunk.length]
        return {
            "cache": commit(cache, rows, chunk.first),
            "newest": chunk.updated(newest, method_state["newest"]),
        }

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """Level by level: along the fixed tree, or along the most probable paths while they are probable enough."""
        model, cache = self.as_draft_model(context.trainable, context.base), method_state["cache"]
        position = context.position[:, None]

        def logits(hidden: jax.Array) -> jax.Array:
            return self.draft_logits(model, context.base, hidden)

        def expand(parents: Parents, levels: Sequence[Cache | None]) -> tuple[jax.Array, Cache | None]:
            """`levels` holds keys and values of the nodes that expanded at each but the first, L x [B, K, W, Dh]."""
            if parents.level == 0:
                return logits(method_state["newest"][:, None]), None
            B, W = parents.tokens.shape
            sees_itself = jnp.broadcast_to(jnp.eye(W, dtype=bool), (B, 1, W, W))
            at = jnp.broadcast_to(position + parents.level, (B, W))
            rows_context = Context(at, sees_itself, cache, position + 1, *_path(parents, levels[1:]))
            hidden, rows = model.rows(model.embed(parents.tokens), rows_context)
            return logits(hidden), rows

        if context.fixed:
            offer = offer_levels(context, expand)
        else:  # of the tree only how many nodes of each level expand
            inner = (1, *[self.beam] * (min(context.depth, self.length) - 1))
            wide = context.replace(tree=context.tree.replace(inner=inner))
            offer = offer_levels(wide, expand, best=True, confidence=self.confidence)
        levels = jnp.any(offer.known, axis=(0, 2))  # those that a pass has made, the first of which `observe` has
        return offer.replace(passes=jnp.broadcast_to(jnp.sum(levels), len(context.root)))


def _path(parents: Parents, levels: Sequence[Cache]) -> tuple[Cache | None, jax.Array | None]:
    """Keys and values of the levels between the newest token and some nodes, and which lie on each node's path."""
    if not levels:
        return None, None
    places = jnp.moveaxis(parents.ancestors[..., 1:], -1, 0)
    seen = [jax.nn.one_hot(at, rows.keys[0].shape[2], dtype=bool) for at, rows in zip(places, levels, strict=True)]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=2), *levels), jnp.concatenate(seen, axis=-1)


def _shapes(given: ModelConfig | dict | None) -> ModelConfig | None:
    """Shapes as they are, or as JSON holds them."""
    return ModelConfig.from_json(given) if isinstance(given, dict) else given
