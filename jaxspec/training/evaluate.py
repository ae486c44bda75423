"""Accuracy of a drafter on held-out text, by distance and rank at every position; and the perplexity of a base."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Method
from jaxspec.decoding.sampling import Sampler, make_sampler
from jaxspec.generation.job import bucket
from jaxspec.methods.losses import answer_entropy
from jaxspec.model.base import Base
from jaxspec.model.decoder import for_products
from jaxspec.model.rows import read_layers
from jaxspec.parallel.processes import host
from jaxspec.parallel.sharding import mesh_of, parts_of_batch, put_batch
from jaxspec.training.calibration import BINS_PER_NAT, NATS, fit
from jaxspec.training.data import AnsweredPrompt, insertion_points, make_batch
from jaxspec.trees.spec import RANKS

_BATCH = 2
_POINTS = 256  # insertion points of an answer evaluated at a time, to bound the memory of long ones


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Accuracy of a drafter on held-out answers: the base's, or given ones.

    Attributes:
      by_rank: [M, 10], how often the rank-k candidate at distance m + 1 is the token that follows.
      positions: insertion points counted at distance 1.
      calibration: [M][2], turns the drafter's scores into probabilities; see `jaxspec.training.calibration`.
      ranks: for every answer, the shortest first, [P, M] int: at each of its P insertion points, the rank from 0 of the
        token that follows at each distance; -1 where none follows or it is never drafted.
    """

    by_rank: np.ndarray
    positions: int
    calibration: list[list[float]]
    ranks: list[np.ndarray]


def top(by_rank: Sequence[Sequence[float]] | np.ndarray, k: int) -> np.ndarray:
    """[M], how often the token is among the k best candidates, from accuracies [M][K] per distance and rank."""
    return np.array(by_rank)[:, :k].sum(axis=1)


def lost_distances(by_rank: Sequence[Sequence[float]]) -> list[int]:
    """Distances whose predictor collapsed in training: below 2/3 of a farther one, or below 0.45 of the one before.

    The test compares accuracies of the five best candidates, from [M][K] per distance and rank. No training without a
    collapse has been that low.
    """
    tops = top(by_rank, 5)
    overtaken = {d for d in range(1, len(tops)) if tops[d - 1] < 2 / 3 * max(tops[d:])}
    return sorted(overtaken | {d for d in range(2, len(tops) + 1) if tops[d - 1] < 0.45 * tops[d - 2]})


@functools.partial(jax.jit, static_argnames=("method",))
def _counts(
    method: Method, trainable: PyTree, base: Base, batch: Batch, sampler: Sampler, seed: jax.Array
) -> tuple[jax.Array, ...]:
    """Counts per distance: hits by rank [M, 10], positions [M], and candidates and hits by log-probability [M, X].

    Also the rank of every token that follows, [B, G, M], -1 where it is never drafted.
    """
    trainable = for_products(trainable, base.dtype)
    logits, factors = method.predictions_and_factors(trainable, base, batch)  # [B, G, M, V], [B, G, M, 1]
    target = batch.points[..., None] + 1 + np.arange(1, method.facts(base.decoder.config).distances + 1)  # [B, G, M]
    counted = (batch.points[..., None] >= 0) & (target < batch.lengths[:, None, None])
    rows = jnp.arange(target.shape[0])[:, None, None]
    labels = batch.tokens[rows, jnp.minimum(target, batch.tokens.shape[1] - 1)]
    seeds = jnp.full(target.shape[0], seed)
    noise = sampler.noise(seeds, target.reshape(target.shape[0], -1), jnp.arange(base.vocab_size))
    scores = sampler.filtered(logits) + (noise.reshape(logits.shape) if sampler.active[0] else 0)
    score = jnp.take_along_axis(scores, labels[..., None], axis=-1)
    rank = jnp.sum(scores > score, axis=-1)
    possible = counted & jnp.isfinite(score[..., 0])  # what the filters drop is never drafted
    hits = (rank[..., None] == np.arange(RANKS)) & possible[..., None]
    best, _ = jax.lax.top_k(scores, min(RANKS, scores.shape[-1]))
    log_p = best - jax.nn.logsumexp(scores, axis=-1, keepdims=True) + factors
    drafted = jnp.cumprod(jnp.any(hits, axis=-1), axis=-1, dtype=jnp.int32)  # up to each distance, the text itself
    reached = counted & (jnp.pad(drafted, ((0, 0), (0, 0), (1, 0)), constant_values=1)[..., :-1] > 0)
    place = jnp.where(reached[..., None], jnp.floor(-log_p * BINS_PER_NAT), -1).astype(jnp.int32)
    in_bin = place[..., None] == np.arange(NATS * BINS_PER_NAT)  # [B, G, M, 10, X]
    right = hits[..., : best.shape[-1], None] & in_bin
    sums = *(jnp.sum(x, axis=(0, 1)) for x in (hits, counted)), *(jnp.sum(x, axis=(0, 1, 3)) for x in (in_bin, right))
    return *sums, jnp.where(possible, rank, -1)


