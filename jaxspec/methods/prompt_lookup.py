"""Prompt lookup (Saxena, 2023): text often repeats its prompt, or itself, so draft what followed there.

The last tokens of the text are looked up in everything before them. Where the longest of them occurred last, what
followed is the draft. There is nothing to train, and a step costs what its few rows cost.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.draft import Drafting, Offer
from jaxspec.drafting.method import Method, Seen
from jaxspec.errors import check_at_least
from jaxspec.model.base import Base


@dataclasses.dataclass(frozen=True)
class PromptLookup(Method):
    """Settings.

    Attributes:
      length: M, tokens of a draft at most, in a tree that is so deep.
      longest: n, how many of the last tokens are looked up at most; where they never occurred together, fewer are.
    """

    name: ClassVar[str] = "prompt_lookup"

    length: int = 16
    longest: int = 3

    def __post_init__(self) -> None:
        check_at_least(self, {"length": 1, "longest": 1})

    @property
    def max_distance(self) -> int:
        """M."""
        return self.length

    @property
    def usual_depth(self) -> int:
        """Few: where a match is wrong, it mostly is from the first token on."""
        return min(self.length, 3)

    def empty_state(self, base: Base, batch: int, capacity: int) -> jax.Array:
        """The text so far, [B, S + 1] int32."""
        return jnp.zeros((batch, capacity + 1), jnp.int32)

    def observe(self, drafting: Drafting, seen: Seen, text: jax.Array) -> jax.Array:
        """The text with what was read; the garbage behind it is overwritten before it is looked at."""
        return jax.vmap(jax.lax.dynamic_update_slice)(text, seen.tokens, seen.first[:, None])

    def offer(self, drafting: Drafting, text: jax.Array) -> Offer:
        """What followed the longest match, of several the last."""
        position = drafting.position[:, None]
        matched = self.matched(text, position)
        place = jnp.arange(text.shape[1])
        best = jnp.argmax(matched * len(place) + place, axis=1)[:, None]
        length = jnp.take_along_axis(matched, best, axis=1)  # [B, 1]
        period = jnp.maximum(position - best, 1)  # a match that reaches the end of the text is taken to go round
        ahead = best + 1 + jnp.arange(self.length) % period  # [B, M]
        tokens = jnp.take_along_axis(text, ahead, axis=1, mode="clip")[..., None]
        log_p = log_chance(length, self.length)[..., None]
        return Offer(tokens, jnp.broadcast_to(length[..., None] > 0, tokens.shape), log_p, jnp.zeros_like(tokens))

    def matched(self, text: jax.Array, position: jax.Array) -> jax.Array:
        """How many tokens up to each place are also the last ones up to `position` [B, 1]: [B, S] int32, at most n.

        0 at the position itself and behind it.
        """
        place = jnp.arange(text.shape[1])
        same, count = place < position, jnp.zeros(text.shape, jnp.int32)
        for back in range(self.longest):
            last = jnp.take_along_axis(text, position - back, axis=1, mode="clip")
            same &= (jnp.roll(text, back, axis=1) == last) & (place >= back)
            count += same
        return count


# The chance that a looked up token is right, given that the one before it was: by tokens matched, 1 to 3 or more, and
# by distance, 1 to 4 or more.
_CHANCES = np.array([[0.3, 0.5, 0.6, 0.7], [0.5, 0.7, 0.75, 0.8], [0.8, 0.85, 0.9, 0.92]])


def log_chance(matched: jax.Array, count: int) -> jax.Array:
    """Log-probabilities [B, count] of looked up tokens behind so many matched ones [B, 1]."""
    distance = np.minimum(np.arange(count), _CHANCES.shape[1] - 1)
    return jnp.log(jnp.asarray(_CHANCES, jnp.float32))[jnp.clip(matched, 1, len(_CHANCES)) - 1, distance]
