"""Lookup of the text's end in the text: shared by methods that draft what followed an earlier occurrence.

What matched so far tells how far to trust what followed: a token behind m matched ones is right with a chance that
grows with m, and a drafted token that is right makes the match longer by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.arrays import overwrite
from jaxspec.decoding.draft import DraftContext, Offer
from jaxspec.decoding.method import Calibration, Facts, ReadChunk, check_least
from jaxspec.methods.untrained import UntrainedMethod
from jaxspec.model.base import Base

# The chance that a token of the predicted text is right, by how many tokens match before it: of ten edits of a file.
_PREDICTED = np.array([0.23, 0.48, 0.79, 0.89, 0.93, 0.95, 0.98, 0.99])


@flax.struct.dataclass
class Texts:
    """The texts that are looked up; a place counts through both.

    Attributes:
      own: [B, S + 1] int32, prompt and answer so far.
      predicted: [B, E] int32, what the user expects of the answer, with -1 before and behind it; None: nothing.
    """

    own: jax.Array
    predicted: jax.Array | None = None

    @property
    def both(self) -> jax.Array:
        """[B, S + 1 + E] int32, the one behind the other. No token matches the -1 between them."""
        return self.own if self.predicted is None else jnp.concatenate([self.own, self.predicted], axis=1)

    def is_predicted(self, place: jax.Array) -> jax.Array:
        """Whether places are in the predicted text."""
        return place >= self.own.shape[1]


@dataclasses.dataclass(frozen=True)
class LookupMethod(UntrainedMethod):
    """Settings that all methods have that look up the text.

    Attributes:
      longest: n, how many of the last tokens are looked up at most; where they never occurred together, fewer are.
    """

    # Chances are those of greedy tokens; sampled ones come again less often. Fitted to the default model's answers.
    calibration: ClassVar[Mapping[str, Calibration]] = {
        "0": [[1.0, 0.0]],
        "0.5": [[0.37, -0.44], [0.47, -0.27], [0.42, -0.23], [0.5, -0.22], [0.54, -0.19], [0.6, -0.17]],
        "0.8": [[0.38, -0.64], [0.48, -0.37], [0.55, -0.22], [0.55, -0.19], [0.55, -0.15], [0.65, -0.11]],
        "1": [[0.5, -0.64], [0.56, -0.36], [0.42, -0.27], [0.56, -0.2], [0.7, -0.16], [0.56, -0.11]],
    }

    longest: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, longest=1)

    def facts(self, config: ModelConfig) -> Facts:
        """It looks up what the user expects, too."""
        return dataclasses.replace(super().facts(config), follows_prediction=True)

    def init_state(self, base: Base, batch: int, capacity: int) -> Texts:
        """The text so far, of which there is nothing."""
        return Texts(jnp.zeros((batch, capacity + 1), jnp.int32))

    def expect(self, texts: Texts, predicted: jax.Array) -> Texts:
        """A further text to look up."""
        return texts.replace(predicted=predicted)

    def observe(self, context: DraftContext, chunk: ReadChunk, texts: Texts) -> Texts:
        """The text with what was read; the garbage behind it is overwritten before it is looked at."""
        return texts.replace(own=overwrite(texts.own, chunk.tokens, chunk.first))

    def matches(self, context: DraftContext, texts: Texts, count: int) -> tuple[jax.Array, jax.Array]:
        """Earlier occurrences of the text's end, in the predicted text anywhere.

        Args:
          context: says where the text ends.
          texts: where to look.
          count: C, how many occurrences are wanted.

        Returns:
          Their last places [B, C], those of the longest match first, of several the last, so that the predicted text
          goes before the text itself; and how many tokens match there, [B, C], at most n; 0 for none.
        """
        matched = self.matched(texts, context.position[:, None])
        place = jnp.arange(matched.shape[1])
        if count == 1:
            best = jnp.argmax(matched * len(place) + place, axis=1)[:, None]
        else:
            best = jax.lax.top_k(matched * len(place) + place, count)[1]
        return best, jnp.take_along_axis(matched, best, axis=1)

    def matched(self, texts: Texts, position: jax.Array) -> jax.Array:
        """Length of the match between the tokens up to each place and up to `position` [B, 1], at most n.

        [B, S + 1 + E]; 0 at the position itself and behind it in its text, and at the predicted text's last token.
        """
        text = texts.both
        place = jnp.arange(text.shape[1])
        same, count = place < position, jnp.zeros(text.shape, jnp.int32)
        if texts.predicted is not None:
            same |= texts.is_predicted(place) & (jnp.roll(text, -1, axis=1) >= 0)
        for back in range(self.longest):
            last = jnp.take_along_axis(text, position - back, axis=1, mode="clip")
            same &= (jnp.roll(text, back, axis=1) == last) & (jnp.minimum(place, position) >= back)
            count += same
        return count

    def following(
        self, context: DraftContext, texts: Texts, places: jax.Array, matched: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The tokens that followed occurrences.

        What reaches the end of the text itself is taken to go round; behind the predicted text nothing comes.

        Args:
          context: says where the text ends, and how many are wanted.
          texts: where to look.
          places: [B, C] int32, of `matches`.
          matched: [B, C] int32, likewise.

        Returns:
          Tokens [B, M, C], and which of them there are, [B, M, C] or [B, 1, C].
        """
        text, M = texts.both, self.distances(context)
        period = jnp.maximum(context.position[:, None] - places, 1)
        if texts.predicted is not None:
            period = jnp.where(texts.is_predicted(places), M, period)
        ahead = places[:, None] + 1 + jnp.arange(M)[:, None] % period[:, None]  # [B, M, C]
        flat = jnp.take_along_axis(text, ahead.reshape(len(text), -1), axis=1, mode="clip")
        tokens, there = flat.reshape(ahead.shape), matched[:, None] > 0
        return (tokens, there) if texts.predicted is None else (jnp.maximum(tokens, 0), there & (tokens >= 0))

    def knowing_prediction(self, texts: Texts, offer: Offer, places: jax.Array, matched: jax.Array) -> Offer:
        """An offer of what followed occurrences [B, C], which says what the user predicts, and trusts it more."""
        if texts.predicted is None:
            return offer
        predicted = jnp.broadcast_to(texts.is_predicted(places)[:, None], offer.tokens.shape)
        chance = jnp.log(by_match(_PREDICTED, matched, offer.tokens.shape[1]))
        log_p = jnp.where(predicted, jnp.maximum(offer.log_p, chance), offer.log_p)
        return offer.replace(log_p=log_p, predicted=predicted)