def evaluate(
    method: Method,
    trainable: PyTree,
    base: Base,
    answers: Sequence[AnsweredPrompt],
    progress: Callable[[int], None] = lambda done: None,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
) -> Accuracy:
    """Measure accuracies at every position of held-out answers.

    Candidates are ranked as decoding ranks them: with the noise of the position they are for.

    Args:
      method: the method, with its settings.
      trainable: its trainable pytree.
      base: the frozen decoder.
      answers: held-out answers.
      progress: called with the number of answers done.
      sampling: sampling settings that the answers were drawn with.
      seed: their sampling seed.
    """
    sampler, counts, ranks = make_sampler(sampling), [], []
    for done, batch in _batches(answers, base):
        parts, by_part = -(-batch.points.shape[1] // _POINTS), []
        for points in np.split(batch.points, parts, axis=1):
            part = put_batch(batch.replace(points=points), mesh_of(base.params))
            *sums, rank = map(host, _counts(method, trainable, base, part, sampler, np.uint32(seed)))
            counts.append([x.astype(float) for x in sums])
            by_part.append(rank)
        of_batch = np.concatenate(by_part, axis=1)
        ranks += [row[points >= 0] for row, points in zip(of_batch, batch.points, strict=True)]
        progress(done)
    hits, counted, tried, right = map(sum, zip(*counts, strict=True))
    return Accuracy(hits / np.maximum(counted, 1)[:, None], int(counted[0]), fit(tried, right), ranks[: len(answers)])


def _batches(answers: Sequence[AnsweredPrompt], base: Base) -> Iterator[tuple[int, Batch]]:
    """Batches of answers of similar length with all their insertion points, on the host, and the answers so far."""
    size = max(_BATCH, parts_of_batch(mesh_of(base.params)))
    length = bucket(max(len(a.prompt_tokens) + len(a.answer_tokens) for a in answers), 64, 64)
    ordered = sorted(answers, key=lambda a: len(a.answer_tokens))
    points = [insertion_points(a, length) for a in ordered]
    most = 0 if jax.default_backend() == "cpu" else max(map(len, points))  # elsewhere padding is cheaper than compiling
    for first in range(0, len(ordered), size):
        group, owned = ordered[first : first + size], points[first : first + size]
        done, missing = first + len(group), size - len(group)
        groups = bucket(max(most, *map(len, owned)), 32, _POINTS)
        padding = [AnsweredPrompt([0], [])] * missing, [np.arange(0)] * missing
        yield done, make_batch(group + padding[0], owned + padding[1], length, groups)


@jax.jit
def _entropy(base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sums of -log P over answer tokens [B], and the numbers of tokens [B]."""
    text, _, _ = read_layers(base, batch.tokens, ())
    entropy, is_answer = answer_entropy(base, text, batch)
    return jnp.sum(entropy * is_answer, axis=1), jnp.sum(is_answer, axis=1)


def answer_entropies(
    base: Base, answers: Sequence[AnsweredPrompt], progress: Callable[[int], None] = lambda done: None
) -> np.ndarray:
    """For every answer the sum of -log P over its tokens, and their number, [n, 2]; the shortest answer first.

    `progress` is called with the number of answers done.
    """
    sums = []
    for done, batch in _batches(answers, base):
        batch = put_batch(batch, mesh_of(base.params))
        sums.append(np.stack([host(value) for value in _entropy(base, batch)], axis=1).astype(float))
        progress(done)
    return np.concatenate(sums)[: len(answers)]


def perplexity(entropies: np.ndarray) -> float:
    """Perplexity over the tokens of all answers, from `answer_entropies`."""
    total, count = entropies.sum(axis=0)
    return float(np.exp(total / max(count, 1)))
