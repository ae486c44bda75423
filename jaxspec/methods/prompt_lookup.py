"""Prompt lookup (Saxena, 2023): text often repeats its prompt, or itself, so draft what followed there.

The last tokens of the text are looked up in everything before them. Where the longest of them occurred last, what
followed is the draft. There is nothing to train, and a step costs what its few rows cost.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.draft import DraftContext, Offer, knowing_noise
from jaxspec.methods.lookup import LookupMethod, Texts, by_match

# The chance that a looked up token is right, by how many tokens match before it: of the default model's answers.
_CHANCES = np.array([0.26, 0.58, 0.6, 0.68, 0.69, 0.73, 0.83, 0.86, 0.88, 0.89, 0.9, 0.91, 0.92, 0.93])


@dataclasses.dataclass(frozen=True)
class PromptLookup(LookupMethod):
    """Settings; those of `LookupMethod` are all there are."""

    name: ClassVar[str] = "prompt_lookup"

    def offer(self, context: DraftContext, texts: Texts) -> Offer:
        """The tokens that followed the longest match, of several the last."""
        place, matched = self.matches(context, texts, 1)
        tokens, there = self.following(context, texts, place, matched)  # [B, M, 1]
        log_p = jnp.log(by_match(_CHANCES, matched, tokens.shape[1]))
        offer = Offer(tokens, jnp.broadcast_to(there, tokens.shape), log_p, jnp.zeros_like(tokens))
        return knowing_noise(context, self.knowing_prediction(texts, offer, place, matched))
