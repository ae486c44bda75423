"""Reads one request's prompt, chunk by chunk."""

from __future__ import annotations

import jax
import numpy as np

from jaxspec.decoding.scores import Scores
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.model.base import Base
from jaxspec.serving.prefixes import Prefixes
from jaxspec.serving.reading import Chunk, End, nothing_read, prompt_scores, read, ready
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
        self._end: End | None = None
        self._prefixes, self._shared = prefixes, prefixes.shared(request.ids)
        # Of what is not read again there are no log-probabilities.
        self._next, known = (0, None) if request.prompt_logprobs else prefixes.find(request.ids)
        self._reading = known or nothing_read(decoding, capacity=capacity)
        self.scores: list[Scores] = []

    @property
    def finished(self) -> bool:
        """Whether the whole prompt was read."""
        return self._next >= len(self._request.ids)

    def read_on(self) -> None:
        """Read the next chunk."""
        ids, start, W = self._request.ids, self._next, self._width
        part = ids[start : start + W + 1]
        tokens = np.zeros((1, W + 1), np.int32)
        tokens[0, : len(part)] = part
        self._next = min(start + W, len(ids))
        length, last = np.array([self._next - start], np.int32), np.array([self.finished])
        chunk = Chunk(tokens, length, last, self._seeds)
        self._reading, self._end = read(self._base, self._decoding, self._reading, chunk)
        if self._next == self._shared:
            self._prefixes.keep(ids[: self._next + 1], self._reading)
        if self._request.prompt_logprobs:
            scores = jax.device_get(prompt_scores(self._base, self._end, chunk, best=self._best))
            self.scores.append(jax.tree.map(lambda x: x[0, : len(part) - 1], scores))

    def state(self, width: int) -> DecodeState:
        """What decoding begins with; the reader has nothing any more."""
        limits = np.array([self._request.max_new_tokens], np.int32)
        return ready(self._decoding, self._reading, self._end, limits, self._seeds, width=width, best=self._best)
