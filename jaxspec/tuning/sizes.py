"""Costs of rows: steps of each size of a drafter, greedy and sampled ones, measured with the programs that decode."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.costs import GREEDY, RowCosts, find_costs
from jaxspec.drafters.defaults import cost_name, counted_rows, with_sizes
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.job import Job, Settings
from jaxspec.generation.sizes import SizeTimer, SizeTimes
from jaxspec.parallel.sharding import in_mesh
from jaxspec.progress import Progress

_PROMPT = 64  # tokens at most
_WIDTH = 64  # tokens of an answer
_ROWS = {"cpu": (4, 8, 16), "accelerator": (8, 16, 32, 64)}
ROUNDS = 20  # of `jaxspec tune --quick`; on a busy machine most steps are late
_LEAST_ROUNDS = 3  # of a measurement that takes long
SAMPLINGS = (SamplingConfig(), SamplingConfig(1.0))  # of greedy steps, and of sampled ones


def measure_sizes(
    decodings: Sequence[Decoding],
    state: DecodeState,
    rounds: int,
    seconds: float = math.inf,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[list[SizeTimes], DecodeState]:
    """Times of steps of each size, greedy and sampled ones by turns.

    A greedy step does a part of a sampled one's work: it is never dearer.

    Args:
      decodings: constants of decoding with each of `SAMPLINGS`.
      state: B rows, donated.
      rounds: steps of each size, the first of which may compile.
      seconds: no round begins after so many, once three are done.
      report: is called with the number of rounds that are done, of greedy steps or of sampled ones.

    Returns:
      The times for each of the decodings, and a state with rows that mean nothing.
    """
    timers, began = [SizeTimer(decoding) for decoding in decodings], time.perf_counter()
    for done in range(rounds):
        if done >= _LEAST_ROUNDS and time.perf_counter() > began + seconds:
            break
        for number, timer in enumerate(timers, 1):
            state = timer.measure(state)
            report(done * len(timers) + number)
    greedy, sampled = (timer.times for timer in timers)
    return [dataclasses.replace(greedy, sizes=np.minimum(greedy.sizes, sampled.sizes)), sampled], state


def measure_rows(drafter: Drafter, batch_size: int = 1, cache_length: int = 512, rounds: int = ROUNDS) -> RowCosts:
    """The costs of rows, measured with a drafter's own steps, greedy and sampled ones.

    Args:
      drafter: whatever its shape.
      batch_size: texts decoded together.
      cache_length: S, slots of the cache, at least 64; attention looks at all of them.
      rounds: steps of each size.
    """
    rows = _ROWS["cpu" if jax.default_backend() == "cpu" else "accelerator"]
    typical = find_costs(drafter.model, batch_size)
    chosen = with_sizes(drafter, typical, batch_size, rows)
    costs = _measured(chosen, batch_size, cache_length, rounds)
    # With as many probes as the largest step has there is no step of few rows; with those of a smaller one there is.
    few = [count for count in rows if count < chosen.shape.sizes[1].rows]
    smaller = with_sizes(drafter, typical, batch_size, few or rows)
    if smaller.shape.rows == chosen.shape.rows:
        return costs
    return _joined(costs, _measured(smaller, batch_size, cache_length, rounds))


def _joined(costs: RowCosts, further: RowCosts) -> RowCosts:
    """The costs with further ones, of two the lower one; of drafting as they are."""
    measured = [dict(zip(each.rows, zip(*each.costs, strict=True), strict=True)) for each in (costs, further)]
    rows = sorted(measured[0] | measured[1])
    lowest = np.array([np.min([table[count] for table in measured if count in table], axis=0) for count in rows])
    joined = np.maximum.accumulate(lowest).T.tolist()
    return dataclasses.replace(costs, rows=tuple(rows), costs=tuple(map(tuple, joined)))


def _measured(drafter: Drafter, batch_size: int, cache_length: int, rounds: int) -> RowCosts:
    """The costs of the rows that a drafter's sizes have."""
    jobs = [Job(drafter, Settings(sampling), batch_size) for sampling in SAMPLINGS]
    prompts = [[1] * min(cache_length // 2, _PROMPT)] * batch_size
    state = jobs[GREEDY].begin(prompts, _WIDTH, batch_size, _WIDTH, cache_length).state
    with Progress("measuring", len(jobs) * rounds, "rounds") as progress, in_mesh(jobs[GREEDY].mesh):
        times, _ = measure_sizes([job.decoding for job in jobs], state, rounds, report=progress.update)
    return row_costs(drafter, batch_size, times)


def row_costs(drafter: Drafter, batch_size: int, times: Sequence[SizeTimes]) -> RowCosts:
    """The costs of rows by the times of a drafter's sizes, greedy and sampled ones; what drafting adds is apart.

    The smallest size must be the root alone. Of two sizes with as many rows the faster counts; noise makes no step
    cheaper than one of fewer rows.
    """
    every = np.array([batch_size * counted_rows(drafter, size) for size in drafter.shape.sizes])
    rows = np.unique(every)
    costs = []
    for t in times:
        measured = np.array([t.sizes[0], *(t.sizes[1:] - t.drafting)])
        least = [measured[every == count].min() for count in rows]
        costs.append(tuple(np.maximum.accumulate(least).tolist()))
    greedy, sampled = (t.drafting for t in times)
    return RowCosts(tuple(rows.tolist()), tuple(costs), {cost_name(drafter): (greedy, sampled)})
