"""Beginnings that prompts share, such as system prompts: read once, in whole chunks, so that rounding is the same."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.decoding.prompt import Reading

_REMEMBERED = 16  # prompts, of which only the ids


class Prefixes:
    """Readings of what two recent prompts had in common.

    Args:
      count: readings to keep; each is as large as a slot.
      width: tokens of a chunk.
    """

    def __init__(self, count: int, width: int):
        self._count, self._width = count, width
        self._prompts: deque[Sequence[int]] = deque(maxlen=_REMEMBERED)
        self._readings: dict[tuple[int, ...], Reading] = {}

    def find(self, ids: Sequence[int]) -> tuple[int, Reading | None]:
        """How many tokens of a prompt were read before, and a copy of their reading."""
        found = [known for known in self._readings if len(known) < len(ids) and tuple(ids[: len(known)]) == known]
        if not found:
            return 0, None
        known = max(found, key=len)
        self._readings[known] = self._readings.pop(known)  # the last of them: used just now
        return len(known), jax.tree.map(jnp.copy, self._readings[known])

    def shared(self, ids: Sequence[int]) -> int:
        """How many tokens, in whole chunks, a prompt shares with a recent one; it is remembered from now on."""
        most = max((_common(ids, other) for other in self._prompts), default=0)
        self._prompts.append(ids)
        return min(most, len(ids) - 1) // self._width * self._width

    def keep(self, ids: Sequence[int], reading: Reading) -> None:
        """Keep a copy of the reading of these tokens, in place of the one unused for longest."""
        if not self._count or tuple(ids) in self._readings:
            return
        while len(self._readings) >= self._count:
            del self._readings[next(iter(self._readings))]
        self._readings[tuple(ids)] = jax.tree.map(jnp.copy, reading)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
