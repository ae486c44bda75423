"""Token Recycling (Luo et al., 2024): the base's own runners-up are what will follow a token the next time.

A table holds for every token of the vocabulary the k most probable tokens the last time that the base read it, be it
accepted or not. A draft follows the table from the newest token on, and every step updates it by all of its nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.arrays import best_of
from jaxspec.decoding.draft import DraftContext, Offer, knowing_noise
from jaxspec.decoding.method import Calibration, ReadChunk, check_least
from jaxspec.methods.untrained import UntrainedMethod
from jaxspec.model.base import Base

# The chance that the successor of each rank is right. Measured on the default model's answers.
_CHANCES = np.array([0.5, 0.105, 0.052, 0.03, 0.026, 0.015, 0.012, 0.01])


@dataclasses.dataclass(frozen=True)
class TokenRecycling(UntrainedMethod):
    """Settings.

    Attributes:
      successors: k, that are remembered of every token.
    """

    name: ClassVar[str] = "token_recycling"
    # Fitted to the default model's answers.
    calibration: ClassVar[Mapping[str, Calibration]] = {
        "0": [[0.93, -0.15], [1.06, 0.13], [1.21, 0.35], [1.32, 0.51], [1.45, 0.65], [1.48, 0.73]],
        "0.8": [[0.35, -0.96], [0.37, -0.78], [0.34, -0.72], [0.34, -0.66], [0.31, -0.64], [0.39, -0.44]],
    }

    length: int = 6
    successors: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, successors=1)

    def init_state(self, base: Base, batch: int, capacity: int) -> jax.Array:
        """The table [B, V, k] int32, the most probable successor first; -1 for none."""
        return jnp.full((batch, base.vocab_size, min(self.successors, base.vocab_size)), -1, jnp.int32)

    def observe(self, context: DraftContext, chunk: ReadChunk, table: jax.Array) -> jax.Array:
        """The table with the successors of all nodes, of one token those of the last node."""
        if chunk.step is None:
            return table
        draft, rows = chunk.step.draft, jnp.arange(len(table))[:, None]
        new = best_of(chunk.step.logits, table.shape[-1])[1]  # [B, N, k]
        number = jnp.where(draft.valid, jnp.arange(draft.tokens.shape[1]), -1)
        same = draft.tokens[:, None] == draft.tokens[..., None]
        last = number == jnp.max(jnp.where(same, number[:, None], -1), axis=-1)
        where = jnp.where(draft.valid & last, draft.tokens, table.shape[1])  # beyond the table: dropped
        return table.at[rows, where].set(new, mode="drop")

    def offer(self, context: DraftContext, table: jax.Array) -> Offer:
        """The paths through the table whose ranks are best together, level by level, as wide as is wanted."""
        B, W, k = len(table), context.width, table.shape[-1]
        chances = jnp.log(jnp.asarray(_CHANCES[np.minimum(np.arange(k), len(_CHANCES) - 1)], jnp.float32))
        above, total, levels = context.root[:, None], jnp.zeros((B, 1)), []
        for _ in range(self.distances(context)):
            successors = table[jnp.arange(B)[:, None], above]  # [B, W', k]
            scores = jnp.where(successors >= 0, total[..., None] + chances, -jnp.inf).reshape(B, -1)
            total, index = jax.lax.top_k(scores, min(W, scores.shape[1]))
            above = jnp.maximum(jnp.take_along_axis(successors.reshape(B, -1), index, axis=1), 0)
            parent, rank = jnp.divmod(index, k)
            parts = (above, total > -jnp.inf, chances[rank], parent)
            levels.append([jnp.pad(x, ((0, 0), (0, W - x.shape[1]))) for x in parts])
        return knowing_noise(context, Offer(*(jnp.stack(part, axis=1) for part in zip(*levels, strict=True))))
