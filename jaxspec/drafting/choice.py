"""What tune.py found out about a machine, kept beside the adapter: which tree to decode with there, if any."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxspec.decoding.loop import Drafter
from jaxspec.drafting.adapter import (
    Adapter,
    adapter_plan,
    load_method,
    make_drafter,
    open_adapter,
    plain_drafter,
    settle,
)
from jaxspec.drafting.tree import TreePlan
from jaxspec.drafting.tree.plan import plan_from_json, plan_to_json
from jaxspec.errors import UserError
from jaxspec.files import read_json, write_atomically
from jaxspec.machine import this_machine
from jaxspec.methods import METHODS
from jaxspec.weights.load import Model

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


def find_choice(
    folder: Path, adapter: Adapter, model: Model, batch_size: int = 1, temperature: float = 0.0
) -> Choice | None:
    """What was chosen on a machine like this one, for this adapter and dtype, nearest to what is asked for.

    Args:
      folder: of the adapter.
      adapter: its content.
      model: the base.
      batch_size: a choice made for less than half or more than twice as many prompts does not count.
      temperature: of sampling.

    Returns:
      The nearest choice, the newest of several, or None.

    Raises:
      UserError: a damaged file.
    """
    wanted = (this_machine(), str(model.dtype), adapter.digest)
    near = [
        choice
        for choice in reversed(_read(folder, adapter.method.name))
        if (choice.machine, choice.dtype, choice.adapter) == wanted
        and batch_size / 2 <= choice.batch_size <= batch_size * 2
    ]
    apart = lambda c: (abs(c.temperature - temperature), abs(c.batch_size - batch_size))  # noqa: E731
    return min(near, key=apart, default=None)


def load_tuned(
    name: str, model: Model, adapter: str | Path | None = None, *, batch_size: int = 1, temperature: float = 0.0
) -> tuple[Drafter, str]:
    """The fastest way to decode on this machine as far as tune.py has found out, and a line that says what it is.

    That may be autoregressive decoding. Where this machine was never measured it is the adapter's own tree.

    Args:
      name: a key of `METHODS`.
      model: the base.
      adapter: folder of a trained adapter; default the one that ships for this method and base.
      batch_size: prompts decoded together.
      temperature: of sampling; 0 is greedy.

    Raises:
      UserError: as `load_method`.
    """
    if name in METHODS and not METHODS[name].trainable:
        return load_method(name, model, adapter), f"{name} drafts nothing: there is no tree to choose"
    folder, loaded = open_adapter(name, model, adapter)
    choice = find_choice(folder, loaded, model, batch_size, temperature)
    if choice is None:
        line = f"{name} was never tuned for this machine and batch size (tune.py does it): the adapter's own tree"
        return make_drafter(loaded, adapter_plan(loaded, None), model), line
    if choice.plan is None:
        _, tuned = settle(loaded, model)
        plain = plain_drafter(tuned if tuned is not model else None)
        return plain, f"no tree of {name} pays on this machine: autoregressive decoding"
    line = f"tuned for this machine: {choice.name} (batch {choice.batch_size}, temperature {choice.temperature:g})"
    return make_drafter(loaded, adapter_plan(loaded, choice.plan), model, choice.draft_vocabulary), line


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
