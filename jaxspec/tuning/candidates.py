"""Predict by replay how fast every way to draft is on a machine: a source's fixed trees, and budgets of all unions.

What a source offers along recorded answers does not depend on the others, so one recording tells of all unions. Seconds
of a step are measured (`jaxspec.tuning.latency`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxspec.drafters.budget import Budget, Size, smallest_draft
from jaxspec.drafters.defaults import drafts_without_added
from jaxspec.drafters.drafter import Drafter
from jaxspec.progress import Progress
from jaxspec.trees import TreePlan, chain
from jaxspec.trees.builders import sparse_tree
from jaxspec.trees.dynamic import dynamic_sparse_tree
from jaxspec.trees.plan import count_steps
from jaxspec.tuning.latency import StepCosts, in_words, sizes_between, with_sources
from jaxspec.tuning.record import Ranks, Recording
from jaxspec.tuning.replay import replay, slowest

_BRANCHES = 4  # sizes to choose among in every step
_NEVER = 1e9  # cost of a size that is not to be chosen


@dataclasses.dataclass(frozen=True)
class Option:
    """A tree or budget of some sources, with its predicted speed.

    Attributes:
      name: what it is, in words.
      kind: likewise, whatever its number of rows.
      drafter: its sources and shape.
      tokens: per step.
      predicted: tokens per second, for one prompt.
    """

    name: str
    kind: str
    drafter: Drafter
    tokens: float
    predicted: float

    @property
    def rows(self) -> int:
        """R, rows of a step, padding included."""
        return self.drafter.num_rows


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Predicts how fast parts of a union are, or one method is.

    Attributes:
      drafter: the union; its shape does not matter.
      recordings: of its sources.
      ranks: of the sources that fill fixed trees, by their numbers.
      costs: of this machine.
      batch_size: B, answers decoded together.
      temperature: that the recorded answers were drawn at.
    """

    drafter: Drafter
    recordings: Sequence[Recording]
    ranks: Mapping[int, Ranks]
    costs: StepCosts
    batch_size: int
    temperature: float

    def options(self, max_rows: int) -> list[Option]:
        """Options of every subset of the sources: fixed trees, budgets of one size and several; fastest first."""
        every, found = range(len(self.drafter.sources)), []
        parts = [numbers for size in every for numbers in itertools.combinations(every, size + 1)]
        with Progress("replaying", len(parts), "unions") as progress:
            for done, numbers in enumerate(parts, 1):
                if budgets := list(self.budgets(numbers, max_rows)):
                    most = min(2 * fastest_first(budgets)[0].rows, max_rows)
                    found += [*budgets, self.expect(numbers, self._sized(budgets[0].drafter, most))]
                if len(numbers) == 1 and numbers[0] in self.ranks:
                    found += self.fixed_trees(numbers[0], max_rows)
                progress.update(done)
        return fastest_first(found)

    def expect(self, numbers: Sequence[int], tree: str | TreePlan, name: str = "") -> Option:
        """The option of some sources, by their numbers, with a tree; `name` is that of a plan."""
        part = with_sources(self.drafter, [self.drafter.sources[i] for i in numbers], tree)
        if isinstance(part.shape, Budget):
            drafting = [1e3 * self.costs.adds(source) for source in part.sources]
            found = replay(self.recordings, part, numbers, self.batch_size, self.temperature, drafting)
            seconds = found.time * (1e-3 if part.shape.sizes else self.costs(part))
            kind = "best of several sizes" if part.shape.sizes else "best"
            return self._option(part, part.shape.spec, kind, found.steps, seconds)
        [number] = numbers
        steps = np.array([count_steps(part.shape, ranks) for ranks in self.ranks[number].along_answers])
        seconds = slowest(steps, self.batch_size) * self.costs(part)
        name = name or str(tree)
        return self._option(part, name, name.partition(":")[0], steps, seconds)

    def _option(self, part: Drafter, tree: str, kind: str, steps: np.ndarray, seconds: float) -> Option:
        tokens = sum(len(recording.answer) - 1 for recording in self.recordings)
        count = max(source.draft_vocabulary for source in part.sources)
        name, kind = (in_words(f"{part.name} {words}", count) for words in (tree, kind))
        return Option(name, kind, part, float(tokens / steps.sum()), float(tokens / seconds / self.batch_size))

    def fixed_trees(self, number: int, max_rows: int) -> Iterator[Option]:
        """Options of one source, by its number: every fixed tree of at most `max_rows`."""
        facts, seen = self.drafter.sources[number].facts, set()
        accuracy = np.maximum(self.ranks[number].accuracy, 1e-6)  # a source that is never right has trees, too
        for name, plan in _plans(accuracy, max_rows, facts.probes, facts.probe_rows):
            rows = plan.num_nodes + plan.num_probes * facts.probe_rows
            if plan.depth and rows + facts.further_rows <= max_rows and plan.states not in seen:
                seen.add(plan.states)
                yield self.expect([number], plan, name)

    def budgets(self, numbers: Sequence[int], max_rows: int) -> Iterator[Option]:
        """Options of some sources, by their numbers: budgets of every number of rows.

        Several numbers of rows are one program, whose costs leave one size to choose.
        """
        sources = [self.drafter.sources[i] for i in numbers]

        def program(rows: int) -> tuple[int, ...]:
            return *Budget(rows).divided(sources)[1:], max(rows, 8).bit_length()

        for _, group in itertools.groupby(sizes_between(smallest_draft(sources), max_rows), program):
            sizes = list(group)
            for rows in sizes:
                part = with_sources(self.drafter, sources, f"best:{rows}")
                costs = {size: 1.0 if size == rows else _NEVER for size in sizes}
                only = Budget(sizes[-1], tuple(Size(size, cost, cost) for size, cost in costs.items()))
                alone = dataclasses.replace(part, shape=only)
                found = replay(self.recordings, alone, numbers, self.batch_size, self.temperature, paced=False)
                yield self._option(part, part.shape.spec, "best", found.steps, found.time * self.costs(part))

    def _sized(self, part: Drafter, most: int) -> str:
        """A budget of a few sizes up to so many rows, with their milliseconds.

        All but the root alone have all probes. Where other sources draft without these, so do some sizes.
        """
        complete, alone = _some(sizes_between(1 + Budget(most).added(part.sources), most), _BRANCHES), []
        if drafts_without_added(part.sources, self.batch_size * most):
            complete, alone = [complete[0], most], _some(sizes_between(2, most), 3)
        lookups = sum(self.costs.adds(source) for source in part.sources if not source.facts.adds_rows)

        def size(rows: int, seconds: float, nodes_alone: bool = False) -> Size:
            return Size(rows, 1e3 * seconds, 1e3 * seconds, nodes_alone)

        sizes = [size(1, self.costs.latency(1))]
        sizes += [size(rows, self.costs.latency(rows) + lookups, True) for rows in alone]
        sizes += [size(rows, self.costs(part, rows)) for rows in complete if rows > 1]
        return Budget(most, tuple(sizes)).spec


