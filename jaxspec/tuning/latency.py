"""Seconds of a decoding step on this machine by its number of rows, and what each drafter adds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.decoding.prompt import prefill
from jaxspec.drafters.budget import smallest_draft
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.drafters.source import Source
from jaxspec.generation.job import decoding_of
from jaxspec.progress import Progress
from jaxspec.trees import TreePlan, chain, from_paths
from jaxspec.weights.model import Model

K = TypeVar("K", bound=Hashable)
_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows
_TYPICAL = 5  # rows to measure drafting with
_ROUNDS = 9  # of measuring
STEPS = 4  # per sample
_PROMPT = 64  # tokens at most before the steps


@dataclasses.dataclass(frozen=True)
class RowLatency:
    """Seconds of a step by the number of rows, between and beyond the measured ones on straight lines.

    All rows go through the vocabulary projection, which those of probes do not: steps with many of them are a little
    faster.

    Attributes:
      rows: increasing.
      seconds: medians, made increasing: a row more is never cheaper.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        """Seconds of a step with that many rows."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return self.seconds[-1] + slope * (rows - self.rows[-1])


def fit_latency(measured: Mapping[int, float]) -> RowLatency:
    """The curve through medians {rows: seconds} of at least two sizes."""
    rows = sorted(measured)
    return RowLatency(tuple(rows), tuple(np.maximum.accumulate([measured[r] for r in rows]).tolist()))


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of a step.

    Attributes:
      latency: of verifying so many rows.
      drafting: what each source adds, by its name and draft vocabulary: {depth of a fixed tree: seconds}, with depth 0
        for drafts chosen per step.
    """

    latency: RowLatency
    drafting: Mapping[tuple[str, int], Mapping[int, float]]

    def __call__(self, drafter: Drafter, rows: int = 0) -> float:
        """Seconds of a step of this drafter, or of one with `rows` rows."""
        depth = drafter.shape.depth if isinstance(drafter.shape, TreePlan) else 0
        return self.latency(rows or drafter.num_rows) + sum(self.adds(source, depth) for source in drafter.sources)

    def adds(self, source: Source, depth: int = 0) -> float:
        """Seconds that drafting with a source adds: a fixed tree of this depth, or with 0 what is chosen per step."""
        known = self.drafting[_key(source)]
        if not depth:
            return known[0]
        depths = sorted(known)[1:]
        return float(np.interp(depth, depths, [known[d] for d in depths]))


def measure_costs(
    drafters: Sequence[Drafter], batch_size: int, cache_length: int, max_rows: int, sampling: SamplingConfig
) -> StepCosts:
    """Time steps of verification alone, and some with each source of a union.

    Args:
      drafters: the union with each draft vocabulary.
      batch_size: B.
      cache_length: S; attention looks at all of it.
      max_rows: the largest size.
      sampling: how tokens are drawn.
    """
    timed: dict[Any, Drafter] = {rows: bare(drafters[0].model, rows) for rows in sizes_between(1, max_rows)}
    sizes = [*timed]
    for drafter, source in [(each, source) for each in drafters for source in each.sources]:
        timed[_key(source), 0] = with_sources(drafter, [source], f"best:{max(_TYPICAL, smallest_draft([source]))}")
        if fills_trees(source):
            facts = source.facts  # of probes, whose rows say it all, one depth tells what drafting takes
            for depth in {1} if facts.probes else {1, min(facts.distances, max_rows - 1)}:
                timed[_key(source), depth] = with_sources(drafter, [source], chain(depth))
    seconds = step_times(timed, cache_length, _ROUNDS, batch_size, sampling)
    latency = fit_latency({rows: seconds[rows] for rows in sizes})
    drafting: dict[tuple[str, int], dict[int, float]] = {}
    for key, depth in (key for key in timed if key not in sizes):
        adds = seconds[key, depth] - latency(timed[key, depth].num_rows)
        drafting.setdefault(key, {})[depth] = max(adds, 0.0)
    return StepCosts(latency, drafting)


