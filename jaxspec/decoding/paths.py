"""Paths of a verified tree: the longest one that survives, and the token after it. Pure functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.draft import Accepted, Draft
from jaxspec.decoding.tree import Tree


def follow(draft: Draft, targets: jax.Array) -> Accepted:
    """The longest path of candidates each of which is the token that comes after its parent, of `targets` [B, N]."""
    return longest(draft.tree, draft.valid & right(draft, targets), targets)


def walk(draft: Draft, target: Callable[[jax.Array], jax.Array]) -> Accepted:
    """What `follow` finds, from the root down, with no more targets than there are nodes on the longest of the paths.

    Args:
      draft: what to verify; siblings of the same token have the same target.
      target: nodes [B] int32 to the tokens [B] int32 that come after them.
    """
    tree, root = draft.tree, jnp.zeros(len(draft.tokens), jnp.int32)
    may_follow = draft.valid & (tree.depth > 0)

    def descend(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        reached, node, _ = state  # [B, N] bool, of one depth; in rows that have stopped none
        node = jnp.where(jnp.any(reached, axis=1), jnp.argmax(reached, axis=1).astype(jnp.int32), node)
        after = target(node)
        below = jnp.take_along_axis(reached, tree.parent, axis=1) & may_follow
        return below & (draft.tokens == after[:, None]), node, after

    start = (jnp.zeros_like(may_follow).at[:, 0].set(True), root, root)
    _, node, after = lax.while_loop(lambda state: jnp.any(state[0]), descend, start)
    return _outcome(tree, node, after)


def right(draft: Draft, targets: jax.Array) -> jax.Array:
    """[B, N] bool, whether a node is the token after its parent, of `targets` [B, N]."""
    return draft.tokens == jnp.take_along_axis(targets, draft.tree.parent, axis=1)


def longest(tree: Tree, survives: jax.Array, targets: jax.Array, log_p: jax.Array | None = None) -> Accepted:
    """The deepest node all of whose path survives, its path and its bonus.

    Args:
      tree: arrays with a batch axis.
      survives: [B, N] bool, whether a node may follow its parent; the root's value does not matter.
      targets: [B, N] int32, the base's token after each node.
      log_p: [B, N], of a node given its parent; of several deepest nodes the one whose path is the likeliest wins,
        without it the first.
    """
    survives = survives | (tree.depth == 0)
    path_survives = jnp.all(survives[:, None] | ~tree.ancestors, axis=-1) & tree.live
    score = jnp.where(path_survives, tree.depth, -1)
    if log_p is not None:
        of_path = jnp.sum(jnp.where(tree.ancestors & (tree.depth > 0)[:, None], log_p[:, None], 0), axis=-1)
        score = jnp.where(score == jnp.max(score, axis=-1, keepdims=True), of_path, -jnp.inf)
    node = jnp.argmax(score, axis=-1).astype(jnp.int32)  # [B]; the first of several
    return _outcome(tree, node, targets[jnp.arange(len(node)), node])


def _outcome(tree: Tree, node: jax.Array, bonus: jax.Array) -> Accepted:
    """The path to the last accepted node [B], with the token [B] after it."""
    rows = jnp.arange(len(node))
    length, on_path = tree.depth[rows, node], tree.ancestors[rows, node]
    steps = jnp.minimum(jnp.arange(tree.max_depth + 1), length[:, None])  # [B, P + 1]
    path = jnp.argmax(on_path[:, None] & (tree.depth[:, None] == steps[..., None]), axis=-1)
    return Accepted(path.astype(jnp.int32), length, node, bonus)
