"""Drafting along paths: a tree of candidates level by level, the children of every node from that node's own path.

    level 0        newest token                  expands 1
    level 1        a     b     c                 expands a, b
    level 2      d e f  g h i                    expands d, g; the others are leaves

A method says how a level's nodes come to logits; which nodes expand, and what is offered of their children, is here. So
is where a draft ends: a level without nodes that are probable enough costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import DraftContext, Drawn, Offer, rank, run_if
from jaxspec.decoding.tree import Tree


@flax.struct.dataclass
class Parents:
    """The nodes of one level that expand.

    Attributes:
      path: [B, W, level + 1] int32, the tokens from the newest one down to each of them, itself included.
      ancestors: [B, W, level] int32, of each one's ancestor at every level above, from the root down, its place among
        the nodes that expanded there.
      known: [B, W] bool, which of them there are.
      level: how far they are from the newest token; 0 is the newest token itself (static).
    """

    path: jax.Array
    ancestors: jax.Array
    known: jax.Array
    level: int = flax.struct.field(pytree_node=False)

    @property
    def tokens(self) -> jax.Array:
        """[B, W] int32, their own."""
        return self.path[..., -1]


Expand = Callable[[Parents, Sequence[Any]], tuple[jax.Array, Any]]
LogFactor = Callable[[Parents], jax.Array]


def offer_levels(
    context: DraftContext,
    expand: Expand,
    best: bool = False,
    confidence: float = 0.0,
    log_factor: LogFactor | None = None,
) -> Offer:
    """Level by level along the tree.

    Args:
      context: what to draft with.
      expand: of the nodes of a level, and what it has returned of every level above, to logits [B, W, V'] of what
        follows each and what the levels below need of them.
      best: the most probable nodes of each level expand, as many as the tree has inner ones there, in place of the
        tree's own (EAGLE-2, section 4.1): for drafts that do not keep to the tree.
      confidence: of these only those whose whole path is more probable than this; below the root, a level without any
        is not expanded, unless its rows are free.
      log_factor: of the nodes of a level to the log of a factor [B, W] of the chances of what follows each; None: 1.
    """
    tree, B, K = context.tree, len(context.root), min(context.width, context.base.num_drafts)
    rows, has_children = jnp.arange(B)[:, None], _has_children(tree)
    at_root = jnp.where(context.active, 0.0, -jnp.inf)[:, None]
    place = jnp.zeros_like(tree.depth)  # of every node of the tree among the candidates of its level
    # of the level's candidates: their paths [B, X, level + 1], their parents' ancestors and chances of the whole path
    paths, lineages, total = context.root[:, None, None], jnp.zeros((B, 1, 0), jnp.int32), at_root
    levels, log_q, drawn_before, expanded = [], [], 0, []
    least = math.log(confidence) if confidence else -math.inf
    for level, width in enumerate(tree.inner):
        if best:
            log_p, above = jax.lax.top_k(total, min(width, total.shape[1]))
            known = log_p > least
        else:
            expands = has_children & (tree.depth == level)
            expanding = _nodes(expands, width)  # [B, W]
            above = jnp.take_along_axis(place, expanding, axis=1)
            known = jnp.arange(width) < jnp.sum(expands, axis=1)[:, None]
        W, path, ancestors = above.shape[1], paths[rows, above], lineages[rows, above]
        parents = Parents(path, ancestors, known, level)
        run = functools.partial(expand, parents, tuple(expanded))
        may_be_skipped = best and level and confidence and known.size > context.free_rows
        logits, needed = run_if(jnp.any(known), run) if may_be_skipped else run()
        expanded.append(needed)
        tokens, log_p, q = rank(context, logits, context.position[:, None] + level + 1)
        if log_factor is not None:
            log_p += log_factor(parents)[..., None]
        follows = jnp.broadcast_to(path[:, :, None], (B, W, K, level + 1))
        paths = jnp.concatenate([follows, tokens[..., None]], axis=-1).reshape(B, W * K, level + 2)
        lineage = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[:, None], (B, W, 1))
        lineages = jnp.repeat(jnp.concatenate([ancestors, lineage], axis=-1), K, axis=1)
        total = jnp.where(known[..., None], jnp.take_along_axis(total, above, axis=1)[..., None] + log_p, -jnp.inf)
        total = total.reshape(B, W * K)
        parts = (tokens, known[..., None], log_p, above[..., None], (drawn_before + jnp.arange(W))[:, None])
        levels.append([jnp.broadcast_to(x, tokens.shape).reshape(B, W * K) for x in parts])
        log_q.append(q)
        drawn_before += W
        if not best:
            number = jnp.argmax(expanding[:, None] == tree.parent[..., None], axis=-1)  # [B, N], of each node's parent
            place = jnp.where(tree.depth == level + 1, number * K + jnp.minimum(tree.rank, K - 1), place)
    most = max(level[0].shape[1] for level in levels)
    tokens, known, log_p, parent, drawn_from = (
        jnp.stack([jnp.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in part], axis=1)
        for part in zip(*levels, strict=True)
    )
    drawn = Drawn(jnp.concatenate(log_q, axis=1), drawn_from) if context.sampler.independent else None
    return Offer(tokens, known, log_p, parent, drawn)


def _nodes(chosen: jax.Array, count: int) -> jax.Array:
    """Indices [B, count] of the chosen nodes [B, N]; the root where there are fewer."""
    return jax.vmap(lambda row: jnp.nonzero(row, size=count, fill_value=0)[0])(chosen)


def _has_children(tree: Tree) -> jax.Array:
    """[B, N] bool."""
    is_child = tree.live & (tree.depth > 0)
    return jnp.any((tree.parent[:, None] == jnp.arange(tree.num_nodes)[:, None]) & is_child[:, None], axis=-1)
