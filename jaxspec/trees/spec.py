"""A tree as a user writes it: `sparse:16`, `dynamic:60`, `chain:3`, `cartesian:3,2`, `efficient:5`, or a file."""

from __future__ import annotations

import json
import os
from pathlib import Path as File
from typing import Any

from jaxspec.errors import UserError, suggest
from jaxspec.files import read_text
from jaxspec.trees.builders import cartesian, chain, efficient, medusa, random_tree, sparse_tree, straightforward
from jaxspec.trees.dynamic import dynamic_sparse_tree
from jaxspec.trees.plan import TreePlan, plan_from_json, plan_to_json
from jaxspec.trees.stripped import stripped_tree

RANKS = 10  # candidates per distance that accuracies are measured for
# builder: how many numbers it takes (None: one per level), and what they are
_BUILDERS = {
    "chain": (1, "LENGTH"),
    "straightforward": (1, "LENGTH"),
    "cartesian": (None, "WIDTH,WIDTH,..."),
    "efficient": (None, "WIDTH or WIDTH,WIDTH,..."),
    "sparse": (1, "NODES, the root included"),
    "medusa": (1, "NODES, the root included"),
    "random": (1, "NODES, the root included"),
    "dynamic": (1, "ROWS beyond the root and its probes, late probes counting less"),
    "stripped": (1, "ROWS beyond the root and its probes, late probes counting less"),
}
# those whose paths follow from the numbers alone
_OF_NUMBERS = {"cartesian": cartesian, "medusa": lambda numbers: medusa(numbers[0])}
_ABOUT_PROBES = ("straightforward", "dynamic", "stripped")


def parse_tree(spec: str, method: str, distances: int, accuracy: list | None, probe_cost: float = 1.0) -> TreePlan:
    """Build the tree that a specification asks for.

    Args:
      spec: `BUILDER:NUMBERS` or the path of a JSON file, a list of paths or what `save_plan` writes.
      method: the method that will use it.
      distances: M, how deep it can be.
      accuracy: [M][K] of the adapter, for `sparse`, `dynamic` and `stripped`.
      probe_cost: rows that a probe counts for, for the last two; 0 for methods without probes.

    Raises:
      UserError: an unknown builder or one that the method has no use for, wrong numbers, a bad file, or a tree deeper
        than the method's distances.
    """
    name, _, numbers = spec.partition(":")
    if name in _ABOUT_PROBES and not probe_cost:
        raise UserError(f"tree {spec!r} says where probes go, and {method} has none; try sparse:NODES or chain:LENGTH")
    if name in _BUILDERS:
        plan = _build(name, _numbers(name, numbers), distances, accuracy, probe_cost)
    elif os.path.isfile(spec):
        plan = load_plan(File(spec), method)
    else:
        raise UserError(
            f"tree {spec!r} is neither a file nor a builder{suggest(name, _BUILDERS)}; builders: "
            + "; ".join(f"{builder}:{takes}" for builder, (_, takes) in _BUILDERS.items())
            + "; in decoding also auto, own and best:ROWS"
        )
    if plan.depth > distances:
        raise UserError(f"tree {spec!r} is too deep: {method} has candidates for {distances} distances")
    if not plan.depth:
        raise UserError(f"tree {spec!r} has no candidates")
    return plan


def _numbers(name: str, text: str) -> list[int]:
    count, takes = _BUILDERS[name]
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (count and len(numbers) != count):
        raise UserError(f"tree {f'{name}:{text}'!r}: write {name}:{takes}")
    return numbers


def _build(name: str, numbers: list[int], distances: int, accuracy: list | None, probe_cost: float) -> TreePlan:
    if name in ("chain", "straightforward"):
        return (chain if name == "chain" else straightforward)(min(numbers[0], distances + 1))  # too deep is too deep
    if name in _OF_NUMBERS:
        return _OF_NUMBERS[name](numbers)
    if name == "efficient":
        return efficient(numbers * distances if len(numbers) == 1 else numbers)
    if name == "random":
        return random_tree(distances, RANKS, numbers[0])
    if accuracy is None:
        raise UserError(f"tree: {name} needs the adapter's measured accuracies, and it holds none")
    if name == "sparse":
        return sparse_tree(accuracy, numbers[0])
    if name == "stripped":
        return stripped_tree(accuracy, numbers[0], probe_cost).trimmed(distances)
    plans = [
        dynamic_sparse_tree(accuracy, numbers[0], root_probes=n, probe_cost=probe_cost).trimmed(n)
        for n in range(1, distances + 1)
    ]
    most = max(plan.expected_tokens for plan in plans)  # the root's probes come on top: no more than are of use
    return next(plan for plan in plans if plan.expected_tokens >= most - 1e-9)


def save_plan(plan: TreePlan, method: str) -> dict[str, Any]:
    """A tree file's content."""
    return {"method": method, "states": plan_to_json(plan)}


def load_plan(file: File, method: str) -> TreePlan:
    """Read a tree file: a list of paths, or what `save_plan` made.

    Raises:
      UserError: not such a file, or one of another method.
    """
    try:
        content = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{file}: {error}") from None
    if isinstance(content, dict):
        if content.get("method") != method:
            raise UserError(f"{file}: this tree belongs to method {content.get('method')!r}, not {method!r}")
        content = content.get("states")
    return plan_from_json(content, str(file))
