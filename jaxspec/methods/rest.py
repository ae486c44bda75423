"""REST (He et al., 2023): what is being written resembles what was written before, so draft what followed there.

A datastore holds texts, such as earlier answers of the base, and all their places in the order of the tokens that lead
to them, read backwards (section 3.2 of the paper, which sorts suffixes instead). Places that the same tokens lead to
lie side by side, and halving finds them. What followed them is joined to a tree, by how often it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Offer, PyTree, knowing_noise
from jaxspec.decoding.method import Facts, check_least
from jaxspec.methods.lookup import LookupMethod, Texts, by_match, join
from jaxspec.model.base import Base

SEPARATOR = -1  # stands around every text of a datastore, and is no token
_NOTHING = -2  # before the first token of the text at hand: it is nowhere in a datastore

# What k continuations are weighed against for what is none of them, by how many tokens match, as a multiple of sqrt(k):
# one alone is right with a chance of 1 / (1 + this). Fitted to the default model's answers.
_UNSEEN = np.array([4.7, 3.5, 2.2, 2.2, 1.7, 1.2, 1.0, 0.7, 0.5, 0.45, 0.4, 0.4, 0.4, 0.35, 0.3, 0.2])


@dataclasses.dataclass(frozen=True)
class Rest(LookupMethod):
    """Settings.

    Attributes:
      size: N, tokens of the datastore, separators included.
      continuations: C, of the longest match; where it has more, so many that are spread evenly.
    """

    name: ClassVar[str] = "rest"
    adjustable: ClassVar[tuple[str, ...]] = ()

    longest: int = 16
    size: int = 1
    continuations: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, size=1, continuations=1)

    def facts(self, config: ModelConfig) -> Facts:
        """A lookup in a datastore that is built, and nowhere else."""
        return dataclasses.replace(super().facts(config), adapter="datastore", follows_prediction=False)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """An empty datastore; `build` makes a full one.

        tokens [N] int32, the texts with a separator before, between and behind them; order [N] int32, their places.
        """
        return {"tokens": jnp.full(self.size, SEPARATOR, jnp.int32), "order": jnp.arange(self.size, dtype=jnp.int32)}

    def offer(self, context: DraftContext, texts: Texts) -> Offer:
        """The tokens that followed the longest match, as a tree."""
        datastore, C = context.trainable, self.continuations
        first, count, matched = self.find(datastore, self.last(context, texts.own))
        places = jnp.take(datastore["order"], first[:, None] + spread(count, C), mode="clip")  # [B, C]
        ahead = places[:, None] + 1 + jnp.arange(self.distances(context))[:, None]  # [B, M, C]
        tokens = jnp.take(datastore["tokens"], ahead, mode="clip")
        there = (tokens != SEPARATOR) & (jnp.arange(C) < count[:, None])[:, None]
        there = jnp.cumprod(there, axis=1, dtype=jnp.int32) > 0  # up to the end of their text
        known, parent, through, above = join(tokens, there, jnp.ones(C))
        unseen = by_match(_UNSEEN, matched[:, None], tokens.shape[1]) * jnp.sqrt(above)
        log_p = jnp.where(known, jnp.log(through) - jnp.log(above + unseen), -jnp.inf)
        return knowing_noise(context, Offer(tokens, known, log_p, parent))

    def last(self, context: DraftContext, text: jax.Array) -> jax.Array:
        """The last n tokens of the text [B, n], the newest first."""
        place = context.position[:, None] - jnp.arange(self.longest)
        return jnp.where(place >= 0, jnp.take_along_axis(text, place, axis=1, mode="clip"), _NOTHING)

    def find(self, datastore: PyTree, last: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The places that as many as possible of the last tokens lead to, by halving: twenty times in a million places.

        All lengths of a match are looked for at once, for each the first place of the order that is not less than it,
        and the first that is greater.

        Args:
          datastore: see `init`.
          last: [B, n] int32, the newest first.

        Returns:
          Where they begin in the order, how many there are, 0 for none, and how many tokens match there, all [B].
        """
        tokens, order = datastore["tokens"], datastore["order"]
        back, wanted = jnp.arange(self.longest), last[:, None, None]  # [B, 1, 1, n]
        compared = back <= back[:, None]  # [n, n], the tokens that a match of each length is about
        when_equal = jnp.array([[False], [True]])

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds  # [B, 2, n]
            middle = low + (high - low) // 2
            place = jnp.take(order, middle, mode="clip")[..., None]
            tokens_there = jnp.take(tokens, jnp.maximum(place - back, 0))  # [B, 2, n, n]
            differs = compared & (tokens_there != wanted)
            newest = jnp.argmax(differs, axis=-1)[..., None]
            less = jnp.take_along_axis(tokens_there < wanted, newest, axis=-1)[..., 0]
            go_up = jnp.where(jnp.any(differs, axis=-1), less, when_equal) & (low < high)
            return jnp.where(go_up, middle + 1, low), jnp.where(go_up, high, middle)

        begin = jnp.zeros((len(last), 2, self.longest), jnp.int32)
        bounds, _ = jax.lax.fori_loop(0, self.size.bit_length(), halve, (begin, begin + self.size))
        counts = bounds[:, 1] - bounds[:, 0]  # [B, n]
        matched = jnp.sum(counts > 0, axis=1)
        longest = jnp.maximum(matched - 1, 0)[:, None]
        first, count = (jnp.take_along_axis(x, longest, axis=1)[:, 0] for x in (bounds[:, 0], counts))
        return first, count, matched


def spread(count: jax.Array, wanted: int) -> jax.Array:
    """The first places of `count` [B], or, where there are more, as many as are wanted evenly over all: [B, wanted]."""
    which, count = jnp.arange(wanted), jnp.maximum(count, wanted)[:, None]
    return which * (count // wanted) + which * (count % wanted) // wanted


def build(texts: Iterable[Sequence[int]], **settings: int) -> tuple[Rest, PyTree]:
    """A datastore of texts, token ids each, and the method that reads it; with further settings of `Rest`."""
    parts = [[SEPARATOR], *([*text, SEPARATOR] for text in texts)]
    tokens = np.concatenate(parts).astype(np.int32)
    method = Rest(size=len(tokens), **settings)
    return method, {"tokens": tokens, "order": sort_places(tokens, method.longest)}


def sort_places(tokens: np.ndarray, longest: int) -> np.ndarray:
    """All places, ordered by at least the `longest` last tokens that lead to them: [N] int32.

    The rank of a place among all, by its last 2 m tokens, follows from its rank by the last m and that of the place m
    tokens before.
    """
    rank, length = tokens.astype(np.int64) - SEPARATOR, 1
    while length < longest:
        before = np.concatenate([np.zeros(length, np.int64), rank])[: len(rank)]
        rank = np.unique(rank * (1 + rank.max()) + before, return_inverse=True)[1]
        length *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)
