"""Drafts: what a step verifies, what came of it, and how candidates become a draft."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.drafting.sampling import Sampler
from jaxspec.drafting.tree import Tree
from jaxspec.model.base import Base

PyTree = Any


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
    """Where sampled candidates came from.

    Attributes:
      log_q: [B, X, V] float32, distributions, filters and temperature included.
      place: [B, N] int32, which of them each node's token was drawn from. Siblings share one: they are drawn without
        replacement, in the order of their ranks.
    """

    log_q: jax.Array
    place: jax.Array


@flax.struct.dataclass
class Draft:
    """What a step verifies.

    Attributes:
      tokens: [B, N] int32, token of every node; node 0, the root, is the newest token emitted.
      valid: [B, N] bool; False for nodes without a candidate (a first step, an n-gram miss, padding).
      drawn: None unless candidates were drawn independently of the text's noise.
    """

    tokens: jax.Array
    valid: jax.Array
    drawn: Drawn | None = None


@flax.struct.dataclass
class Drafting:
    """What a method drafts with.

    Attributes:
      trainable: the adapter's pytree, `prepared`.
      base: the frozen decoder, which knows what may be drafted.
      tree: the tree to fill, arrays with a batch axis.
      sampler: ranks candidates with the noise of the positions they are for, or draws them independently.
      seeds: [B] uint32.
    """

    trainable: PyTree
    base: Base
    tree: Tree
    sampler: Sampler
    seeds: jax.Array


@flax.struct.dataclass
class Candidates:
    """Tokens that may come, at some places.

    Attributes:
      tokens: [B, X, K] int32, the best first, or those drawn first.
      log_q: [B, X, V], what they were drawn from, where the sampler is independent; else None.
    """

    tokens: jax.Array
    log_q: jax.Array | None


def no_draft(drafting: Drafting, root: jax.Array) -> Draft:
    """The newest tokens [B] alone, without candidates."""
    tree, B = drafting.tree, len(root)
    is_root = jnp.broadcast_to(jnp.arange(tree.num_nodes) == 0, (B, tree.num_nodes))
    drawn = None
    if drafting.sampler.independent:
        nothing = jnp.zeros((B, tree.max_depth, drafting.base.vocab_size))
        drawn = Drawn(nothing, jnp.zeros(is_root.shape, jnp.int32))
    return Draft(jnp.where(is_root, root[:, None], 0), is_root, drawn)


def rank_candidates(drafting: Drafting, logits: jax.Array, positions: jax.Array) -> Candidates:
    """The best tokens by a drafter's logits, as many as the tree has ranks, ranked with their positions' noise.

    With an independent sampler that is drawing without replacement (Gumbel's top-k).

    Args:
      drafting: the tree, the sampler, and the base, which knows what may be drafted.
      logits: [B, X, V'].
      positions: [B, X] int32, or [B, 1] where all are for the same.
    """
    base, sampler = drafting.base, drafting.sampler
    scores = sampler.filtered(logits)
    log_q = base.draft_whole(jax.nn.log_softmax(scores), -jnp.inf) if sampler.independent else None
    if sampler.sampling:
        scores += sampler.noise(drafting.seeds, positions, base.draft_ids(jnp.arange(scores.shape[-1])))
    return Candidates(base.draft_ids(jax.lax.top_k(scores, drafting.tree.max_rank)[1]), log_q)


def draft_from_candidates(tree: Tree, root: jax.Array, candidates: Candidates, known: jax.Array) -> Draft:
    """Fill a tree from candidates per distance.

    Args:
      tree: arrays with a batch axis.
      root: [B] int32, the newest token.
      candidates: of M distances, by distance and rank; nodes of further ranks stay empty.
      known: [B, M] bool, distances that have candidates this time.
    """
    place = jnp.maximum(tree.depth - 1, 0)
    index = (jnp.arange(root.shape[0])[:, None], place)
    is_root = tree.depth == 0
    tokens = jnp.where(is_root, root[:, None], candidates.tokens[(*index, tree.rank)])
    filled = known[index]
    if candidates.tokens.shape[-1] < tree.max_rank:
        filled &= tree.rank < candidates.tokens.shape[-1]
    drawn = None if candidates.log_q is None else Drawn(candidates.log_q, place)
    return Draft(tokens, tree.live & (is_root | filled), drawn)
