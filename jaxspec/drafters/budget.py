"""A budget of rows for the best nodes of all offers."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import jax.numpy as jnp

from jaxspec.decoding.shape import Best
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError

_MOST_ROWS = 4096
_FEW_NODES = 4


@dataclasses.dataclass(frozen=True)
class Budget:
    """The best nodes of all offers, chosen in every step: `best:ROWS`, or `best:ROWS@MS,ROWS@MS` of several sizes.

    The host-side part, as a user writes it; `Best` is its arrays in the jitted loop.

    Attributes:
      rows: of the largest step, the root and probes included.
      sizes: rows and milliseconds of every size a step may have, the smallest first; empty where there is only one.
    """

    rows: int
    sizes: tuple[tuple[int, float], ...] = ()

    @property
    def spec(self) -> str:
        """As a user writes it."""
        sizes = ",".join(f"{rows}@{cost:g}" for rows, cost in self.sizes)
        return f"best:{sizes or self.rows}"

    def divided(self, sources: Sequence[Source]) -> tuple[int, int, int]:
        """Nodes, how many of them carry probes, and how many each. Raises UserError for too few rows."""
        probing = [source.facts for source in sources if source.facts.probes]
        distances, rows = (probing[0].probes, probing[0].probe_rows) if probing else (0, 0)
        # Half of what is left of a few nodes, but one node's. Replays of BiTA and Hidden Transfer find no better share:
        # nodes without probes borrow those of their ancestors.
        owners = max(1, (self.rows - _FEW_NODES) // 2 // (distances * rows)) if probing else 0
        nodes = self.rows - owners * distances * rows - further_rows(sources)
        if nodes < 2:
            least = smallest_draft(sources)
            added = "the root, a candidate and its probes" if probing else "the root, a candidate and the method's own"
            raise UserError(f"tree {self.spec}: a draft needs {least} rows, {added}")
        if self.sizes and self.sizes[0][0] <= self.rows - nodes:
            least = 1 + self.rows - nodes
            added = "all probes" if probing else "the method's own"
            raise UserError(f"tree {self.spec}: the smallest size needs {least} rows, the root and {added}")
        return nodes, owners, distances

    def with_sizes(self, sources: Sequence[Source]) -> Budget:
        """The budget with smaller sizes, from no draft on, where it has only one.

        Their milliseconds are not measured yet: all are equal, so that the largest is chosen.
        """
        least = 1 + self.rows - self.divided(sources)[0]
        sizes = sorted({least, (least + self.rows) // 2, self.rows})
        return self if self.sizes else Budget(self.rows, tuple((rows, 1.0) for rows in sizes))

    def on_device(self, sources: Sequence[Source]) -> Best:
        """The device-side part."""
        nodes, owners, distances = self.divided(sources)
        depth = min(nodes - 1, max(source.facts.distances for source in sources))
        trees = tuple(source.tree.arrays(0) for source in sources)
        sizes = tuple(rows - (self.rows - nodes) for rows, _ in self.sizes)
        costs = jnp.asarray([cost for _, cost in self.sizes], jnp.float32) if sizes else None
        return Best(trees, nodes, owners, distances, depth, sizes, costs)


def further_rows(sources: Sequence[Source]) -> int:
    """Rows of every step that are neither nodes nor probes."""
    return sum(source.facts.further_rows for source in sources)


def smallest_draft(sources: Sequence[Source]) -> int:
    """Rows of the smallest draft: the root, a candidate and its probes, and what a method adds to every step."""
    probes = max(source.facts.probes * source.facts.probe_rows for source in sources)
    return 2 + probes + further_rows(sources)


def default_budget(sources: Sequence[Source]) -> Budget:
    """The budget of sources that are given no tree: a union's, or that of a method whose candidates fit none.

    Raises UserError for settings that need too many rows.
    """
    adding = [source.facts for source in sources if source.facts.further_rows]
    rows = max(
        8, smallest_draft(sources), *(1 + (f.default_candidates or f.distances) + f.further_rows for f in adding)
    )
    if rows > _MOST_ROWS:
        raise UserError(f"a draft of {rows} rows is larger than the largest, {_MOST_ROWS}: choose smaller settings")
    return Budget(rows)


def parse_budget(tree: str, sources: Sequence[Source]) -> Budget:
    """The budget of rows that `best:ROWS` asks for. Raises UserError for no such number, or too few rows."""
    parts = tree.removeprefix("best:").split(",")
    found = [re.fullmatch(r"(\d+)(?:@(\d+(?:\.\d+)?))?", part) for part in parts]
    rows = [int(match[1]) if match else 0 for match in found]
    if not 2 <= rows[-1] <= _MOST_ROWS or not all(found):
        raise UserError(f"tree {tree!r}: write best:ROWS with 2 to {_MOST_ROWS} rows, or best:ROWS@MS,ROWS@MS")
    costs = [float(match[2] or 0) for match in found]
    if len(parts) > 1 and min(costs) <= 0:
        raise UserError(f"tree {tree!r}: of several sizes each needs its milliseconds, as in best:1@21,4@23.5")
    if not rows[0] or any(more <= less for less, more in itertools.pairwise(rows)):
        raise UserError(f"tree {tree!r}: sizes must be given in order, from 1 row on")
    budget = Budget(rows[-1], tuple(zip(rows, costs, strict=True)) if len(parts) > 1 else ())
    budget.divided(sources)  # refuses one that is too small
    return budget
