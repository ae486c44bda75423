"""Milliseconds of a step of each size of a drafter, measured with the program that decodes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.costs import RowCosts, find_costs
from jaxspec.drafters.defaults import cost_name, counted_rows, with_sizes
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.job import Job, Settings
from jaxspec.parallel.sharding import in_mesh
from jaxspec.progress import Progress

_DUE, _RESTS = 0, 2  # steps without a draft after which the next one drafts, and rests
_WIDTH = 64  # tokens of an answer
_ROWS = {"cpu": (4, 8, 16), "accelerator": (8, 16, 32, 64)}
_ROUNDS = 9


@dataclasses.dataclass(frozen=True)
class SizeTimes:
    """Milliseconds of a step.

    Attributes:
      sizes: [K], of a step of each size that drafts for the next one; of the smallest size one that does not.
      drafting: what drafting takes.
    """

    sizes: np.ndarray
    drafting: float


class SizeTimer:
    """Times steps of each size of a drafter, one by one.

    Args:
      decoding: constants of decoding; its drafter has several sizes.
      rows: B of its states.
    """

    def __init__(self, decoding: Decoding, rows: int):
        self._decoding, self._rows = decoding, rows
        self._samples: dict[tuple[int, int], list[float]] = {}

    def warm_up(self, state: DecodeState) -> DecodeState:
        """Run a step of each size untimed: the first one compiles."""
        for number in range(len(self._decoding.drafter.shape.sizes)):
            state = decode(self._decoding, self._begin(state, number, _DUE), np.int32(1))
        return state

    def measure(self, state: DecodeState) -> DecodeState:
        """Time a step of each size. Returns the state, with rows that mean nothing; the old one is donated."""
        for number in range(len(self._decoding.drafter.shape.sizes)):
            for idle in (_DUE, _RESTS) if number == 0 else (_DUE,):
                state, began = self._begin(state, number, idle), time.perf_counter()
                state = jax.block_until_ready(decode(self._decoding, state, np.int32(1)))
                self._samples.setdefault((number, idle), []).append(time.perf_counter() - began)
        return state

    def _begin(self, state: DecodeState, size: int, idle: int) -> DecodeState:
        """A state whose next step has a size, and after which drafts are due or rest."""
        rows, nodes = self._rows, state.draft.valid.shape[1]
        root = np.broadcast_to(np.arange(nodes) == 0, (rows, nodes))
        return jax.block_until_ready(
            state.replace(
                draft=state.draft.replace(size=np.full(rows, size, np.int32), valid=root),
                pace=state.pace.replace(active=np.ones(rows, bool), idle=np.full(rows, idle, np.int32)),
                done=np.zeros(rows, bool),
                counts=np.ones(rows, np.int32),
                limits=np.full(rows, 2**30, np.int32),
                lengths=np.ones(rows, np.int32),
            )
        )

    @property
    def times(self) -> SizeTimes:
        """Of all that was measured, the fastest of each."""
        least = {key: 1e3 * min(samples) for key, samples in self._samples.items()}
        sizes = [least[0, _RESTS], *(least[number, _DUE] for number in range(1, len(least) - 1))]
        return SizeTimes(np.array(sizes), max(least[0, _DUE] - least[0, _RESTS], 0.0))


def measure_rows(drafter: Drafter, batch_size: int = 1, cache_length: int = 512, rounds: int = _ROUNDS) -> RowCosts:
    """The costs of rows, measured with a drafter's own steps, greedy and sampled ones.

    Args:
      drafter: whatever its shape.
      batch_size: texts decoded together.
      cache_length: S, tokens of a text at most.
      rounds: steps of each size, of which the fastest counts.
    """
    rows = _ROWS["cpu" if jax.default_backend() == "cpu" else "accelerator"]
    drafter, found = with_sizes(drafter, find_costs(drafter.model, batch_size), batch_size, rows), []
    with Progress("measuring", 2 * rounds, "rounds") as progress:
        for kind, temperature in enumerate((0.0, 1.0)):
            job = Job(drafter, Settings(SamplingConfig(temperature)), batch_size)
            prompts = [[1] * (cache_length // 2)] * batch_size
            state = job.begin(prompts, _WIDTH, batch_size, *job.sizes(len(prompts[0]), _WIDTH)).state
            timer = SizeTimer(job.decoding, batch_size)
            with in_mesh(job.mesh):
                state = timer.warm_up(state)
                for number in range(rounds):
                    state = timer.measure(state)
                    progress.update(kind * rounds + number + 1)
            found.append(timer.times)
    return row_costs(drafter, batch_size, found)


def row_costs(drafter: Drafter, batch_size: int, times: Sequence[SizeTimes]) -> RowCosts:
    """The costs of rows by the times of a drafter's sizes, greedy and sampled ones; what drafting adds is apart."""
    rows = tuple(batch_size * counted_rows(drafter, size.rows) for size in drafter.shape.sizes)
    costs = tuple((float(t.sizes[0]), *(t.sizes[1:] - t.drafting).tolist()) for t in times)
    greedy, sampled = (t.drafting for t in times)
    return RowCosts(rows, costs, {cost_name(drafter): (greedy, sampled)})
