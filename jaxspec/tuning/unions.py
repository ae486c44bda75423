"""Predict by replay how fast every part of a union is on a machine, with every number of rows.

What a source offers along recorded answers does not depend on the others, so one recording tells of all unions. Seconds
of a step are measured: of verifying so many rows, and of what each source adds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxspec.config import SamplingConfig
from jaxspec.drafting.drafter import Drafter, Source
from jaxspec.progress import Progress
from jaxspec.tuning.calibrate import fit_calibration
from jaxspec.tuning.hardware import Latency, Option, fit_latency
from jaxspec.tuning.latency import bare, step_times
from jaxspec.tuning.record import Recording
from jaxspec.tuning.replay import replay

Candidate = tuple[Option, Drafter]  # a way to decode, and what is expected of it
_ROWS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_TYPICAL = 8  # rows to measure drafting with


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of a step.

    Attributes:
      latency: of verifying so many rows.
      drafting: what each source adds, by its name.
    """

    latency: Latency
    drafting: Mapping[str, float]

    def __call__(self, sources: Sequence[Source], rows: int) -> float:
        """Of a step with so many rows and these sources."""
        return self.latency(rows) + sum(self.drafting[source.method.name] for source in sources)


def measure_costs(
    drafter: Drafter, batch_size: int, cache_length: int, max_rows: int, sampling: SamplingConfig, rounds: int = 9
) -> StepCosts:
    """Time steps of verification alone, and one with each source of a union."""
    everyone: dict[tuple[str, int | str], Drafter] = {("rows", n): bare(drafter.model, n) for n in _sizes(1, max_rows)}
    names = [source.method.name for source in drafter.sources]
    for name, source in zip(names, drafter.sources, strict=True):
        everyone["source", name] = with_sources(drafter, [source], f"best:{max(_TYPICAL, least_rows([source]))}")
    seconds = step_times(everyone, cache_length, rounds, batch_size, sampling)
    latency = fit_latency({size: value for (kind, size), value in seconds.items() if kind == "rows"})
    alone = {name: seconds["source", name] - latency(everyone["source", name].num_rows) for name in names}
    return StepCosts(latency, {name: max(value, 0.0) for name, value in alone.items()})


def calibrate(drafter: Drafter, recordings: Sequence[Recording], sampled: bool) -> Drafter:
    """The drafter with every source calibrated to what was recorded of it."""
    kind = "sampled" if sampled else "greedy"
    sources = tuple(
        dataclasses.replace(source, calibration={kind: fit_calibration(recordings, number)})
        for number, source in enumerate(drafter.sources)
    )
    return dataclasses.replace(drafter, sources=sources)


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

    def __call__(self, numbers: Sequence[int], tree: str) -> Candidate:
        """What is expected of some of the sources, by their numbers, with a budget like `best:8`."""
        sources = [self.drafter.sources[i] for i in numbers]
        part = with_sources(self.drafter, sources, tree)
        found = replay(self.recordings, part, numbers, self.batch_size, self.sampled)
        seconds = found.time * (1e-3 if part.shape.sizes else self.costs(sources, part.num_rows))
        speed = float(found.tokens.sum() / seconds / self.batch_size)
        return Option(f"{part.name} {tree}", tree, part.num_rows, found.tokens_per_step, speed), part

    def rank(self, max_rows: int) -> list[Candidate]:
        """Of every part its best number of rows, and what chooses among several per step; the fastest first."""
        parts, best = list(_parts(len(self.drafter.sources))), []
        with Progress("replaying", len(parts), "unions") as progress:
            for done, numbers in enumerate(parts, 1):
                sources = [self.drafter.sources[i] for i in numbers]
                sizes = _sizes(least_rows(sources), max_rows)
                if fixed := [self(numbers, f"best:{rows}") for rows in sizes]:
                    first = max(fixed, key=_predicted)
                    best += [first, self(numbers, self._sized(sources, min(2 * first[1].num_rows, max_rows)))]
                progress.update(done)
        return sorted(best, key=_predicted, reverse=True)

    def _sized(self, sources: Sequence[Source], most: int) -> str:
        """A budget of all sizes up to so many rows, with their milliseconds."""
        sizes = _sizes(least_rows(sources) - 1, most)
        return "best:" + ",".join(f"{rows}@{1e3 * self.costs(sources, rows):.2f}" for rows in sizes)


def least_rows(sources: Sequence[Source]) -> int:
    """Rows of the smallest draft: the root, a candidate and its probes."""
    return 2 + max(source.method.probe_distances * source.method.probe_rows for source in sources)


def with_sources(drafter: Drafter, sources: Sequence[Source], tree: str) -> Drafter:
    """Some of a drafter's sources, with their draft vocabularies, and a budget."""
    vocabulary = next((source.draft_vocabulary for source in sources if source.method.trainable), None)
    return dataclasses.replace(drafter, sources=tuple(sources)).with_tree(tree, vocabulary)


def _predicted(candidate: Candidate) -> float:
    return candidate[0].predicted


def _sizes(least: int, most: int) -> list[int]:
    return sorted({rows for rows in (least, *_ROWS) if least <= rows <= most})


def _parts(count: int) -> Iterator[tuple[int, ...]]:
    """All non-empty sets of so many numbers."""
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)
