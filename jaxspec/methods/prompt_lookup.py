"""Prompt lookup (Saxena, 2023): text often repeats its prompt, or itself, so draft what followed there.

The last tokens of the text are looked up in everything before them. Where the longest of them occurred last, what
followed is the draft. There is nothing to train, and a step costs what its few rows cost.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.drafting.draft import Candidates, Draft, Drafting, draft_from_candidates
from jaxspec.drafting.method import Method, Prompt, Verified
from jaxspec.errors import check_at_least


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

    def start(self, drafting: Drafting, prompt: Prompt, root: jax.Array) -> tuple[Draft, jax.Array]:
        """The method's state is the text so far, [B, S] int32."""
        B, T = prompt.tokens.shape
        text = jnp.zeros((B, prompt.capacity), jnp.int32).at[:, :T].set(prompt.tokens)
        text = text.at[jnp.arange(B), prompt.lengths].set(root)
        return self.draft(drafting, text, prompt.lengths), text

    def propose(self, drafting: Drafting, verified: Verified, text: jax.Array) -> tuple[Draft, jax.Array]:
        """What follows the bonus is garbage, overwritten before it is read."""
        first = verified.position - verified.accepted.length
        text = jax.vmap(jax.lax.dynamic_update_slice)(text, verified.tokens, first[:, None])
        return self.draft(drafting, text, verified.position), text

    def draft(self, drafting: Drafting, text: jax.Array, position: jax.Array) -> Draft:
        """The draft after the tokens up to `position` [B], the root's."""
        newest, position = jnp.take_along_axis(text, position[:, None], axis=1), position[:, None]
        matched = self.matched(text, position)
        place = jnp.arange(text.shape[1])
        best = jnp.argmax(matched * len(place) + place, axis=1)[:, None]  # the longest match, of several the last
        period = jnp.maximum(position - best, 1)  # a match that reaches the end of the text is taken to go round
        ahead = best + 1 + jnp.arange(self.length) % period  # [B, M]
        tokens = jnp.take_along_axis(text, ahead, axis=1, mode="clip")
        known = jnp.broadcast_to(jnp.take_along_axis(matched, best, axis=1) > 0, tokens.shape)
        return draft_from_candidates(drafting.tree, newest[:, 0], Candidates(tokens[..., None], None), known)

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