def by_match(values: np.ndarray, matched: jax.Array, count: int) -> jax.Array:
    """Values for candidates at the distances 1 to `count`, [B, count, C].

    Args:
      values: [n], by how many tokens match before a candidate, 1 to n or more.
      matched: [B, C] int32, tokens that match before the first candidate; the others follow candidates that are right.
      count: M.
    """
    before = matched[:, None] - 1 + jnp.arange(count)[:, None]
    return jnp.asarray(values, jnp.float32)[jnp.clip(before, 0, len(values) - 1)]


def join(tokens: jax.Array, there: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    """Continuations as a tree: those that begin alike are one path.

    Args:
      tokens: [B, M, C] int32.
      there: [B, M, C] or [B, 1, C] bool, what of them there is.
      weights: [C], how much each counts.

    Returns:
      All [B, M, C]: which tokens are the nodes, their parents' places one distance nearer, how much all continuations
      through a node count, and how much those through its parent.
    """
    there = jnp.broadcast_to(there, tokens.shape)
    alike = tokens[..., None, :] == tokens[..., None]  # [B, M, C, C]
    alike = jnp.cumprod(alike & there[..., None] & there[..., None, :], axis=1, dtype=jnp.int32) > 0
    first = jnp.argmax(alike, axis=-1)  # [B, M, C], the first continuation with the same path so far
    through = jnp.sum(alike * weights, axis=-1)
    parent = jnp.concatenate([jnp.zeros_like(first[:, :1]), first[:, :-1]], axis=1)
    at_root = jnp.sum(there[:, :1] * weights, axis=-1, keepdims=True)
    above = jnp.concatenate([jnp.broadcast_to(at_root, through[:, :1].shape), through[:, :-1]], axis=1)
    return there & (first == jnp.arange(tokens.shape[-1])), parent, through, above
