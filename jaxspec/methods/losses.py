"""Losses: drafters learn the base's own distribution at the rows ahead, or the text it made."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import logsumexp

from jaxspec.decoding.method import Batch
from jaxspec.errors import UserError
from jaxspec.model.base import Base


def check_weights(name: str, alignment: float, labels: float) -> None:
    """Raise UserError for weights of the two parts of `future_loss` that leave nothing to learn."""
    if min(alignment, labels) < 0 or not alignment + labels > 0:
        raise UserError(
            f"{name}: alignment and labels must not be negative and not both 0, got {alignment} and {labels}"
        )


def divergence(p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p || q) [...] of two distributions given by their logits [..., V]: few passes over the vocabulary."""
    apart = jnp.sum(jax.nn.softmax(p) * (p - q), axis=-1)
    return apart - logsumexp(p, axis=-1) + logsumexp(q, axis=-1)


def _rows_to_run(frozen: jax.Array, source: jax.Array) -> tuple[jax.Array, tuple]:
    """The hidden states that predictions at rows `source` [B, G, M'] of texts [B, T, D] need, and their places there.

    Where there are more predictions than rows, what the base says at a row is worked out once for all of them. Else the
    states are those of the predictions, one by one.
    """
    rows = (jnp.arange(len(source))[:, None, None], source)
    return (frozen[rows], ()) if source[0].size < frozen.shape[1] else (frozen, rows)


def _from_base(student: jax.Array, base: Base, frozen: jax.Array, source: jax.Array, direction: str) -> jax.Array:
    """Divergence [B, G, M'] of predictions [B, G, M', V] from the base's own at rows `source` [B, G, M'] of a text."""
    states, at = _rows_to_run(frozen, source)
    teacher = jax.nn.log_softmax(base.draft_part(base.logits(states)))
    teacher = jax.lax.stop_gradient(teacher)  # constant even where the base is being tuned: its norm and lm_head too
    if direction == "reverse":
        return divergence(student, teacher[at])
    p = jax.lax.optimization_barrier(jnp.exp(teacher))  # or every prediction would compute it again
    entropy = -jnp.sum(p * teacher, axis=-1)
    return logsumexp(student, axis=-1) - jnp.sum(p[at] * student, axis=-1) - entropy[at]


def overlap(student: jax.Array, base: Base, frozen: jax.Array, source: jax.Array) -> jax.Array:
    """The chance [B, G, M'] that rejection sampling takes a token drawn from predictions: the sum of min(p, q).

    Args:
      student: [B, G, M', V'] logits.
      base: the frozen decoder.
      frozen: [B, T, D], its final hidden states of the texts.
      source: [B, G, M'] int32, the rows whose own predictions p are; V of them, also where fewer are drafted.
    """
    states, at = _rows_to_run(frozen, source)
    p = base.draft_part(jax.nn.softmax(base.logits(states)))
    p = jax.lax.optimization_barrier(p)  # or every prediction would compute it again
    return jnp.sum(jnp.minimum(p[at], jax.nn.softmax(student)), axis=-1)


def answer_entropy(base: Base, text: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """-log P of every token but the first, [B, T - 1], and which of them belong to answers.

    Args:
      base: the decoder.
      text: [B, T, D], its final hidden states of the texts.
      batch: the texts.
    """
    logits = base.logits(text[:, :-1])
    at_token = jnp.take_along_axis(logits, batch.tokens[:, 1:, None], axis=-1)[..., 0]
    place = jnp.arange(1, batch.tokens.shape[1])
    is_answer = (place >= batch.starts[:, None]) & (place < batch.lengths[:, None])
    return logsumexp(logits, axis=-1) - at_token, is_answer


def targets(batch: Batch, distances: Sequence[int]) -> jax.Array:
    """The predictions at the M' distances that have a token of the text as their target, [B, G, M'] bool."""
    points = batch.points[..., None]
    return (points >= 0) & (points + np.array(distances) + 1 < batch.lengths[:, None, None])


def future_loss(
    student: jax.Array,
    base: Base,
    frozen: jax.Array,
    batch: Batch,
    distances: Sequence[int],
    alignment: float = 1.0,
    labels: float = 0.0,
    direction: str = "forward",
    decay: float = 1.0,
    counts: jax.Array | float = 1.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of predictions of tokens ahead, averaged over all targets there are, and their accuracies.

    A prediction at distance d of the token at p is held against the base's own at p + d, or against the text at
    p + d + 1. With a draft vocabulary both are over its tokens, and other tokens of the text teach nothing.

    Args:
      student: [B, G, M', V'] logits at every insertion point.
      base: the frozen decoder.
      frozen: [B, T, D], its final hidden states of the texts.
      batch: the texts.
      distances: M' distances.
      alignment: weight of the divergence from the base's own prediction.
      labels: weight of the cross-entropy of the text.
      direction: of the divergence: `forward`, KL(base || student), or `reverse`.
      decay: distance d counts decay ** (d - 1).
      counts: [B, 1, 1], weight of every target of a text in the average, at least 1.
    """
    distances = np.array(distances)
    source = batch.points[..., None] + distances  # the row whose distribution is the target
    has_target = targets(batch, distances)
    source = jnp.minimum(source, batch.tokens.shape[1] - 2)
    rows = jnp.arange(source.shape[0])[:, None, None]
    label = base.draft_places(batch.tokens[rows, source + 1])
    at_label = jnp.take_along_axis(student, jnp.maximum(label, 0)[..., None], axis=-1)[..., 0]
    each = jnp.zeros(())
    if alignment:
        each += alignment * _from_base(student, base, frozen, source, direction)
    if labels:
        each += labels * (logsumexp(student, axis=-1) - at_label)
    right = (at_label >= jnp.max(student, axis=-1)) & has_target & (label >= 0)
    accuracy = jnp.sum(right, axis=(0, 1)) / jnp.maximum(jnp.sum(has_target, axis=(0, 1)), 1)
    weights = (has_target & (label >= 0)) * counts
    loss = jnp.sum(each * weights * decay ** (distances - 1)) / jnp.maximum(jnp.sum(weights), 1)
    return loss, {f"top1@{d}": accuracy[i] for i, d in enumerate(distances)}
