"""Drafts: what a step verifies, what came of it, and what sources offer for the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.arrays import best_of
from jaxspec.decoding.sampling import Sampler
from jaxspec.decoding.tree import Tree
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache

PyTree = Any
PREDICTED = 1 << 30  # the bit, beside those of sources, of what a source has from the predicted text


@flax.struct.dataclass
class Accepted:
    """Outcome of verification, per batch row.

    Attributes:
      path: [B, P + 1] int32, accepted nodes from the root down; beyond `length` the last one repeats.
      length: [B] int32, candidates accepted, the root not counted.
      node: [B] int32, the last accepted node.
      bonus: [B] int32, the token the base itself puts after it.
    """

    path: jax.Array
    length: jax.Array
    node: jax.Array
    bonus: jax.Array


@flax.struct.dataclass
class Drawn:
    """The distributions that sampled candidates were drawn from.

    Attributes:
      log_q: [B, X, V] float32, distributions, filters and temperature included.
      place: [B, N] int32, which of them each node's token was drawn from (of an offer [B, M, W], each candidate's).
        Siblings share one: they are drawn without replacement, in the order of their ranks.
    """

    log_q: jax.Array
    place: jax.Array


@flax.struct.dataclass
class Draft:
    """The candidates and probes that a step verifies.

    Attributes:
      tree: the nodes' topology and their probes, arrays with a batch axis.
      tokens: [B, N] int32, token of every node; node 0, the root, is the newest token emitted.
      valid: [B, N] bool; False for nodes without a candidate (a first step, an n-gram miss, padding).
      sources: [B, N] int32, the sources that offered a node, a bit each, and `PREDICTED` where the predicted text has
        it; 0 for the root.
      log_p: [B, N] float32, chance that the whole path to a node is right; None in a fixed tree, which does not ask.
      drawn: None unless candidates were drawn independently of the text's noise.
      size: [B] int32, which of the shape's sizes holds all valid nodes; None where the shape has one size.
      pays: [B] bool, whether drafting pays: candidates are worth the time of the step, and of the rows that a method
        adds where one does; None likewise.
    """

    tree: Tree
    tokens: jax.Array
    valid: jax.Array
    sources: jax.Array
    log_p: jax.Array | None = None
    drawn: Drawn | None = None
    size: jax.Array | None = None
    pays: jax.Array | None = None

    def resting(self) -> Draft:
        """The root alone, in a step of the smallest size; the draft itself where there is one size."""
        if self.size is None:
            return self
        root = self.valid & (jnp.arange(self.valid.shape[1]) == 0)
        return self.replace(valid=root, size=jnp.zeros_like(self.size), pays=jnp.zeros_like(self.pays))

    def first(self, count: int) -> Draft:
        """The first nodes, with all probes; of candidates that were drawn, all of them."""
        log_p = None if self.log_p is None else self.log_p[:, :count]
        nodes = {name: getattr(self, name)[:, :count] for name in ("tokens", "valid", "sources")}
        return self.replace(tree=self.tree.first(count), log_p=log_p, **nodes)


@flax.struct.dataclass
class DraftContext:
    """The one argument of a method's decoding functions: what it drafts with, and behind which token.

    Attributes:
      trainable: the adapter's pytree, as `Method.prepare` returned it; empty for methods without one.
      base: the frozen decoder, which knows what may be drafted.
      tree: the fixed tree that a method expands whose candidates depend on their path; arrays with a batch axis.
      sampler: ranks candidates with the noise of the positions they are for, or draws them independently.
      seeds: [B] uint32.
      root: [B] int32, the newest token.
      position: [B] int32, where it is.
      active: [B] bool, rows that want candidates. What is offered to others is dropped, and need not be worked out.
      width: W, candidates that are wanted at each distance (static).
      depth: M', distances that are wanted (static).
      fixed: the draft is that tree; otherwise it takes the best of all candidates, wherever they stand (static).
      cache: the base's keys and values of all tokens before the newest one, for methods that draft with its layers. It
        is only read.
      free_rows: levels of at most so many rows in all run without a condition that could skip them (static).
    """

    trainable: PyTree
    base: Base
    tree: Tree
    sampler: Sampler
    seeds: jax.Array
    root: jax.Array
    position: jax.Array
    active: jax.Array
    width: int = flax.struct.field(pytree_node=False)
    depth: int = flax.struct.field(pytree_node=False)
    fixed: bool = flax.struct.field(pytree_node=False, default=True)
    cache: Cache | None = None
    free_rows: int = flax.struct.field(pytree_node=False, default=0)


@flax.struct.dataclass
class Offer:
    """The candidates of a source: up to W at every distance.

    Attributes:
      tokens: [B, M, W] int32; those that follow whatever stands before them are ordered, the most probable first.
      known: [B, M, W] or [B, M, 1] bool, which of them there are.
      log_p: [B, M, W] float32, the chance that a candidate is right, given that its parent is.
      parent: [B, M, W] int32, the place of each one's parent among the candidates one distance nearer, anything at the
        first; None where a candidate may follow whatever stands before it, so that paths are products.
      drawn: None unless candidates were drawn independently of the text's noise.
      passes: [B] int32, of a draft model or a part of the base: those that made the draft, and of a draft model one
        over what the base has read; None where candidates take no passes.
      predicted: [B, M, W] bool, which candidates stand in the predicted text; None where no text is predicted.
    """

    tokens: jax.Array
    known: jax.Array
    log_p: jax.Array
    parent: jax.Array | None = None
    drawn: Drawn | None = None
    passes: jax.Array | None = None
    predicted: jax.Array | None = None

    def bits(self, source: int) -> jax.Array:
        """[B, M, W] int32, the bit of a source by its number, and `PREDICTED` where that holds."""
        own = jnp.full(self.tokens.shape, 1 << source, jnp.int32)
        return own if self.predicted is None else jnp.where(self.predicted, own | PREDICTED, own)

    @property
    def rank(self) -> jax.Array:
        """[B, M, W] int32, the place of each candidate among its siblings, the most probable first."""
        place = jnp.arange(self.tokens.shape[-1])
        if self.parent is None:
            return jnp.broadcast_to(place, self.tokens.shape)
        sibling, candidate = self.log_p[..., None, :], self.log_p[..., None]
        better = (sibling > candidate) | ((sibling == candidate) & (place < place[:, None]))
        return jnp.sum(self.siblings & better, axis=-1)

    @property
    def siblings(self) -> jax.Array:
        """[B, M, W, W] bool, which candidates [..., j] stand below the parent of each [..., i], itself included."""
        known = jnp.broadcast_to(self.known, self.tokens.shape)[..., None, :]
        if self.parent is None:
            return jnp.broadcast_to(known, (*self.tokens.shape, self.tokens.shape[-1]))
        return (self.above[..., None, :] == self.above[..., None]) & known

    @property
    def above(self) -> jax.Array:
        """[B, M, W] int32, `parent` with the root's place, 0, above all candidates at the first distance."""
        return self.parent.at[:, 0].set(0)


