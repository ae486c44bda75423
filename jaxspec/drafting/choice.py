"""What tune.py found out about a machine, kept beside the adapter: which tree to decode with there, if any."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxspec.drafting.adapter import Adapter
from jaxspec.drafting.tree import TreePlan
from jaxspec.drafting.tree.plan import plan_from_json, plan_to_json
from jaxspec.errors import UserError
from jaxspec.files import read_json, write_atomically
from jaxspec.machine import this_machine

_FILE = "tuned.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest way to decode under given circumstances.

    Attributes:
      machine: of `this_machine`.
      dtype: of the base's weights.
      adapter: digest of the adapter's weights; others would have other accuracies.
      batch_size: prompts decoded together.
      cache_length: S, slots of the cache while measuring.
      temperature: of sampling; 0 is greedy.
      plan: the tree, or None where autoregressive decoding is faster than all of them.
      name: the tree in words.
      info: the figures behind it.
      draft_vocabulary: how many tokens to draft; 0 is all.
    """

    machine: dict[str, Any]
    dtype: str
    adapter: str
    batch_size: int
    cache_length: int
    temperature: float
    plan: TreePlan | None
    name: str
    info: dict[str, Any]
    draft_vocabulary: int = 0


def save_choice(folder: Path, method: str, choice: Choice) -> Path:
    """Write a choice beside an adapter, in place of an earlier one under the same circumstances."""
    kept = [c for c in _read(folder, method) if _circumstances(c) != _circumstances(choice)]
    rows = [
        dataclasses.asdict(dataclasses.replace(c, plan=None)) | {"plan": c.plan and plan_to_json(c.plan)}
        for c in [*kept, choice]
    ]
    write_atomically(folder / _FILE, json.dumps({"method": method, "choices": rows}, indent=1).encode())
    return folder / _FILE


def find_choice(adapter: Adapter, dtype: str, batch_size: int = 1, temperature: float = 0.0) -> Choice | None:
    """What was chosen on a machine like this one, for this adapter and dtype, nearest to what is asked for.

    Args:
      adapter: with its folder, where choices are kept; there are none for one that was not read from disk.
      dtype: of the base's weights.
      batch_size: a choice made for less than half or more than twice as many prompts does not count.
      temperature: of sampling.

    Returns:
      The nearest choice, the newest of several, or None.

    Raises:
      UserError: a damaged file.
    """
    choices = _read(adapter.folder, adapter.method.name) if adapter.folder else []
    wanted = (this_machine(), dtype, adapter.digest) if choices else ()
    near = [
        choice
        for choice in reversed(choices)
        if (choice.machine, choice.dtype, choice.adapter) == wanted
        and batch_size / 2 <= choice.batch_size <= batch_size * 2
    ]
    apart = [(abs(choice.temperature - temperature), abs(choice.batch_size - batch_size)) for choice in near]
    return near[apart.index(min(apart))] if near else None


def _circumstances(choice: Choice) -> tuple:
    return choice.machine, choice.dtype, choice.batch_size, choice.cache_length, choice.temperature


def _read(folder: Path, method: str) -> list[Choice]:
    file = folder / _FILE
    if not file.exists():
        return []
    content = read_json(file)
    if content.get("method") != method:
        raise UserError(f"{file}: these trees belong to method {content.get('method')!r}, not {method!r}")
    try:
        return [
            Choice(**row | {"plan": row["plan"] and plan_from_json(row["plan"], str(file))})
            for row in content["choices"]
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: not written by tune.py ({error})") from None
