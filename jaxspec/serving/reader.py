"""Reads prompts chunk by chunk. Prefixes that prompts share, such as system prompts, are read once."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.prompt import Reading, read, start
from jaxspec.decoding.scores import Scores, score
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.generation.prompts import pad_predictions, pad_tokens
from jaxspec.model.base import Base
from jaxspec.serving.request import Request

_RECENT = 16  # prompts whose token ids are kept, to find the prefixes that they share


class Prefixes:
    """Store of readings of prefixes that two recent prompts had in common, in whole chunks: rounding is the same.

    Args:
      count: number of readings to keep; each is as large as a slot.
      width: W, tokens of a chunk.
    """

    def __init__(self, count: int, width: int):
        self.count, self.width = count, width
        self._prompts: deque[Sequence[int]] = deque(maxlen=_RECENT)
        # by their tokens and whether these are of long texts (see `Base.for_texts`), the most recently used last
        self._readings: dict[tuple[tuple[int, ...], bool], Reading] = {}

    def find(self, ids: Sequence[int], long: bool = False) -> tuple[int, Reading | None]:
        """The length of the longest stored prefix of a prompt, and a copy of its reading; 0 and None without one."""
        shorter = (prefix for prefix, of_long in self._readings if of_long == long and len(prefix) < len(ids))
        matches = [prefix for prefix in shorter if prefix == tuple(ids[: len(prefix)])]
        if not matches:
            return 0, None
        longest = (max(matches, key=len), long)
        self._readings[longest] = self._readings.pop(longest)
        return len(longest[0]), jax.tree.map(jnp.copy, self._readings[longest])

    def shared(self, ids: Sequence[int]) -> int:
        """Number of tokens, in whole chunks, that a prompt shares with a recent one. Adds it to the recent prompts."""
        most = max((_common_length(ids, other) for other in self._prompts), default=0)
        self._prompts.append(ids)
        return min(most, len(ids) - 1) // self.width * self.width

    def keep(self, ids: Sequence[int], reading: Reading, long: bool = False) -> None:
        """Store a copy of the reading of these tokens, in place of the least recently used one."""
        key = tuple(ids), long
        if not self.count or key in self._readings:
            return
        while len(self._readings) >= self.count:
            del self._readings[next(iter(self._readings))]
        self._readings[key] = jax.tree.map(jnp.copy, reading)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class PromptReader:
    """Reader of one request's prompt, into a row of its own.

    Args:
      base: the base, in the form that is fastest for a chunk's rows.
      decoding: constants of decoding one row, with the request's settings.
      request: the request.
      capacity: S, slots of the cache.
      best: K, number of most probable tokens whose scores the state keeps; None keeps no scores.
      prefixes: store of the prefixes that need not be read again.

    Attributes:
      scores: scores of the prompt's tokens from the second on, one entry per chunk, if the request asks for them.
    """

    def __init__(
        self, base: Base, decoding: Decoding, request: Request, capacity: int, best: int | None, prefixes: Prefixes
    ):
        length = np.array([len(request.ids) + request.max_new_tokens], np.int32)
        self._base, self._decoding = base.for_texts(length), decoding.replace(base=decoding.base.for_texts(length))
        self._request, self._capacity, self._best = request, capacity, best
        self._seeds = np.array([request.seed % 2**32], np.uint32)
        self._prefixes, self._shared = prefixes, prefixes.shared(request.ids)
        # A stored reading has no log-probabilities.
        self._long = self._base.long is not None and bool(self._base.long[0])
        self._next, self._reading = (0, None) if request.prompt_logprobs else prefixes.find(request.ids, self._long)
        self.scores: list[Scores] = []

    @property
    def finished(self) -> bool:
        """Whether the whole prompt was read."""
        return self._next >= len(self._request.ids)

    def read_chunk(self) -> None:
        """Read the next chunk."""
        ids, begin, W = self._request.ids, self._next, self._prefixes.width
        self._next = min(begin + W, len(ids))
        chunk = (*pad_tokens([ids[begin : self._next]], W), self._seeds)
        self._reading = read(self._base, self._decoding, self._reading, *chunk, capacity=self._capacity)
        if self._next == self._shared:
            self._prefixes.keep(ids[: self._next], self._reading, self._long)
        if self._request.prompt_logprobs:
            following = ids[begin + 1 : begin + W + 1]
            scores = _scores(self._base, self._reading.last, pad_tokens([following], W)[0], best=self._best)
            self.scores.append(jax.tree.map(lambda x: x[0, : len(following)], jax.device_get(scores)))

    def state(self, width: int) -> DecodeState:
        """The state after the prompt, with room for `width` tokens. It takes over the buffers of the reading."""
        limits, reading = np.array([self._request.max_new_tokens], np.int32), self._reading
        rows, predicted = (reading.memory, reading.last, limits, self._seeds), None
        if self._decoding.drafter.follows_prediction(self._base):  # of one width, so that rows are alike
            predicted = pad_predictions([self._request.prediction], width + 2)
        return start(self._base, self._decoding, *rows, predicted=predicted, width=width, best=self._best)


@functools.partial(jax.jit, static_argnames=("best",))
def _scores(base: Base, chunk: ReadChunk, following: jax.Array, *, best: int) -> Scores:
    """Scores of the tokens [1, W] int32 that follow those of a chunk [1, W]."""
    return score(base.logits(chunk.hidden), following, best)
