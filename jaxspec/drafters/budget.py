"""A budget of rows for the best nodes of all offers."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.shape import Best
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError

_MOST_ROWS = 4096
_FEW_NODES = 4
_ROWS_FOR_MANY_PROBES = 12  # in smaller steps, by replays, nodes bring more than further probes
_COST = r"(\d{1,12}(?:\.\d{1,24})?)"
_SIZE = re.compile(rf"(\d{{1,6}})(n?)(?:@{_COST}(?:/{_COST})?)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Size:
    """A size that a step may have.

    Attributes:
      rows: of the step, the root and what a method adds included; of the root alone 1.
      greedy: milliseconds of a greedy step, or another unit that all sizes share.
      sampled: likewise, of a sampled one.
      nodes_alone: whether the step has none of the rows that a method adds, as the root alone never has.
    """

    rows: int
    greedy: float
    sampled: float
    nodes_alone: bool = False

    @property
    def has_added(self) -> bool:
        """Whether the step has the rows that a method adds, if one does."""
        return self.rows > 1 and not self.nodes_alone

    @property
    def spec(self) -> str:
        """As a user writes it."""
        greedy, sampled = map(_digits, (self.greedy, self.sampled))
        rows = f"{self.rows}n" if self.nodes_alone else f"{self.rows}"
        return f"{rows}@{greedy}" if greedy == sampled else f"{rows}@{greedy}/{sampled}"


def _digits(cost: float) -> str:
    """Four significant digits, without an exponent."""
    return np.format_float_positional(cost, precision=4, fractional=False, trim="-")


@dataclasses.dataclass(frozen=True)
class Budget:
    """The best nodes of all offers, chosen in every step: `best:ROWS`, or `best:ROWS@MS,ROWS@MS` of several sizes.

    A size written `4n@MS` has four nodes alone, without probes or other rows that a method adds.

    The host-side part, as a user writes it; `Best` is its arrays in the jitted loop.

    Attributes:
      rows: of the largest step, the root and probes included.
      sizes: every size a step may have, those of nodes alone first, each the smallest first; empty where there is only
        one.
      guessed: whether the costs of the sizes are typical ones or estimates, to be replaced by measured ones.
    """

    rows: int
    sizes: tuple[Size, ...] = ()
    guessed: bool = False

    @property
    def spec(self) -> str:
        """As a user writes it."""
        return f"best:{','.join(size.spec for size in self.sizes) or self.rows}"

    def divided(self, sources: Sequence[Source]) -> tuple[int, int, int]:
        """Nodes, how many of them carry probes, and how many each. Raises UserError for too few rows."""
        probing = [source.facts for source in sources if source.facts.probes]
        distances, rows = (probing[0].probes, probing[0].probe_rows) if probing else (0, 0)
        # By replays of PPD, BiTA and Hidden Transfer. Of few rows two are probes, at distance 1. Of many it is half of
        # what is left of a few nodes, but one node's: nodes without probes borrow those of their ancestors.
        if self.rows < _ROWS_FOR_MANY_PROBES:
            distances, probes = min(distances, 1), min(2, self.rows - 2)
        else:
            probes = (self.rows - _FEW_NODES) // 2
        owners = max(1, probes // (distances * rows)) if probing else 0
        nodes = self.rows - owners * distances * rows - further_rows(sources)
        if nodes < 2:
            least = smallest_draft(sources)
            added = "the root, a candidate and its probes" if probing else "the root, a candidate and the method's own"
            raise UserError(f"tree {self.spec}: a draft needs {least} rows, {added}")
        if any(size.has_added and size.rows <= self.rows - nodes for size in self.sizes):
            least = 1 + self.rows - nodes
            added = "all probes" if probing else "the method's own"
            raise UserError(
                f"tree {self.spec}: a size needs {least} rows, the root and {added}, or is the root alone, 1, or nodes "
                "alone, like 4n"
            )
        return nodes, owners, distances

    def added(self, sources: Sequence[Source]) -> int:
        """Rows of a step that are no nodes."""
        return self.rows - self.divided(sources)[0]

    def nodes(self, sources: Sequence[Source]) -> list[int]:
        """Nodes of each size, of the only one where there is one."""
        added = self.added(sources)
        sizes = [size.rows - added if size.has_added else size.rows for size in self.sizes]
        return sizes or [self.rows - added]

    def on_device(self, sources: Sequence[Source]) -> Best:
        """The device-side part."""
        sizes, (_, owners, distances) = self.nodes(sources), self.divided(sources)
        depth = min(max(sizes) - 1, max(source.facts.distances for source in sources))
        trees = tuple(source.tree.arrays(0) for source in sources)
        best = Best(trees, max(sizes), owners, distances, depth)
        if not self.sizes:
            return best
        adding = [1 << i for i, source in enumerate(sources) if source.facts.adds_rows]
        alone = sum(not size.has_added for size in self.sizes) if adding else 0
        costs = np.array([[s.greedy for s in self.sizes], [s.sampled for s in self.sizes]], np.float32)
        return best.replace(sizes=tuple(sizes), alone=alone, adding=sum(adding), costs=jnp.asarray(costs))


def further_rows(sources: Sequence[Source]) -> int:
    """Rows of every step that are neither nodes nor probes."""
    return sum(source.facts.further_rows for source in sources)


def smallest_draft(sources: Sequence[Source]) -> int:
    """Rows of the smallest draft: the root, a candidate, a probe, and what a method adds to every step."""
    return 2 + max(source.facts.probe_rows for source in sources) + further_rows(sources)


def default_rows(sources: Sequence[Source], wanted: int) -> int:
    """Rows of the largest step of sources that were given no tree: so many, or more where they need more.

    Raises UserError for settings that need too many rows.
    """
    adding = [source.facts for source in sources if source.facts.further_rows]
    needed = (1 + (f.default_candidates or f.distances) + f.further_rows for f in adding)
    rows = max(wanted, smallest_draft(sources), *needed)
    if rows > _MOST_ROWS:
        raise UserError(f"a draft of {rows} rows is larger than the largest, {_MOST_ROWS}: choose smaller settings")
    return rows


def parse_budget(tree: str, sources: Sequence[Source]) -> Budget:
    """The budget of rows that `best:ROWS` asks for. Raises UserError for no such number, or too few rows."""
    parts = tree.removeprefix("best:").split(",")
    matches = [_SIZE.fullmatch(part) for part in parts]
    rows = [int(match[1]) if match else 0 for match in matches]
    alone = [bool(match and match[2] and count > 1) for match, count in zip(matches, rows, strict=True)]
    if not 2 <= rows[-1] <= _MOST_ROWS or not all(matches):
        raise UserError(
            f"tree {tree!r}: write best:ROWS with 2 to {_MOST_ROWS} rows, or best:ROWS@MS,ROWS@MS with milliseconds "
            "like 23.5, or with those of greedy and of sampled steps, ROWS@MS/MS; 4n@MS has 4 nodes alone"
        )
    costs = [(float(match[3] or 0), float(match[4] or match[3] or 0)) for match in matches]
    if len(parts) == 1 and matches[0][3]:
        raise UserError(f"tree {tree!r}: one size has no choice to make and needs no milliseconds: best:{rows[0]}")
    if len(parts) > 1 and min(map(min, costs)) <= 0:
        raise UserError(f"tree {tree!r}: of several sizes each needs its milliseconds, as in best:1@21,4@23.5")
    sizes = tuple(Size(count, *cost, nodes) for count, cost, nodes in zip(rows, costs, alone, strict=True))
    if any(alone) and not any(source.facts.adds_rows for source in sources):
        names = "+".join(source.method.name for source in sources)
        raise UserError(f"tree {tree!r}: {names} adds no rows to nodes; leave out the n")
    _check_order(tree, sizes)
    budget = Budget(rows[-1], sizes if len(parts) > 1 else ())
    budget.divided(sources)  # refuses one that is too small
    return budget


def _check_order(tree: str, sizes: Sequence[Size]) -> None:
    """Raise UserError unless sizes of nodes alone come first, and each kind rises; the last is the largest."""
    order = [(size.has_added, size.rows) for size in sizes]
    rising = order[0][1] > 0 and all(less < more for less, more in itertools.pairwise(order))
    if not rising or max(size.rows for size in sizes) > sizes[-1].rows or sizes[-1].nodes_alone:
        raise UserError(
            f"tree {tree!r}: sizes must be given in order, from 1 row on, those of nodes alone first; the last is the "
            "largest and has all rows"
        )
