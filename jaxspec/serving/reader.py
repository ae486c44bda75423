"""Reads prompts chunk by chunk. Beginnings that prompts share are read once: former turns of a chat, system prompts."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.parts import cut, joined
from jaxspec.decoding.penalties import tokens_of
from jaxspec.decoding.prompt import read, start
from jaxspec.decoding.scores import Scores, score
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.errors import UserError
from jaxspec.generation.job import NOT_FINITE
from jaxspec.generation.prompts import pad_predictions, pad_tokens
from jaxspec.model.base import Base
from jaxspec.serving.prefixes import Prefixes
from jaxspec.serving.request import Request


class PromptReader:
    """Reader of one request's prompt, into a row of its own.

    Args:
      base: the base, in the form that is fastest for a chunk's rows.
      decoding: constants of decoding one row, with the request's settings.
      request: the request.
      capacity: S, slots of the cache.
      best: K, number of most probable tokens whose scores the state keeps; None keeps no scores.
      prefixes: readings of beginnings that need not be read again.

    Attributes:
      cached: number of tokens that were not read again.
      scores: scores of the prompt's tokens from the second on, one entry per chunk, if the request asks for them.
    """

    def __init__(
        self, base: Base, decoding: Decoding, request: Request, capacity: int, best: int | None, prefixes: Prefixes
    ):
        length = np.array([len(request.ids) + request.max_new_tokens], np.int32)
        self._base, self._decoding = base.for_texts(length), decoding.replace(base=decoding.base.for_texts(length))
        self._request, self._capacity, self._best = request, capacity, best
        self._seeds = np.array([request.seed % 2**32], np.uint32)
        self._prefixes = prefixes
        self._long = self._base.long is not None and bool(self._base.long[0])
        parts = [] if request.prompt_logprobs else prefixes.find(request.ids, self._long)  # they have no such scores
        self.cached = self._next = len(parts) * prefixes.width
        self._reading = joined(self._base, self._decoding, parts, capacity)
        self.scores: list[Scores] = []

    @property
    def finished(self) -> bool:
        """Whether the whole prompt was read."""
        return self._next >= len(self._request.ids)

    def read_chunk(self) -> None:
        """Read the next chunk. Raises UserError where scores are asked for and the base's logits are not finite."""
        ids, begin, W = self._request.ids, self._next, self._prefixes.width
        self._next = min(begin + W, len(ids))
        chunk = (*pad_tokens([ids[begin : self._next]], W), self._seeds)
        self._reading = read(self._base, self._decoding, self._reading, *chunk, capacity=self._capacity)
        if self._next == begin + W:
            self._prefixes.keep(ids[: self._next], lambda: cut(self._decoding, self._reading), self._long)
        if self._request.prompt_logprobs:
            following = ids[begin + 1 : begin + W + 1]
            scores = _scores(self._base, self._reading.last, pad_tokens([following], W)[0], best=self._best)
            scores = jax.tree.map(lambda x: x[0, : len(following)], jax.device_get(scores))
            if self._decoding.checks_logits and not np.isfinite(scores.chosen).all():
                raise UserError(NOT_FINITE)
            self.scores.append(scores)

    def state(self, width: int, idle: int = 0) -> DecodeState:
        """The state after the prompt, with room for `width` tokens. It takes over the buffers of the reading.

        `idle` is `Pace.idle` of the texts that it joins.
        """
        limits, reading = np.array([self._request.max_new_tokens], np.int32), self._reading
        rows, has, predicted = (reading.memory, reading.last, limits, self._seeds), None, None
        if self._decoding.sampler.penalties is not None:
            has = tokens_of([self._request.ids], self._base.vocab_size)
        if self._decoding.drafter.follows_prediction(self._base):  # of one width, so that rows are alike
            predicted = pad_predictions([self._request.prediction], width + 2)
        given = {"prompt_tokens": has, "predicted": predicted, "idle": np.int32(idle)}
        return start(self._base, self._decoding, *rows, **given, width=width, best=self._best)


@functools.partial(jax.jit, static_argnames=("best",))
def _scores(base: Base, chunk: ReadChunk, following: jax.Array, *, best: int) -> Scores:
    """Scores of the tokens [1, W] int32 that follow those of a chunk [1, W]."""
    return score(base.logits(chunk.hidden), following, best)
