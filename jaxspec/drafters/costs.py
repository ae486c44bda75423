"""Costs of a base's steps by their rows: measured once on a machine and kept, or typical ones of its kind of device.

A draft pays where the tokens to expect of it are worth more than the time of its rows (`Best`), so whoever chooses rows
needs to know what they cost. `jaxspec tune --quick` and the server measure it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.errors import UserError
from jaxspec.files import locked, read_json, user_cache, writable, write_json
from jaxspec.machine import this_machine
from jaxspec.weights.load import Model

FILE = user_cache("costs.json")
GREEDY, SAMPLED = range(2)
_DAMAGED = (UserError, AttributeError, IndexError, KeyError, TypeError, ValueError)  # what a damaged file may raise


@dataclasses.dataclass(frozen=True)
class RowCosts:
    """Milliseconds of a step by its rows, or another unit that all share; on straight lines between and beyond.

    Attributes:
      rows: of all texts together, rising; those of probes count for the layers that they run through.
      costs: of greedy steps, and of sampled ones; at least two each.
      drafting: what drafting adds to both, by the name of a drafter.
      note: where they come from, in words; empty where they were measured.
    """

    rows: tuple[float, ...]
    costs: tuple[tuple[float, ...], tuple[float, ...]]
    drafting: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __call__(self, rows: float, kind: int = GREEDY) -> float:
        """The cost of a step with this number of rows.

        Args:
          rows: of all texts together.
          kind: `GREEDY` or `SAMPLED`.
        """
        costs = np.maximum.accumulate(self.costs[kind])  # a row more is never cheaper
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, costs))
        slope = (costs[-1] - costs[-2]) / (self.rows[-1] - self.rows[-2])
        return float(costs[-1] + (rows - self.rows[-1]) * slope)


# One row is 1. Two cores of an AMD EPYC in float32, SmolLM2-135M; an H100 in bfloat16, a 7B model.
_CPU = RowCosts((1, 4, 8, 16), ((1.0, 1.1, 1.45, 2.1), (1.02, 1.13, 1.47, 2.13)))
_ACCELERATOR = RowCosts((1, 8, 16, 32, 64, 128), ((1.0, 1.01, 1.02, 1.05, 1.12, 1.2),) * 2)


def find_costs(model: Model, batch_size: int = 1) -> RowCosts:
    """The costs of a base's steps on this machine, measured with so many texts or with one, else typical ones."""
    typical, device = (_CPU, "a CPU") if jax.default_backend() == "cpu" else (_ACCELERATOR, "an accelerator")
    note = f"costs of rows are typical ones of {device}"
    try:
        content = _content()
        for texts in (batch_size, 1):
            if found := content.get(_circumstances(model, texts)):
                return _parsed(found)
    except _DAMAGED:
        note = f"{FILE} is damaged: {note}"
    return dataclasses.replace(typical, note=f"{note} (`jaxspec tune --quick` measures them)")


def save_costs(model: Model, batch_size: int, costs: RowCosts) -> None:
    """Keep costs that were measured with so many texts, beside those of other bases and other drafters.

    A damaged file is replaced. Raises UserError where it cannot be written.
    """
    writable(FILE.parent)
    key, new = _circumstances(model, batch_size), dataclasses.asdict(costs)
    with locked(FILE.with_suffix(".lock")):
        try:
            content = _content()
            if key in content:
                new["drafting"] = {**_parsed(content[key]).drafting, **new["drafting"]}
        except _DAMAGED:
            content = {}
        write_json(FILE, content | {key: new})


def _content() -> dict[str, Any]:
    return read_json(FILE) if FILE.exists() else {}


def _circumstances(model: Model, batch_size: int) -> str:
    """The key of a base's costs: its shapes and dtype, the machine, JAX, and how many texts were decoded."""
    shapes = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    key = {"shapes": shapes, "dtype": model.precision, "jax": jax.__version__, "batch_size": batch_size}
    return json.dumps(key | this_machine(), sort_keys=True)


def _parsed(row: dict[str, Any]) -> RowCosts:
    """The costs in a row of the file; raises one of several errors for what is none."""
    rows, costs = tuple(map(float, row["rows"])), np.asarray(row["costs"], float)
    drafting = {name: (float(greedy), float(sampled)) for name, (greedy, sampled) in row["drafting"].items()}
    if costs.shape != (2, len(rows)) or len(rows) < 2 or not (np.isfinite(costs).all() and (costs > 0).all()):
        raise ValueError("costs must be positive numbers")
    if not (np.isfinite(rows).all() and (np.diff([0, *rows]) > 0).all()):
        raise ValueError("rows must rise")
    return RowCosts(rows, tuple(map(tuple, costs.tolist())), drafting)
