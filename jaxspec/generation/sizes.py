"""Milliseconds of a step of each size of a drafter, measured with the program that decodes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.loop import decode
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.costs import Samples
from jaxspec.parallel.processes import host

# `Pace.idle` before a step, which adds one where rows may draft: at 0 a draft is due, at a prime it rests whatever the
# unit is
_DUE, _RESTS = -1, 10_006
BUSY = 1.5  # spread of times that say little, measured while the machine was busy with something else


@dataclasses.dataclass(frozen=True)
class SizeTimes:
    """Milliseconds of a step.

    Attributes:
      sizes: [K], of a step of each size that drafts for the next one; of the smallest size one that does not.
      drafting: what drafting takes; 0 where it was not measured apart.
      spread: how many times as long as the fastest step the next one of its kind took, at most.
    """

    sizes: np.ndarray
    drafting: float
    spread: float = 1.0


class SizeTimer:
    """Times steps of each size of a drafter, one by one.

    Args:
      decoding: constants of decoding; its drafter has several sizes.
      samples: seconds of each kind of step that were measured before; new ones are added.
      restarts: whether every step begins answers anew, in rows that have none of their own, and what drafting takes is
        measured too. Otherwise the steps are those of the answers at hand: the size of a step changes no text.
    """

    def __init__(self, decoding: Decoding, samples: Samples | None = None, restarts: bool = True):
        self._decoding, self._restarts = decoding, restarts
        self._samples = {} if samples is None else samples
        for kind in self._kinds():
            self._samples.setdefault(kind, [])

    def _kinds(self) -> Iterator[tuple[int, bool]]:
        """Sizes, and whether steps draft for the next one: those of the smallest need not."""
        yield 0, False
        for number in range(0 if self._restarts else 1, len(self._decoding.drafter.shape.sizes)):
            yield number, True

    def measure(self, state: DecodeState) -> DecodeState:
        """Time a step of each kind, the rarest first, while there are rows that are not done. The state is donated.

        The pace after it is as before, and drafts are due, whichever kind came last.
        """
        before = {name: jnp.copy(getattr(state.pace, name)) for name in ("tokens", "time")}
        for (number, drafts), samples in sorted(self._samples.items(), key=lambda item: len(item[1])):
            state = self._begin(state, number, _DUE if drafts else _RESTS)
            if np.all(host(state.done)):
                break
            began = time.perf_counter()
            state = jax.block_until_ready(decode(self._decoding, state, np.int32(1)))
            samples.append(time.perf_counter() - began)
        return _with_idle(state.replace(pace=state.pace.replace(**before)), _DUE)

    def _begin(self, state: DecodeState, number: int, idle: int) -> DecodeState:
        """A state whose next step has a size, after so many steps in a row without a draft."""
        if self._restarts:
            state = _restarted(state)
        draft = state.draft
        fits = jnp.arange(draft.valid.shape[1]) < self._decoding.drafter.shape.sizes[number]
        draft = draft.replace(size=jnp.full_like(draft.size, number), valid=draft.valid & fits)
        return jax.block_until_ready(_with_idle(state.replace(draft=draft), idle))

    @property
    def times(self) -> SizeTimes:
        """Of all that was measured, the usual time of each kind (see `usual`)."""
        milliseconds = {kind: 1e3 * usual(samples) for kind, samples in self._samples.items()}
        rests = milliseconds.pop((0, False))
        drafting = max(milliseconds.pop((0, True), rests) - rests, 0.0)
        return SizeTimes(np.array([rests, *milliseconds.values()]), drafting, self._spread)

    @property
    def is_sure(self) -> bool:
        """Whether every kind of step was timed twice, since the first may compile, with about the same result."""
        return min(map(len, self._samples.values())) > 1 and self._spread < BUSY

    @property
    def _spread(self) -> float:
        """How far the two fastest steps of a kind are apart, or 1 of the only one."""
        fastest = [sorted(samples)[:2] for samples in self._samples.values()]
        return max(pair[-1] / pair[0] for pair in fastest)


def usual(samples: Sequence[float]) -> float:
    """The slowest of the fastest quarter of samples; of up to four samples the fastest.

    It varies half as much as the fastest of many samples. Steps that compile, or that a busy machine delays, do not
    change it as long as a quarter of the samples is free of both.
    """
    return sorted(samples)[(len(samples) - 1) // 4]


def _with_idle(state: DecodeState, idle: int) -> DecodeState:
    """The state after so many steps in a row without a draft."""
    return state.replace(pace=state.pace.replace(idle=jnp.full_like(state.pace.idle, idle)))


def _restarted(state: DecodeState) -> DecodeState:
    """The state with rows that all have answers of one token and no drafts."""
    done = jnp.zeros_like(state.done)
    return state.replace(
        draft=state.draft.resting(),
        pace=state.pace.replace(active=~done),
        done=done,
        counts=jnp.ones_like(state.counts),
        limits=jnp.full_like(state.limits, 2**30),
        lengths=jnp.ones_like(state.lengths),
    )