def _some(sizes: Sequence[int], count: int) -> list[int]:
    """At most so many of rising sizes, the first and the last among them."""
    return sorted({sizes[i] for i in np.linspace(0, len(sizes) - 1, count).round().astype(int)})


def fastest_first(options: Iterable[Option]) -> list[Option]:
    """Options by their predicted speed."""
    return sorted(options, key=lambda option: -option.predicted)


def best_of_kinds(options: Sequence[Option]) -> list[Option]:
    """The first option of each kind."""
    found: dict[str, Option] = {}
    for option in options:
        found.setdefault(option.kind, option)
    return list(found.values())


def _plans(accuracy: np.ndarray, max_rows: int, probes: int, probe_rows: float) -> Iterator[tuple[str, TreePlan]]:
    """Chains, sparse trees of every size, and dynamic trees of every size and balance of candidates and probes.

    Args:
      accuracy: [M, K].
      max_rows: rows of a step at most.
      probes: distances a node may carry probes for; 0 for methods that draft after the pass.
      probe_rows: rows per probe.
    """
    for length in range(1, len(accuracy) + 1):
        yield f"chain:{length}", chain(length)
    sizes = [n for n in range(2, max_rows + 1) if n < 16 or (n < 64 and n % 8 == 0) or n % 32 == 0]
    for depth in range(1, len(accuracy) + 1):
        for nodes in sizes:
            yield f"sparse:{nodes} of depth {depth}", sparse_tree(accuracy[:depth], nodes)
    for root_probes in range(1, probes + 1):
        for budget in sizes:
            for weight in (0.5, 1, 2):  # a state's candidates and probes are padded to the most of any state
                for least in (0, 1):
                    plan = dynamic_sparse_tree(
                        accuracy, budget, root_probes=root_probes, probe_cost=weight * probe_rows, min_probes=least
                    ).trimmed(root_probes)
                    yield f"dynamic:{budget} ({root_probes} at the root, {least} at least, weight {weight:g})", plan
