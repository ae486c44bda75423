"""Predict by replay how fast every part of a union is on a machine, with every number of rows.

What a source offers along recorded answers does not depend on the others, so one recording tells of all unions. Seconds
of a step are measured: of verifying so many rows, and of what each source adds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.drafters.budget import Budget, parse_budget, smallest_draft
from jaxspec.drafters.drafter import Drafter
from jaxspec.drafters.source import Source
from jaxspec.progress import Progress
from jaxspec.tuning.calibrate import fit_calibration
from jaxspec.tuning.hardware import Option, RowLatency, fit_latency
from jaxspec.tuning.latency import bare, step_times
from jaxspec.tuning.record import Recording
from jaxspec.tuning.replay import Replay, replay

Candidate = tuple[Option, Drafter]  # what is expected of a way to decode, and the way
_ROWS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_TYPICAL = 5  # rows to measure drafting with
_ROUNDS = 9  # of measuring
_BRANCHES = 4  # sizes to choose among in every step
_NEVER = 1e9  # cost of a size that is not to be chosen


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of a step.

    Attributes:
      latency: of verifying so many rows.
      drafting: what each source adds, by its name and draft vocabulary.
    """

    latency: RowLatency
    drafting: Mapping[tuple[str, int], float]

    def __call__(self, sources: Sequence[Source], rows: int) -> float:
        """Of a step with so many rows and these sources."""
        return self.latency(rows) + sum(self.drafting[_key(source)] for source in sources)


def measure_costs(
    drafters: Sequence[Drafter],
    batch_size: int,
    cache_length: int,
    max_rows: int,
    sampling: SamplingConfig,
) -> StepCosts:
    """Time steps of verification alone, and one with each source of a union, with each draft vocabulary."""
    everyone: dict[Any, Drafter] = {rows: bare(drafters[0].model, rows) for rows in _sizes(1, max_rows)}
    sizes = [*everyone]
    for drafter in drafters:
        for source in drafter.sources:
            rows = max(_TYPICAL, smallest_draft([source]))
            everyone[_key(source)] = with_sources(drafter, [source], f"best:{rows}")
    seconds = step_times(everyone, cache_length, _ROUNDS, batch_size, sampling)
    latency = fit_latency({rows: seconds[rows] for rows in sizes})
    alone = {key: seconds[key] - latency(everyone[key].num_rows) for key in everyone if key not in sizes}
    return StepCosts(latency, {key: max(value, 0.0) for key, value in alone.items()})


def calibrate(drafter: Drafter, recordings: Sequence[Recording], sampled: bool) -> Drafter:
    """The drafter with every source calibrated to what was recorded of it, as far as that tells."""
    kind = "sampled" if sampled else "greedy"
    sources = []
    for number, source in enumerate(drafter.sources):
        table = fit_calibration(recordings, number, source.calibrations()[int(sampled)].tolist())
        sources.append(dataclasses.replace(source, calibration={kind: table}))
    return dataclasses.replace(drafter, sources=tuple(sources))


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Predicts how fast parts of a union are.

    Attributes:
      drafter: the union; its shape does not matter.
      recordings: of its sources.
      costs: of this machine.
      batch_size: B, answers decoded together.
      sampled: whether the recorded answers are.
    """

    drafter: Drafter
    recordings: Sequence[Recording]
    costs: StepCosts
    batch_size: int
    sampled: bool

    def expect(self, numbers: Sequence[int], tree: str) -> Candidate:
        """What is expected of some of the sources, by their numbers, with a budget like `best:8`."""
        part = self._part(numbers, tree)
        found = replay(self.recordings, part, numbers, self.batch_size, self.sampled)
        seconds = found.time * (1e-3 if part.shape.sizes else self.costs(part.sources, part.num_rows))
        return self._candidate(part, found, seconds)

    def _part(self, numbers: Sequence[int], tree: str) -> Drafter:
        return with_sources(self.drafter, [self.drafter.sources[i] for i in numbers], tree)

    def _candidate(self, part: Drafter, found: Replay, seconds: float) -> Candidate:
        spec, speed = part.shape.spec, float(found.tokens.sum() / seconds / self.batch_size)
        count = max(source.draft_vocabulary for source in part.sources)
        return Option(in_words(f"{part.name} {spec}", count), spec, part.num_rows, found.tokens_per_step, speed), part

    def rank(self, max_rows: int) -> list[Candidate]:
        """Of every part its best number of rows, and what chooses among several per step; the fastest first."""
        parts, best = list(_parts(len(self.drafter.sources))), []
        with Progress("replaying", len(parts), "unions") as progress:
            for done, numbers in enumerate(parts, 1):
                if fixed := list(self.of_each_size(numbers, max_rows)):
                    first = max(fixed, key=_predicted)
                    most = min(2 * first[1].num_rows, max_rows)
                    best += [first, self.expect(numbers, self._sized(first[1].sources, most))]
                progress.update(done)
        return sorted(best, key=_predicted, reverse=True)

    def of_each_size(self, numbers: Sequence[int], max_rows: int) -> Iterator[Candidate]:
        """What is expected of some of the sources, by their numbers, with every number of rows.

        Several numbers of rows are one program, whose costs leave one size to choose.
        """
        sources = [self.drafter.sources[i] for i in numbers]

        def program(rows: int) -> tuple[int, int]:
            return Budget(rows).divided(sources)[1], max(rows, 8).bit_length()

        for _, group in itertools.groupby(_sizes(smallest_draft(sources), max_rows), program):
            sizes = list(group)
            for rows in sizes:
                part = self._part(numbers, f"best:{rows}")
                only = Budget(sizes[-1], tuple((size, 1.0 if size == rows else _NEVER) for size in sizes))
                alone = dataclasses.replace(part, shape=only)
                found = replay(self.recordings, alone, numbers, self.batch_size, self.sampled)
                yield self._candidate(part, found, found.time * self.costs(sources, rows))

    def _sized(self, sources: Sequence[Source], most: int) -> str:
        """A budget of a few sizes up to so many rows, with their milliseconds; all probes are part of the smallest."""
        probes = most - Budget(most).divided(sources)[0]
        possible = _sizes(1 + probes, most)
        chosen = {possible[i] for i in np.linspace(0, len(possible) - 1, _BRANCHES).round().astype(int)}
        return "best:" + ",".join(f"{rows}@{1e3 * self.costs(sources, rows):.2f}" for rows in sorted(chosen))


def with_sources(drafter: Drafter, sources: Sequence[Source], tree: str) -> Drafter:
    """Some of a drafter's sources with a budget."""
    return dataclasses.replace(drafter, sources=tuple(sources), shape=parse_budget(tree, sources))


def in_words(name: str, draft_vocabulary: int) -> str:
    """Something that drafts, with its draft vocabulary where it has one."""
    return f"{name}, {draft_vocabulary} tokens" if draft_vocabulary else name


def _key(source: Source) -> tuple[str, int]:
    return source.method.name, source.draft_vocabulary


def _predicted(candidate: Candidate) -> float:
    return candidate[0].predicted


def _sizes(least: int, most: int) -> list[int]:
    return sorted({rows for rows in (least, *_ROWS) if least <= rows <= most})


def _parts(count: int) -> Iterator[tuple[int, ...]]:
    """All non-empty sets of so many numbers."""
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)
