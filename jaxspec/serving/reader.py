"""Reads one request's prompt, chunk by chunk."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.prompt import read, start
from jaxspec.decoding.scores import Scores, score
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.generation.prompts import pad_tokens
from jaxspec.model.base import Base
from jaxspec.serving.prefixes import Prefixes
from jaxspec.serving.request import Request


class PromptReader:
    """Reads one request's prompt into a row of its own.

    Args:
      base: in the form that is fastest for a chunk's rows.
      decoding: of one row, with the request's settings.
      request: whose prompt.
      width: tokens of a chunk.
      capacity: slots of the cache.
      best: K, scores to keep; None where there is no room for any.
      prefixes: what need not be read again.
    """

    def __init__(
        self,
        base: Base,
        decoding: Decoding,
        request: Request,
        width: int,
        capacity: int,
        best: int | None,
        prefixes: Prefixes,
    ):
        self._base, self._decoding, self._request, self._width, self._best = base, decoding, request, width, best
        self._seeds = np.array([request.seed % 2**32], np.uint32)
        self._capacity, self._prefixes, self._shared = capacity, prefixes, prefixes.shared(request.ids)
        # Of what is not read again there are no log-probabilities.
        self._next, self._reading = (0, None) if request.prompt_logprobs else prefixes.find(request.ids)
        self.scores: list[Scores] = []

    @property
    def finished(self) -> bool:
        """Whether the whole prompt was read."""
        return self._next >= len(self._request.ids)

    def read_on(self) -> None:
        """Read the next chunk."""
        ids, begin, W = self._request.ids, self._next, self._width
        self._next = min(begin + W, len(ids))
        chunk = (*pad_tokens([ids[begin : self._next]], W), self._seeds)
        self._reading = read(self._base, self._decoding, self._reading, *chunk, capacity=self._capacity)
        if self._next == self._shared:
            self._prefixes.keep(ids[: self._next], self._reading)
        if self._request.prompt_logprobs:
            following = ids[begin + 1 : begin + W + 1]
            scores = _scores(self._base, self._reading.last, pad_tokens([following], W)[0], best=self._best)
            self.scores.append(jax.tree.map(lambda x: x[0, : len(following)], jax.device_get(scores)))

    def state(self, width: int) -> DecodeState:
        """What decoding begins with; the reader has nothing any more."""
        limits, reading = np.array([self._request.max_new_tokens], np.int32), self._reading
        rows = (reading.memory, reading.last, limits, self._seeds)
        return start(self._base, self._decoding, *rows, width=width, best=self._best)


@functools.partial(jax.jit, static_argnames=("best",))
def _scores(base: Base, chunk: ReadChunk, following: jax.Array, *, best: int) -> Scores:
    """Scores of the tokens after each of a chunk [1, W]."""
    return score(base.logits(chunk.hidden), following, best)
