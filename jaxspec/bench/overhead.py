"""Draft overhead: the parts of a decoding step of every method, timed."""

from __future__ import annotations

from typing import Any

from jaxspec.drafters.drafter import Drafter
from jaxspec.markdown import table
from jaxspec.tuning.latency import bare, step_times
from jaxspec.weights.load import Model

_CACHE, _ROUNDS = 512, 9


def measure_overhead(model: Model, drafters: dict[str, Drafter], batch_size: int) -> dict[str, dict[str, float]]:
    """Time greedy steps of every method, of its tree's nodes without drafting, and of one node, in turn.

    Args:
      model: the base.
      drafters: the drafters by name, autoregressive decoding left out.
      batch_size: B.

    Returns:
      {name: {`nodes` and `rows` of the step, seconds of one node alone (`plain`), of all nodes without drafting
      (`verifying`), and of the step (`whole`)}}.
    """
    if not drafters:
        return {}
    steps: dict[Any, Drafter] = {"plain": bare(model, 1)}  # a base of a method's own is as fast
    for name, drafter in drafters.items():
        steps |= {(name, "whole"): drafter, (name, "verifying"): bare(drafter.model, drafter.num_nodes)}
    seconds = step_times(steps, _CACHE, _ROUNDS, batch_size)
    return {
        name: {"nodes": drafter.num_nodes, "rows": drafter.num_rows, "plain": seconds["plain"]}
        | {part: seconds[name, part] for part in ("verifying", "whole")}
        for name, drafter in drafters.items()
    }


def overhead_table(found: dict[str, dict[str, float]]) -> list[str]:
    """The table of a step's parts in milliseconds, and how to read it."""
    heads = ["method", "nodes", "rows", "autoregressive", "verifying the nodes", "drafting", "whole step"]
    rows = []
    for name, parts in found.items():
        plain, verifying, whole = (1e3 * parts[part] for part in ("plain", "verifying", "whole"))
        seconds = (plain, verifying - plain, whole - verifying, whole)
        rows.append([name, parts["nodes"], parts["rows"], *(f"{value:.1f}" for value in seconds)])
    return [
        *table(heads, rows),
        "",
        f"Milliseconds of greedy steps, {_CACHE} slots of cache, medians of {_ROUNDS}. Drafting is the probes' rows, "
        "or what follows the pass. In another process, where programs lie elsewhere in memory, any of these may take a "
        "few milliseconds more or less; *step cost* above is of the answers themselves.",
    ]
