"""Counters of a generation: steps, and candidates offered, accepted and expected by source and depth."""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import PREDICTED, Accepted, Draft, Offer


@flax.struct.dataclass
class Stats:
    """Counters of a generation, per batch row: of all candidates, and after that of each source's.

    Attributes:
      steps: [B] int32, forward passes after prefill while the row was not done.
      offered: [B, 1 + S, P] int32, steps that had a valid candidate at depth d + 1 below the accepted path.
      accepted: [B, 1 + S, P] int32, steps that accepted a candidate at depth d + 1.
      expected: [B, 1 + S, P] float32, steps that should have, by the candidates' own chances; 0 in fixed trees.
      draft_passes: [B] int32, of draft models, or of the part of the base that drafts, after prefill.
      drafted: [B] int32, valid candidates in all steps, wherever they stood.
      predicted: [B] int32, those of them that stand in the predicted text; None where no text is predicted.
    """

    steps: jax.Array
    offered: jax.Array
    accepted: jax.Array
    expected: jax.Array
    draft_passes: jax.Array
    drafted: jax.Array
    predicted: jax.Array | None = None

    @classmethod
    def zero(cls, batch: int, sources: int, depth: int, predicted: bool = False) -> Stats:
        """Nothing counted yet; `predicted` where texts are."""
        count = jnp.zeros((batch, 1 + sources, depth), jnp.int32)
        none = jnp.zeros(batch, jnp.int32)
        return cls(none, count, count, count.astype(jnp.float32), none, none, none if predicted else None)

    def with_offers(self, offers: Sequence[Offer], active: jax.Array) -> Stats:
        """Count what the offers to active rows [B] took."""
        passes = sum(offer.passes for offer in offers if offer.passes is not None)
        return self.replace(draft_passes=self.draft_passes + jnp.where(active, passes, 0))


def count(stats: Stats, draft: Draft, accepted: Accepted, active: jax.Array) -> Stats:
    """Count a step of the active rows [B], and by source and depth what stood and was taken below its path."""
    tree, active = draft.tree, active[:, None, None]
    S, depth = stats.offered.shape[1] - 1, jnp.arange(tree.max_depth)  # of the parents
    candidate = (draft.valid & (tree.depth > 0))[:, None]
    offered_by = jnp.bitwise_and(draft.sources[:, None] >> jnp.arange(S)[:, None], 1) > 0
    candidates = jnp.concatenate([candidate, candidate & offered_by], axis=1)[:, :, None]  # [B, 1 + S, 1, N]
    is_child = (accepted.path[:, :-1, None] == tree.parent[:, None])[:, None]  # [B, 1, P, N]
    reached = active & (depth <= accepted.length[:, None, None])
    taken = jnp.take_along_axis(candidates[:, :, 0], accepted.path[:, None, 1:], axis=2)
    expected = 0.0
    if draft.log_p is not None:
        parent = jnp.take_along_axis(draft.log_p, tree.parent, axis=1)
        chance = jnp.exp(draft.log_p - jnp.maximum(parent, jnp.finfo(parent.dtype).min))[:, None, None]
        expected = jnp.sum(jnp.where(is_child & candidates, chance, 0.0), axis=-1)
    predicted = stats.predicted
    if predicted is not None:
        predicted = predicted + jnp.sum(candidate & active & (draft.sources >= PREDICTED)[:, None], axis=(1, 2))
    return stats.replace(
        steps=stats.steps + active[:, 0, 0],
        offered=stats.offered + (reached & jnp.any(is_child & candidates, axis=-1)),
        accepted=stats.accepted + (active & taken & (depth < accepted.length[:, None, None])),
        expected=stats.expected + jnp.where(reached, expected, 0.0),
        drafted=stats.drafted + jnp.sum(candidate & active, axis=(1, 2)),
        predicted=predicted,
    )