def fills_trees(source: Source) -> bool:
    """Whether fixed trees of a source are worth trying: not of lookups, nor where candidates only fill chains."""
    return source.trained and not source.facts.chain_only


def with_sources(drafter: Drafter, sources: Sequence[Source], tree: str | TreePlan) -> Drafter:
    """Some of a drafter's sources with another tree. Raises UserError for one that does not fit."""
    count = max(source.draft_vocabulary for source in sources)
    part = dataclasses.replace(drafter, sources=tuple(sources))
    return part.with_tree(tree, count if any(source.trained for source in sources) else None)


def in_words(name: str, draft_vocabulary: int) -> str:
    """Something that drafts, with its draft vocabulary where it has one."""
    return f"{name}, {draft_vocabulary} tokens" if draft_vocabulary else name


def sizes_between(least: int, most: int) -> list[int]:
    """Numbers of rows worth measuring and trying."""
    return sorted({rows for rows in (least, *_SIZES) if least <= rows <= most})


def _key(source: Source) -> tuple[str, int]:
    return source.method.name, source.draft_vocabulary


def step_times(
    drafters: Mapping[K, Drafter],
    cache_length: int,
    rounds: int,
    batch_size: int = 1,
    sampling: SamplingConfig = SamplingConfig(),
    steps: int = STEPS,
) -> dict[K, float]:
    """Median seconds of a decoding step with each drafter.

    Each is measured once a round, in another order every round, so that a slow moment of the machine hurts all alike.

    Args:
      drafters: by name.
      cache_length: S.
      rounds: measurements of each.
      batch_size: B.
      sampling: how tokens are drawn.
      steps: that a sample times together.
    """
    names, timers, samples, done = list(drafters), {}, {name: [] for name in drafters}, 0
    with Progress("compiling", len(names), "steps") as progress:  # apart: it says nothing of how long a run takes
        for number, (name, drafter) in enumerate(drafters.items(), 1):
            timers[name] = StepTimer(drafter, batch_size, cache_length, sampling, steps)
            progress.update(number)
    with Progress("measuring", len(names) * rounds, "runs") as progress:
        for turn in range(rounds):
            for place in np.random.default_rng(turn).permutation(len(names)):
                samples[names[place]].append(timers[names[place]]())
                done += 1
                progress.update(done)
    return {name: float(np.median(values)) for name, values in samples.items()}


def bare(model: Model, nodes: int) -> Drafter:
    """Nothing that drafts, with a tree of so many nodes: steps of verification alone."""
    return dataclasses.replace(autoregressive(model), shape=from_paths([(rank,) for rank in range(nodes - 1)]))


class StepTimer:
    """Times a few steps of one drafter, always from the same state.

    Args:
      drafter: what to time.
      batch_size: B.
      cache_length: S.
      sampling: how tokens are drawn.
      steps: timed together, few enough for the cache; on accelerators starting a program takes as long as a small step.

    Attributes:
      decoding: the loop's constants.
      state: where the steps begin.
    """

    def __init__(
        self,
        drafter: Drafter,
        batch_size: int,
        cache_length: int,
        sampling: SamplingConfig = SamplingConfig(),
        steps: int = STEPS,
    ):
        self._steps = steps
        self.decoding = decoding_of(drafter, batch_size, sampling)
        base = self.decoding.base
        length = min(cache_length // 2, _PROMPT)
        tokens, lengths = np.ones((batch_size, length), np.int32), np.full(batch_size, length, np.int32)
        limits, seeds = np.full(batch_size, 2**30, np.int32), np.zeros(batch_size, np.uint32)
        sizes = {"capacity": cache_length, "chunk": length, "width": cache_length}
        self.state = prefill(base, self.decoding, tokens, lengths, limits, seeds, **sizes)
        self()

    def __call__(self) -> float:
        """Seconds per step."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self.state))
        began = time.perf_counter()
        jax.block_until_ready(decode(self.decoding, state, np.int32(self._steps)))
        return (time.perf_counter() - began) / self._steps
