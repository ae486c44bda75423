"""Self-speculative decoding (Zhang et al., 2023, "Draft & Verify"): the base drafts for itself, without some layers.

A pass that leaves out the attention or the MLP of some layers is cheaper, and often says the same. It drafts one token
after the other, reading the base's own keys and values of all accepted tokens (section 3.1); those of its own tokens
live only while it drafts, since the verifying pass computes them with all layers. Drafting ends after a token that the
pass is unsure of, and how sure it must be adapts to how much is accepted (3.3, "adaptive draft-exiting").

Which parts to leave out is searched on the base's own answers, for the most tokens in the time of a pass
(`jaxspec.methods.layer_search`): the paper's Bayesian optimisation is a random search and an exchange here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Drawn, Offer, PyTree, rank
from jaxspec.decoding.method import Facts, ReadChunk
from jaxspec.errors import UserError
from jaxspec.methods.layer_search import Text, search_layers
from jaxspec.methods.untrained import UntrainedMethod
from jaxspec.model.attention import Context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit
from jaxspec.model.decoder import Skip

_STEP = 0.01  # epsilon, what the threshold moves by
_ACCEPTANCE_MEMORY, _THRESHOLD_MEMORY = 0.5, 0.9  # beta_1 and beta_2


@dataclasses.dataclass(frozen=True)
class SelfSpeculative(UntrainedMethod):
    """Settings.

    Attributes:
      skip_attention: layers whose attention drafting leaves out.
      skip_mlp: layers whose MLP it leaves out.
      threshold: how probable a token must be, in the beginning, for drafting to go on behind it. The paper's code has
        0.8 in greedy decoding and 0.5 in sampling; with the noise known, both are as sure.
      acceptance: alpha, the share of a draft to be accepted: below it the threshold rises.
    """

    name: ClassVar[str] = "self_speculative"
    adjustable: ClassVar[tuple[str, ...]] = ("threshold", "acceptance")

    length: int = 8
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    threshold: float = 0.6
    acceptance: float = 0.9

    def __post_init__(self) -> None:
        for part in ("skip_attention", "skip_mlp"):
            object.__setattr__(self, part, tuple(sorted({*getattr(self, part)})))  # a list, if it comes from JSON
        super().__post_init__()
        for part in ("threshold", "acceptance"):
            if not 0 <= getattr(self, part) <= 1:
                raise UserError(f"self_speculative: {part} must be between 0 and 1, got {getattr(self, part)}")

    def facts(self, config: ModelConfig) -> Facts:
        """By default it drafts one token more than a lookup: the base's own layers are more often right."""
        candidates, layers = min(self.length, 4), self.length * config.num_layers
        return Facts(self.length, default_candidates=candidates, own_layers=layers, adapter="tune")

    @property
    def skip(self) -> Skip:
        """The parts of layers that drafting leaves out."""
        return Skip(self.skip_attention, self.skip_mlp)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """Nothing: the adapter is its settings. Raises UserError for layers that the base does not have."""
        count = base.decoder.config.num_layers
        strange = [layer for layer in (*self.skip_attention, *self.skip_mlp) if not 0 <= layer < count]
        if strange:
            raise UserError(f"self_speculative: this base has the layers 0 to {count - 1}, none {strange[0]} to skip")
        return {}

    def search(
        self, base: Base, texts: Sequence[Text], trials: int, progress: Callable[[int, str], None]
    ) -> tuple[SelfSpeculative, dict[str, Any]]:
        """Search parts to skip and a first threshold, for chains of the default length; see `search_layers`."""
        found = search_layers(base, texts, min(self.length, 4), trials, progress)
        skipped = {"skip_attention": found.skip.attention, "skip_mlp": found.skip.mlp}
        figures = {"tokens": found.tokens, "drafted": found.drafted, "cost": found.cost, "value": found.value}
        method = dataclasses.replace(self, **skipped, threshold=round(found.threshold, 2))
        return method, {name: round(value, 4) for name, value in figures.items()}

    # The threshold

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The threshold and the share of drafts that was accepted of late, [B] float32 each."""
        return {
            "threshold": jnp.full(batch, self.threshold, jnp.float32),
            "accepted": jnp.full(batch, self.acceptance, jnp.float32),
        }

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Adapt both after a step that verified candidates, of other sources too (equations 4 and 5)."""
        if chunk.step is None:
            return method_state
        draft, threshold = chunk.step.draft, method_state["threshold"]
        drafted = jnp.max(jnp.where(draft.valid, draft.tree.depth, 0), axis=1)  # [B]
        share = chunk.step.accepted.length / jnp.maximum(drafted, 1)
        accepted = _mixed(_ACCEPTANCE_MEMORY, method_state["accepted"], share)
        wanted = threshold + jnp.where(accepted < self.acceptance, _STEP, -_STEP)
        adapted = jnp.clip(_mixed(_THRESHOLD_MEMORY, threshold, wanted), 0.0, 1.0)
        new = {"threshold": adapted, "accepted": accepted}
        return jax.tree.map(lambda new, old: jnp.where(drafted > 0, new, old), new, method_state)

    # Drafting

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """A chain, with the runners-up of each of its tokens beside it, up to a token that is too improbable."""
        base, cache, B, M = context.base, context.cache, len(context.root), self.distances(context)
        no_rows = _no_rows(cache, self.skip, B, M)

        def next_token(state: tuple) -> tuple:
            i, token, going, own, levels = state
            hidden, kv = self.read(base, token, context.position, i, cache, own)
            logits = base.draft_logits(base.normed(hidden))  # [B, 1, V']
            tokens, log_p, log_q = rank(context, logits, context.position[:, None] + i + 1)
            here = (tokens, jnp.broadcast_to(going[:, None, None], tokens.shape), log_p, log_q)
            levels = jax.tree.map(lambda all, x: jax.lax.dynamic_update_slice_in_dim(all, x, i, axis=1), levels, here)
            own = commit(own, kv, jnp.broadcast_to(i, (B,)))
            going &= jnp.exp(log_p[:, 0, 0]) >= method_state["threshold"]
            return i + 1, tokens[:, 0, 0], going, own, levels

        def unfinished(state: tuple) -> jax.Array:
            return (state[0] < M) & jnp.any(state[2])

        W = min(context.width, base.num_drafts)
        shape = (B, M, W)
        log_q = jnp.zeros((B, M, base.vocab_size)) if context.sampler.independent else None
        levels = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32), log_q)
        start = (jnp.int32(0), context.root, context.active, no_rows, levels)
        passes, *_, (tokens, known, log_p, log_q) = jax.lax.while_loop(unfinished, next_token, start)
        drawn = log_q if log_q is None else Drawn(log_q, jnp.broadcast_to(jnp.arange(M)[:, None], shape))
        return Offer(tokens, known, log_p, jnp.zeros_like(tokens), drawn, jnp.broadcast_to(passes, (B,)))

    def read(
        self, base: Base, token: jax.Array, position: jax.Array, ahead: jax.Array, cache: Cache, own: Cache
    ) -> tuple[jax.Array, Cache]:
        """One pass of what is left of the base.

        Args:
          base: the frozen decoder.
          token: [B] int32, what to read.
          position: [B] int32, where the newest token is.
          ahead: scalar, how many tokens were drafted behind it.
          cache: of all tokens before it.
          own: keys and values of it and of the drafted ones, L x [B, K, M, Dh].

        Returns:
          Hidden states [B, 1, D], and keys and values L x [B, K, 1, Dh].
        """
        B, M = len(token), jax.tree.leaves(own)[0].shape[2] if jax.tree.leaves(own) else 0
        context = Context(
            positions=position[:, None] + ahead,
            mask=jnp.ones((B, 1, 1, 1), bool),
            cache=cache,
            visible=position[:, None],
            prefix=own,
            sees_prefix=(jnp.arange(M) < ahead)[None, None],
        )
        return base.rows(base.embed(token[:, None]), context, skip=self.skip)


def _mixed(share: float, old: jax.Array, new: jax.Array) -> jax.Array:
    return share * old + (1 - share) * new


def _no_rows(cache: Cache, skip: Skip, batch: int, count: int) -> Cache:
    """Room for keys and values of so many rows, None where a layer's attention is left out."""

    def room(layers: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        shapes = [(batch, x.shape[1], count, x.shape[3]) for x in layers]
        return tuple(
            None if i in skip.attention else jnp.zeros(shape, x.dtype)
            for i, (shape, x) in enumerate(zip(shapes, layers, strict=True))
        )

    return Cache(room(cache.keys), room(cache.values))