def run_if(wanted: jax.Array, run: Callable[[], PyTree]) -> PyTree:
    """The result of `run`, or zeros without running it."""
    shapes = jax.eval_shape(run)
    return lax.cond(wanted, run, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def calibrated(offer: Offer, calibration: jax.Array) -> Offer:
    """An offer whose log-probabilities x became a x + b, below 0, by calibration [M, 2]: a and b by distance.

    Rows may have calibrations of their own, [B, M, 2].
    """
    a, b = jnp.split(calibration[..., : offer.log_p.shape[-2], :], 2, axis=-1)  # [M, 1]
    x = offer.log_p
    return offer.replace(log_p=jnp.minimum(a * x + b, x / 1000))  # what is certain stays in order


def offer_ranked(context: DraftContext, logits: jax.Array, known: jax.Array) -> Offer:
    """A drafter's best tokens at each distance, ranked with the noise of the positions they are for.

    With an independent sampler that is drawing without replacement (Gumbel's top-k).

    Args:
      context: what to draft with.
      logits: [B, M, V'].
      known: [B, M] bool, distances that have candidates this time.
    """
    ahead = jnp.arange(1, logits.shape[1] + 1)
    tokens, log_p, log_q = rank(context, logits, context.position[:, None] + ahead)
    drawn = None
    if log_q is not None:
        drawn = Drawn(log_q, jnp.broadcast_to(ahead[:, None] - 1, tokens.shape))
    return Offer(tokens, known[..., None], log_p, None, drawn)


def rank(
    context: DraftContext, logits: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The best tokens by a drafter's logits, as many as are wanted.

    Args:
      context: what to draft with.
      logits: [B, X, V'].
      positions: [B, X] int32, or [B, 1] where all are for the same.

    Returns:
      Tokens [B, X, W] and their log-probabilities, noise included, the best first, or those drawn first; and what they
      were drawn from, [B, X, V], where the sampler is independent, else None.
    """
    base, sampler = context.base, context.sampler
    scores = sampler.filtered(logits)
    log_q = base.draft_whole(jax.nn.log_softmax(scores), -jnp.inf) if sampler.independent else None
    if sampler.sampling:
        scores += sampler.noise(context.seeds, positions, base.draft_ids(jnp.arange(scores.shape[-1])))
    best, index = best_of(scores, min(context.width, scores.shape[-1]))
    log_p = best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return base.draft_ids(index), log_p, log_q


def knowing_noise(context: DraftContext, offer: Offer) -> Offer:
    """An offer of tokens with their plain chances, once the noise of their positions is known.

    The base draws the token whose logit and noise are largest together. Of tokens with the chance P together, the
    largest sum is below s with a chance of exp(-P exp(-s)), whatever they are. Among siblings, whose plain chances are
    no more than estimates, it is shared by their sums.
    """
    if not context.sampler.sampling:
        return offer
    positions = context.position[:, None] + jnp.arange(1, offer.tokens.shape[1] + 1)
    text = context.sampler.replace(independent=False)  # what is looked up is not drawn: the base's draw judges it
    noise = text.noise(context.seeds, positions, offer.tokens)  # [B, M, W]
    scores, siblings = offer.log_p + noise, offer.siblings
    together = jax.nn.logsumexp(jnp.where(siblings, scores[..., None, :], -jnp.inf), axis=-1)
    others = 1 - jnp.sum(jnp.where(siblings, jnp.exp(offer.log_p)[..., None, :], 0.0), axis=-1)
    beats_others = -jnp.maximum(others, 0.0) * jnp.exp(-scores)
    knowing = jnp.where(offer.known, scores - together + beats_others, -jnp.inf)
    return offer.replace(log_p=text.pick(knowing, offer.log_p))
