"""Is the output really the same? Where two answers part, and how close the decision was."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.penalties import Seen, tokens_of
from jaxspec.decoding.sampling import Sampler, make_sampler
from jaxspec.generation.job import bucket
from jaxspec.model.attention import causal_context
from jaxspec.model.base import Base
from jaxspec.weights.model import Model

NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first difference between two answers to one prompt.

    Attributes:
      index: position in the answer.
      tokens: what each answer has there; -1 where it has ended.
      gap: score of the better of the two tokens minus that of the other, with sampling noise included; below
        `NEAR_TIE` the two passes merely rounded differently.
    """

    index: int
    tokens: tuple[int, int]
    gap: float

    def as_json(self) -> dict[str, Any]:
        """Plain values. JSON has no infinity: a gap is null where an answer has ended, or a filter bars one token."""
        return dataclasses.asdict(self) | {"gap": self.gap if math.isfinite(self.gap) else None}


def first_divergence(
    model: Model,
    prompt: Sequence[int],
    ours: Sequence[int],
    reference: Sequence[int],
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> Divergence | None:
    """Compare an answer with autoregressive decoding's.

    Args:
      model: the base of both.
      prompt: ids of the prompt.
      ours: ids of one answer.
      reference: ids of the other.
      sampling: how both were drawn.
      seed: of both.
      max_new_tokens: limit of both, which frequencies may depend on (`Base.for_texts`); None: the longer one's tokens.

    Returns:
      None where they are identical.
    """
    if list(ours) == list(reference):
        return None
    pairs = itertools.zip_longest(ours, reference, fillvalue=-1)
    index, pair = next((i, pair) for i, pair in enumerate(pairs) if len({*pair}) > 1)
    if -1 in pair:  # one stopped where the other went on: no tie can explain that
        return Divergence(index, pair, float("inf"))
    text = [*prompt, *reference[:index]]
    tokens = np.zeros((1, bucket(len(text))), np.int32)
    tokens[0, : len(text)] = text
    limit = max(len(ours), len(reference)) if max_new_tokens is None else max_new_tokens
    base = model.base.for_texts(np.array([len(prompt) + limit], np.int32))
    sampler, seen = make_sampler(sampling), None
    if sampler.penalties is not None:
        counts = np.bincount(np.asarray(reference[:index], np.int32), minlength=base.vocab_size)
        seen = Seen(tokens_of([prompt], base.vocab_size), counts[None].astype(np.int32))
    scores = np.asarray(_scores(base, sampler, tokens, np.int32(len(text)), jnp.uint32(seed % 2**32), seen))
    return Divergence(index, pair, float(abs(scores[pair[0]] - scores[pair[1]])))


@jax.jit
def _scores(
    base: Base, sampler: Sampler, tokens: jax.Array, length: jax.Array, seed: jax.Array, seen: Seen | None
) -> jax.Array:
    """[V]: what decides the token behind the first `length` tokens of [1, T]."""
    hidden, _ = base.rows(base.embed(tokens), causal_context(*tokens.shape))
    logits = base.logits(hidden[:, length - 1])
    if seen is not None:
        logits = sampler.penalties(logits[:, None], seen, seen.counts[:, None])[:, 0]
    noise = sampler.noise(seed[None], length[None, None], jnp.arange(base.vocab_size))[:, 0]
    return (sampler.filtered(logits) + noise)[0]
