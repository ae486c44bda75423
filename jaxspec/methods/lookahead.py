"""Lookahead decoding (Fu et al., 2024): guess further tokens all at once, and draft what such guesses have led to.

A window of N - 1 levels and W columns goes through the base behind the draft's nodes, in the same pass (Algorithm 2 of
the paper). The row at level l and column j stands l + j tokens behind the newest one, which is itself the first of
level 0. It sees that level up to its own column, and its own column up to its own level:

    level 0    n  a  b         c2 sees  n  a  b         the n-gram of the last column, one token more
    level 1    c0 c1 c2                       c2        than its levels:  b c2 d2 and what the base
    level 2    d0 d1 d2                                 would say after d2

The base's greedy token after each row of the top level completes an n-gram of its column. It goes into a pool, under
its first token, and the levels move down by one. So every n-gram came about one token per step, each from the step
before it: a piece of the base's own text, as far as its guessed context was right. After a token the pool's newest
n-grams that begin with it are drafted. The window is never committed, and what is guessed there is always greedy: the
draft is judged as every other.

Jacobi decoding (Santilli et al., 2023), from which this comes, has no pool: the one level of guesses is the draft, and
its rows are the draft's own nodes. What the base says after each guess is the guess of the next step, right or wrong.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import Draft, DraftContext, Offer, PyTree, knowing_noise, run_if
from jaxspec.decoding.method import Facts, Method, ReadChunk, check_least
from jaxspec.decoding.sampling import best
from jaxspec.methods.lookup import join
from jaxspec.methods.untrained import UntrainedMethod
from jaxspec.model.base import Base
from jaxspec.model.rows import Rows

_NONE = -1  # no n-gram in this place of the pool
# Chances are guessed, not fitted: `jaxspec tune` calibrates them, and fixed trees do not ask.
_UNSEEN = 2.0  # what all n-grams of a token are weighed against, for what is in none of them
_FADING = 0.7  # an n-gram counts as much for every newer one
_CHANCE = 0.2  # that a guess of Jacobi decoding is right where the one before it is


@dataclasses.dataclass(frozen=True)
class Lookahead(Method):
    """Settings. A step has (N - 1) W - 1 rows of the window, whatever it drafts.

    Attributes:
      window: W, columns. The paper takes 15 for a model of 7 billion parameters on an A100, where rows cost little.
      ngram: N, tokens of an n-gram (5), the one that it is found by included.
      guesses: G, n-grams that are kept, and drafted, for every token of the vocabulary (15).
    """

    name: ClassVar[str] = "lookahead"

    window: int = 3
    ngram: int = 3
    guesses: int = 3

    def __post_init__(self) -> None:
        check_least(self, window=1, ngram=2, guesses=1)

    @property
    def levels(self) -> int:
        """N - 1, of the window; and tokens that follow the first one of an n-gram."""
        return self.ngram - 1

    def facts(self, config: ModelConfig) -> Facts:
        """Unless it is given another tree it drafts all of a token's n-grams."""
        return Facts(self.levels, default_candidates=self.guesses * self.levels, further_rows=self.further_rows)

    @property
    def further_rows(self) -> int:
        """The window without the newest token, which is the draft's root."""
        return self.levels * self.window - 1

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The window and the pool.

        window [B, N - 1, W] int32, whose first token is not used; pool [B, V, G (N - 1)] int32, what follows a token in
        its n-grams, the newest first.
        """
        window = jnp.zeros((batch, self.levels, self.window), jnp.int32)
        pool = jnp.full((batch, base.vocab_size, self.guesses * self.levels), _NONE, jnp.int32)
        return {"window": window, "pool": pool}

    # The window

    def rows(self, context: DraftContext, draft: Draft, method_state: PyTree) -> Rows:
        """The nodes, then the window, level by level."""
        nodes, (B, N), X = super().rows(context, draft, method_state), draft.tokens.shape, self.further_rows
        level, column = self._places()
        tokens = method_state["window"].reshape(B, -1)[:, 1:]
        unseen = jnp.zeros((B, N, X), bool)
        sees_nodes = jnp.broadcast_to(jnp.arange(N) == 0, (B, X, N))
        sees_window = jnp.broadcast_to(self.sees()[1:, 1:], (B, X, X))
        return Rows(
            x=jnp.concatenate([nodes.x, context.base.embed(tokens)[:, None]], axis=2),
            positions=jnp.concatenate(
                [nodes.positions, (context.position[:, None] + (level + column)[1:])[:, None]], axis=2
            ),
            mask=jnp.block([[draft.tree.ancestors, unseen], [sees_nodes, sees_window]])[:, None],
        )

    def sees(self) -> np.ndarray:
        """The mask of the window's places, the newest token's first: [(N - 1) W, (N - 1) W] bool."""
        level, column = self._places()
        below, right = level[:, None], column[:, None]
        return ((level == 0) & (column <= right)) | ((column == right) & (level <= below))

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Level and column of every place, [(N - 1) W] each."""
        return np.divmod(np.arange(self.levels * self.window), self.window)

    # What it remembers

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Fill the window with random tokens of a prompt; after a step collect its n-grams and add a new level."""
        window, pool = method_state["window"], method_state["pool"]
        if chunk.step is None:
            return {"window": _drawn(chunk, window), "pool": pool}
        step, base = chunk.step, context.base
        draft, states = step.draft, step.states[base.decoder.config.num_layers]
        behind = jnp.concatenate([states[:, :1], states[:, draft.tree.num_nodes :]], axis=1)
        newest = run_if(step.added, lambda: best(base.logits(behind[:, -self.window :]))[:, None])  # [B, 1, W]
        columns = jnp.concatenate([window.at[:, 0, 0].set(draft.tokens[:, 0]), newest], axis=1)  # [B, N, W]
        pool = self.remember(pool, columns.swapaxes(1, 2), step.added)
        return {"window": jnp.where(step.added, columns[:, 1:], window), "pool": pool}

    def remember(self, pool: jax.Array, ngrams: jax.Array, new: jax.Array | bool = True) -> jax.Array:
        """The pool with n-grams [B, W, N], one after the other: each comes first under its token, and is there once.

        Without any where they are not `new`.
        """
        B, W, _ = ngrams.shape
        keys, rows = ngrams[..., 0], jnp.arange(B)[:, None]
        before = places = pool[rows, keys].reshape(B, W, self.guesses, self.levels)
        same = keys[:, :, None] == keys[:, None]
        for column in range(W):  # all columns with one key see what each of them brings
            ngram = ngrams[:, column, None, None, 1:]
            known = jnp.all(places == ngram, axis=-1)  # [B, W, G]
            at = jnp.where(jnp.any(known, axis=-1), jnp.argmax(known, axis=-1), self.guesses - 1)
            moved = jnp.concatenate([jnp.broadcast_to(ngram, places[:, :, :1].shape), places[:, :, :-1]], axis=2)
            moved = jnp.where((jnp.arange(self.guesses) <= at[..., None])[..., None], moved, places)
            places = jnp.where(same[:, :, column, None, None], moved, places)
        return pool.at[rows, keys].set(jnp.where(new, places, before).reshape(B, W, -1))

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """The n-grams of the newest token as a tree, newer ones first."""
        B, M = len(context.root), min(self.levels, context.depth)
        ngrams = method_state["pool"][jnp.arange(B), context.root].reshape(B, self.guesses, self.levels)
        tokens = ngrams[:, :, :M].swapaxes(1, 2)  # [B, M, G]
        weights = jnp.float32(_FADING) ** jnp.arange(self.guesses)
        known, parent, through, above = join(tokens, tokens != _NONE, weights)
        log_p = jnp.where(known, jnp.log(through) - jnp.log(above + _UNSEEN), -jnp.inf)
        return knowing_noise(context, Offer(jnp.maximum(tokens, 0), known, log_p, parent))


def _drawn(chunk: ReadChunk, before: jax.Array) -> jax.Array:
    """Tokens at random out of what was read, of the shape of those `before` [B, ...]; these, where nothing was."""
    numbers = jax.random.bits(jax.random.key(0), (before.size // len(before),)) >> 1
    place = numbers.astype(jnp.int32) % jnp.maximum(chunk.length[:, None], 1)
    drawn = jnp.take_along_axis(chunk.tokens, place, axis=1)
    return chunk.updated(drawn.reshape(before.shape), before)


@dataclasses.dataclass(frozen=True)
class Jacobi(UntrainedMethod):
    """Jacobi decoding: the draft is what the base said behind the last draft. Its length is the number of guesses."""

    name: ClassVar[str] = "jacobi"

    def init_state(self, base: Base, batch: int, capacity: int) -> jax.Array:
        """The guesses [B, M] int32: those that follow the newest token."""
        return jnp.zeros((batch, self.length), jnp.int32)

    def observe(self, context: DraftContext, chunk: ReadChunk, guesses: jax.Array) -> jax.Array:
        """Guess random tokens of a prompt; after a step the base's token after each guess.

        A guess that was not verified, since another one or nothing stood there, stays. What the text has passed goes,
        and at the end the last guess is repeated.
        """
        if chunk.step is None:
            return _drawn(chunk, guesses)
        draft, M = chunk.step.draft, self.length
        tree = draft.tree
        right = draft.tokens == jnp.take_along_axis(guesses, jnp.maximum(tree.depth - 1, 0), axis=1)
        right = (right & draft.valid) | (tree.depth == 0)
        verified = jnp.all(right[:, None] | ~tree.ancestors, axis=-1) & tree.live  # [B, N], nodes that are guesses
        at_depth = verified[:, None] & (tree.depth[:, None] == jnp.arange(M + 1)[:, None])  # [B, M + 1, N]
        next_tokens = jnp.take_along_axis(best(chunk.step.logits), jnp.argmax(at_depth, axis=-1), axis=1)
        stays = jnp.pad(guesses, ((0, 0), (0, 1)), mode="edge")
        following = jnp.where(jnp.any(at_depth, axis=-1), next_tokens, stays)  # [B, M + 1], from the root on
        return jnp.take_along_axis(following, jnp.minimum(chunk.length[:, None] + jnp.arange(M), M), axis=1)

    def offer(self, context: DraftContext, guesses: jax.Array) -> Offer:
        """The guesses, one after the other."""
        tokens = guesses[:, : self.distances(context), None]
        log_p = jnp.full(tokens.shape, jnp.log(_CHANCE), jnp.float32)
        return knowing_noise(context, Offer(tokens, jnp.ones(tokens.shape, bool), log_p, jnp.zeros_like(tokens)))
