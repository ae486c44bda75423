"""Behind the rows of a block: what makes a candidate depend on the one before it, and how far a draft may be trusted.

    h, a row's state; t, the token before the one that it predicts
    logits(h)                                                        DFlash: all candidates of a row, whatever t is
    + before(t) @ after                                              DSpark: a Markov term, of all tokens
    + (before[t] * (h @ state)) . candidate[c]                       DFlash 2: a selector, of the row's best tokens c
    sigmoid([h, before(t)] @ kernel + bias)                          DSpark: the chance that a token drawn is taken

The Markov term and the selector begin as zero, the chance as .98 of every row. Where either of the first two is there,
drafts are made level by level. What a method says for itself is how the rows of a block come to their states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.arrays import best_of
from jaxspec.decoding.draft import DraftContext, Offer, PyTree, offer_ranked
from jaxspec.decoding.levels import Parents, offer_levels
from jaxspec.decoding.method import Batch, Method, check_decay, check_least
from jaxspec.errors import UserError
from jaxspec.methods.block_selector import reranked
from jaxspec.methods.losses import check_weights, future_loss, overlap, targets
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.dtypes import wide

_SURE = 4.0  # log-odds that a confidence head begins with


@dataclasses.dataclass(frozen=True)
class BlockHeads(Method):
    """Settings of what stands behind the rows of a block; `DFlash` has the rest.

    Attributes:
      vocabulary: V', learn to draft only so many of the base's most frequent tokens; 0: all.
      markov_rank: r of the Markov term; 0 leaves it out.
      markov_tables: its factors are tables with a row and a column for every token, as in DSpark; else matrices that
        stand between the base's embeddings and its vocabulary projection, which are much smaller.
      selector_rank: r of the selector, two tables with a row for every token; 0 leaves it out.
      selector_width: how many of a row's best tokens it ranks anew. The others stay behind these.
      confidence_head: what tells the chance that rejection sampling takes a token drawn from the row at temperature 1:
        the row's state, or also the Markov term's row for the token before. Where drafts are chosen per step it is a
        factor of the chances of all candidates of the row.
      alignment: weight in the loss of the divergence from the base's own distribution.
      labels: weight of the cross-entropy of the text.
      decay: the weight of distance d in the loss is decay ** (d - 1); exp(-1 / g) in the paper's terms.
    """

    vocabulary: int = 0
    markov_rank: int = 0
    markov_tables: bool = False
    selector_rank: int = 0
    selector_width: int = 16
    confidence_head: Literal["none", "state", "markov"] = "none"
    alignment: float = 0.0
    labels: float = 1.0
    decay: float = 0.8

    def __post_init__(self) -> None:
        check_least(self, vocabulary=0, markov_rank=0, selector_rank=0, selector_width=1)
        if self.confidence_head == "markov" and not self.markov_rank:
            raise UserError(f"{self.name}: confidence_head markov needs a markov_rank of at least 1")
        check_decay(self.name, self.decay)
        check_weights(self.name, self.alignment, self.labels)

    @property
    def distances(self) -> int:
        """M: one per row that predicts."""
        raise NotImplementedError

    def text_blocks(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A block per chosen position of texts.

        Returns:
          Normalised states [B, G, M, D] of the rows that predict, the text's own tokens [B, G, M] int32 before those
          that they predict, and the base's last hidden states [B, T, D].
        """
        raise NotImplementedError

    @property
    def along_paths(self) -> bool:
        """Whether candidates depend on the token before them."""
        return self.markov_rank > 0 or self.selector_rank > 0

    def init_heads(self, key: jax.Array, base: Base) -> PyTree:
        """Of the Markov term, the selector and the confidence head, those that are there."""
        c, heads = base.decoder.config, {}
        D, tokens, drafts = c.hidden_size, c.vocab_size, self.vocabulary or c.vocab_size

        def small(key: jax.Array, *shape: int) -> jax.Array:
            return D**-0.5 * jax.random.normal(key, shape)

        if self.markov_rank:
            rows, columns = (tokens, drafts) if self.markov_tables else (D, D)
            after = jnp.zeros((self.markov_rank, columns))
            heads["markov"] = {"before": {self._before: small(key, rows, self.markov_rank)}}
            heads["markov"] |= {"after": {"kernel": after}}
        if self.selector_rank:
            heads["selector"] = {
                "before": small(jax.random.fold_in(key, 1), tokens, self.selector_rank),
                "state": {"kernel": small(jax.random.fold_in(key, 2), D, self.selector_rank)},
                "candidate": jnp.zeros((drafts, self.selector_rank)),
            }
        if self.confidence_head != "none":
            read = D + self.markov_rank * (self.confidence_head == "markov")
            heads["confidence"] = {"kernel": jnp.zeros((read, 1)), "bias": jnp.full(1, _SURE)}
        return heads

    @property
    def _before(self) -> str:
        """The name of the Markov term's first factor: rows of a table are looked up, a kernel is multiplied with."""
        return "table" if self.markov_tables else "kernel"

    def prepare_heads(self, trainable: PyTree, base: Base) -> PyTree:
        """The pytree with the Markov term as products of the vocabulary projection, [r, V']."""
        part = "Markov term" if self.markov_tables and self.markov_rank else "selector" if self.selector_rank else ""
        if part and self.vocabulary and base.num_drafts > self.vocabulary:
            raise UserError(
                f"{self.name}: its {part} is for {self.vocabulary} tokens: draft-vocabulary must be 1 to "
                f"{self.vocabulary}, not {'0, all' if base.draft_vocabulary is None else base.num_drafts}"
            )
        if not self.markov_rank:
            return trainable
        after = trainable["markov"]["after"]["kernel"]
        if not self.markov_tables:
            after = base.draft_products(after).astype(base.dtype)
        else:
            after = after[:, : base.num_drafts] if self.vocabulary else base.draft_part(after)
        return trainable | {"markov": trainable["markov"] | {"after": {"kernel": after}}}

    def _before_token(self, trainable: PyTree, base: Base, tokens: jax.Array) -> jax.Array:
        """The Markov term's row for the tokens before, [..., r]."""
        factor = trainable["markov"]["before"][self._before]
        if self.markov_tables:
            return factor[tokens]
        embedded = base.embed(tokens.reshape(tokens.shape[0], -1))
        return product(embedded, factor).reshape(*tokens.shape, -1)

    def term(self, trainable: PyTree, base: Base, tokens: jax.Array) -> jax.Array:
        """The Markov term behind tokens [...]: [..., V'], or in training without tables [..., D]."""
        return product(self._before_token(trainable, base, tokens), trainable["markov"]["after"]["kernel"])

    def best(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest of logits [..., V'] and their places, [..., k + 1]: what a selector ranks anew, and one more."""
        return best_of(logits, min(self.selector_width + 1, logits.shape[-1]))

    def selected(
        self,
        trainable: PyTree,
        base: Base,
        logits: jax.Array,
        states: jax.Array,
        tokens: jax.Array,
        best: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Logits with a row's best tokens ranked anew, and all others behind the last of these, in their own order.

        Args:
          trainable: the pytree.
          base: the frozen decoder.
          logits: [B, ..., V'], finished; one row may stand for several tokens, as may one state.
          states: [B, ..., D].
          tokens: [B, ...] int32, before those that are predicted.
          best: what `best` says of the logits, if that is worked out already.

        Returns:
          [B, ..., V'], a row for each of `tokens`.
        """
        if not self.selector_rank:
            return logits
        params = trainable["selector"]
        top, places = self.best(logits) if best is None else best
        ranked = places[..., : self.selector_width]  # [B, ..., k]
        candidates = params["candidate"][ranked if self.vocabulary else base.draft_ids(ranked)]  # [B, ..., k, r]
        pair = (params["before"][tokens] * product(states, params["state"]["kernel"])).astype(top.dtype)
        return reranked(logits, top, places, jnp.sum(pair[..., None, :] * candidates, axis=-1))

    def log_odds(self, trainable: PyTree, base: Base, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """The log-odds [B, ...] that a token drawn behind `tokens` is taken; of states [B, ..., D] as `selected`."""
        read = jnp.broadcast_to(states, (*tokens.shape, states.shape[-1]))
        if self.confidence_head == "markov":
            before = self._before_token(trainable, base, tokens).astype(read.dtype)
            read = jnp.concatenate([read, before], axis=-1)
        params = trainable["confidence"]
        odds = product(read, params["kernel"])[..., 0] + params["bias"]
        return odds.astype(wide(odds))

    # Training

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] of a block per chosen position; -inf for tokens that it does not learn to draft.

        What depends on the token before is given the text's own.
        """
        return self.predictions_and_factors(trainable, base, batch)[0]

    def predictions_and_factors(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The same, and the log of the confidence head's chance of each row, [B, G, M, 1]; without a head 0, []."""
        states, before, _ = self.text_blocks(trainable, base, batch)
        logits = base.draft_whole(self._logits(trainable, base, states, before), -jnp.inf)
        if self.confidence_head == "none":
            return logits, jnp.zeros(())
        return logits, jax.nn.log_sigmoid(self.log_odds(trainable, base, states, before))[..., None]

    def _logits(self, trainable: PyTree, base: Base, states: jax.Array, before: jax.Array) -> jax.Array:
        """[B, G, M, V']."""
        if not self.markov_rank:
            logits = base.draft_logits(states)
        elif self.markov_tables:
            logits = base.finished(base.draft_products(states) + self.term(trainable, base, before))
        else:  # in front of the projection: decoding adds it behind
            logits = base.draft_logits(states + self.term(trainable, base, before))
        return self.selected(trainable, base, logits, states, before)

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean over all targets of all distances, weighted as `alignment`, `labels` and `decay` say.

        With a confidence head also its cross-entropy with the chances themselves; the means of both are metrics.
        """
        states, before, frozen = self.text_blocks(trainable, base, batch)
        student, distances = self._logits(trainable, base, states, before), np.arange(1, self.distances + 1)
        loss, metrics = future_loss(
            student, base, frozen, batch, distances, self.alignment, self.labels, decay=self.decay
        )
        if self.confidence_head == "none":
            return loss, metrics
        source = jnp.minimum(batch.points[..., None] + distances, batch.tokens.shape[1] - 2)
        taken = jax.lax.stop_gradient(overlap(student, base, frozen, source))
        odds, weights = self.log_odds(trainable, base, states, before), targets(batch, distances)

        def mean(each: jax.Array) -> jax.Array:
            return jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), 1)

        more = mean((jax.nn.softplus(odds) - taken * odds) * self.decay ** (distances - 1))
        return loss + more, metrics | {"confidence": mean(jax.nn.sigmoid(odds)), "overlap": mean(taken)}

    # Decoding

    def offer_behind(self, context: DraftContext, states: jax.Array) -> Offer:
        """The candidates behind the rows of a block [B, M', D]; level by level where they depend on their path."""
        base, trainable = context.base, context.trainable
        products = base.draft_products(states)  # [B, M', V']
        asked = self.confidence_head != "none" and not context.fixed  # a fixed tree does not ask for chances

        def log_chance(states: jax.Array, tokens: jax.Array) -> jax.Array:
            return jax.nn.log_sigmoid(self.log_odds(trainable, base, states, tokens))

        if not self.along_paths:
            offer = offer_ranked(context, base.finished(products), jnp.ones(products.shape[:2], bool))
            if not asked:
                return offer
            factor = log_chance(states, jnp.zeros(states.shape[:2], jnp.int32))  # whatever the tokens are
            return offer.replace(log_p=offer.log_p + factor[..., None])

        if not self.markov_rank:  # rows do not depend on the tokens before, nor do their best ones
            logits = base.finished(products)
            best = self.best(logits)

        def expand(parents: Parents, _: Sequence[None]) -> tuple[jax.Array, None]:
            level, tokens = parents.level, parents.tokens  # [B, W]
            row = states[:, level, None]
            if self.markov_rank:  # a term of products, as in training
                rows = base.finished(products[:, level, None] + self.term(trainable, base, tokens))
                return self.selected(trainable, base, rows, row, tokens), None
            rows, ranked = jax.tree.map(lambda x: x[:, level, None], (logits, best))
            return self.selected(trainable, base, rows, row, tokens, ranked), None

        def log_factor(parents: Parents) -> jax.Array:
            return log_chance(states[:, parents.level, None], parents.tokens)

        return offer_levels(context, expand, best=not context.fixed, log_factor=log_factor if asked else None)
