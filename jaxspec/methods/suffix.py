"""Suffix decoding (Oliaro et al., 2024), over the text at hand: all that followed its last tokens, with its counts.

Where prompt lookup drafts what followed the last occurrence, this looks at several, and joins what followed them to a
tree: what occurred often, or lately, is more probable. The paper keeps suffix trees, whose nodes count occurrences; an
array of the text on the device, searched in every step, tells the same about one text.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.draft import DraftContext, Offer, knowing_noise
from jaxspec.errors import UserError
from jaxspec.methods.lookup import LookupMethod, Texts, by_match, join

# What all occurrences are weighed against, for what followed none of them, by how many tokens match: one alone is right
# with a chance of 1 / (1 + this). Fitted to the default model's answers.
_UNSEEN = np.array([3.3, 0.65, 0.7, 0.5, 0.27, 0.34, 0.18, 0.16, 0.2, 0.17, 0.12])
_MOST = 100  # occurrences, every two of which are compared


@dataclasses.dataclass(frozen=True)
class Suffix(LookupMethod):
    """Settings.

    Attributes:
      occurrences: C, of the longest match, or of shorter ones where there are not so many; the last ones.
      fading: an occurrence counts as much for every later one.
    """

    name: ClassVar[str] = "suffix"

    occurrences: int = 4
    fading: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.occurrences <= _MOST:
            raise UserError(f"suffix: occurrences must be between 1 and {_MOST}, got {self.occurrences}")
        if not 0 < self.fading <= 1:
            raise UserError(f"suffix: fading must be above 0 and at most 1, got {self.fading}")

    def offer(self, context: DraftContext, texts: Texts) -> Offer:
        """The tokens that followed the occurrences, as a tree: paths that begin alike are one."""
        C = self.occurrences
        places, matched = self.matches(context, texts, C)
        tokens, there = self.following(context, texts, places, matched)  # [B, M, C]
        weights = jnp.float32(self.fading) ** jnp.arange(C)
        known, parent, through, above = join(tokens, there, weights)
        log_p = jnp.log(through) - jnp.log(above + by_match(_UNSEEN, matched, tokens.shape[1]))
        offer = self.knowing_prediction(texts, Offer(tokens, known, log_p, parent), places, matched)
        return knowing_noise(context, offer)
