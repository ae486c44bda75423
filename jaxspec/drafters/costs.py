"""Costs of a base's steps by their rows: measured once on a machine and kept, or typical ones of its kind of device.

A draft pays where the tokens to expect of it are worth more than the time of its rows (`Best`), so whoever chooses rows
needs to know what they cost. `jaxspec tune --quick` and the server measure it; else the first steps of an answer do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.errors import UserError
from jaxspec.files import locked, user_cache, writable, write_json
from jaxspec.machine import this_machine
from jaxspec.parallel.sharding import mesh_of
from jaxspec.weights.model import Model

FILE = user_cache("costs.json")
GREEDY, SAMPLED = range(2)
_DAMAGED = (AttributeError, OverflowError, RecursionError, TypeError, ValueError)  # what damaged content may raise
Samples = dict[tuple[int, bool], list[float]]  # seconds of steps by size, and by whether they draft for the next one
_Table = dict[str, tuple[float, float, int]]  # greedy and sampled milliseconds, and of how many steps


@dataclasses.dataclass(frozen=True)
class RowCosts:
    """Milliseconds of a step by its number of rows, or another unit that all share; on straight lines in between.

    Attributes:
      rows: numbers of rows, rising, each of all texts of a batch together. A row that runs through a part of the layers
        only, as probes do, counts for that part.
      costs: [2][rows], of greedy steps and of sampled ones, for at least two numbers of rows.
      drafting: milliseconds that drafting adds to a greedy and to a sampled step, by `cost_name`.
      note: what is to be said about them; empty where they were measured.
      typical: whether they are those of a kind of device, not of this machine.
    """

    rows: tuple[float, ...]
    costs: tuple[tuple[float, ...], tuple[float, ...]]
    drafting: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    note: str = ""
    typical: bool = False

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


def kind_of(temperature: float) -> int:
    """`GREEDY` or `SAMPLED`: which steps a temperature takes."""
    return SAMPLED if temperature > 0 else GREEDY


def find_costs(model: Model, batch_size: int = 1) -> RowCosts:
    """The costs of a base's steps on this machine.

    Those measured with this batch size are taken, else those measured with one text, else typical ones. A file that is
    damaged or cannot be read is named in their note.
    """
    problem = ""
    try:
        content = _content()
    except OSError as error:
        content, problem = {}, f"{FILE} cannot be read ({error.strerror})"
    except _DAMAGED:
        content, problem = {}, f"{FILE} is damaged"
    for key in (_circumstances(model, texts) for texts in (batch_size, 1)):
        if key not in content:
            continue
        try:
            return dataclasses.replace(_costs(_tables(content[key])), note=problem)
        except _DAMAGED:
            problem = f"{FILE} is damaged"
    typical, device = (_CPU, "a CPU") if jax.default_backend() == "cpu" else (_ACCELERATOR, "an accelerator")
    note = f"costs of rows are typical ones of {device} to begin with (`jaxspec tune --quick` measures them)"
    return dataclasses.replace(typical, note=f"{problem}: {note}" if problem else note, typical=True)


def check_costs_file() -> None:
    """Raise UserError where `save_costs` could not write, before anything is measured."""
    writable(FILE.parent)
    if os.path.isdir(FILE):
        raise UserError(f"{FILE}: cannot be written (it is a folder); remove it")


def save_costs(model: Model, batch_size: int, costs: RowCosts, rounds: int) -> str:
    """Keep costs, beside those of other bases and of other drafters.

    Args:
      model: the base.
      batch_size: texts decoded together.
      costs: what was measured.
      rounds: steps that each cost was measured by, at most; what more of them have measured before is not replaced.

    Returns:
      What was damaged, and is replaced; empty where nothing was.

    Raises:
      UserError: the file cannot be written.
    """
    check_costs_file()
    measured = zip(costs.rows, *costs.costs, strict=True)
    new = {
        "rows": {repr(float(rows)): (greedy, sampled, rounds) for rows, greedy, sampled in measured},
        "drafting": {name: (greedy, sampled, rounds) for name, (greedy, sampled) in costs.drafting.items()},
    }
    key, content, note = _circumstances(model, batch_size), {}, ""
    try:
        with locked(FILE.with_suffix(".lock")):
            try:
                content = _content()
                if key in content:
                    new = _merged(_tables(content[key]), new)
            except _DAMAGED:
                note = f"{FILE} is damaged: " + ("the costs of this base are replaced" if content else "it is replaced")
            write_json(FILE, content | {key: new})
    except OSError as error:
        raise UserError(f"{FILE}: cannot be written ({error.strerror})") from None
    return note


def _content() -> dict[str, Any]:
    """The content of the file, nothing where there is none. Raises OSError or one of `_DAMAGED`."""
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


def _circumstances(model: Model, batch_size: int) -> str:
    """The key of a base's costs: its shapes and dtype, machine and mesh, JAX, and how many texts were decoded."""
    shapes = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    mesh = mesh_of(model.params)
    devices = {axis: size for axis, size in mesh.shape.items() if size > 1} if mesh else {}
    key = {"shapes": shapes, "dtype": model.precision, "jax": jax.__version__, "batch_size": batch_size}
    return json.dumps(key | this_machine() | {"mesh": devices}, sort_keys=True)


def _tables(entry: Any) -> dict[str, _Table]:
    """What the file holds of one base: costs by rows and of drafting. Raises one of `_DAMAGED` for anything else."""
    tables = {}
    for part in ("rows", "drafting"):
        given = dict(entry).get(part, {}).items()
        tables[part] = {name: (float(greedy), float(sampled), int(n)) for name, (greedy, sampled, n) in given}
        values = [value for costs in tables[part].values() for value in costs]
        if not (np.isfinite(values).all() and (np.array(values) >= 0).all()):
            raise ValueError("costs must be finite and not negative")
    _costs(tables)
    return tables


def _costs(tables: Mapping[str, _Table]) -> RowCosts:
    """The costs in such tables. Raises ValueError for rows that do not rise from above 0, or costs of nothing."""
    steps = sorted((float(rows), *measured) for rows, measured in tables["rows"].items())
    rows, greedy, sampled, _ = zip(*steps, strict=True)
    if len(rows) < 2 or not (np.isfinite(rows).all() and (np.diff([0, *rows]) > 0).all()):
        raise ValueError("rows must rise")
    if min(greedy + sampled) <= 0:
        raise ValueError("a step takes time")
    drafting = {name: measured[:2] for name, measured in tables["drafting"].items()}
    return RowCosts(rows, (greedy, sampled), drafting)


def _merged(kept: Mapping[str, _Table], new: Mapping[str, _Table]) -> dict[str, _Table]:
    """Of two measurements the one of more steps, else the newer one: all its rows, and what drafting each adds.

    Rows of both together would not rise: a machine is not equally busy at both times.
    """
    drafting = kept["drafting"] | {
        name: row
        for name, row in new["drafting"].items()
        if name not in kept["drafting"] or row[2] >= kept["drafting"][name][2]
    }
    return {"rows": max(new["rows"], kept["rows"], key=_rounds), "drafting": drafting}


def _rounds(rows: _Table) -> int:
    """How many steps the costs of all rows were measured by, at least."""
    return min(rounds for _, _, rounds in rows.values())
