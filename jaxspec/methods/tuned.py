"""What tune.py found out about a machine, kept beside the adapter: which tree to decode with there, if any."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax

from jaxspec.decoding.loop import Drafter
from jaxspec.errors import UserError
from jaxspec.methods.adapter import adapter_plan, load_method, make_drafter, open_adapter, write_atomically
from jaxspec.model.hf import read_json
from jaxspec.model.load import Model
from jaxspec.tree import TreePlan
from jaxspec.tree.plan import plan_from_json, plan_to_json

_FILE = "tuned.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest way to decode under given circumstances.

    Attributes:
      machine: of `this_machine`.
      batch_size: prompts decoded together.
      cache_length: S, slots of the cache while measuring.
      temperature: of sampling; 0 is greedy.
      plan: the tree, or None where autoregressive decoding is faster than all of them.
      name: the tree in words.
      info: the figures behind it.
    """

    machine: dict[str, Any]
    batch_size: int
    cache_length: int
    temperature: float
    plan: TreePlan | None
    name: str
    info: dict[str, Any]


def this_machine() -> dict[str, Any]:
    """Platform, kind of device, and where the device is a CPU the number of cores this process may use."""
    device = jax.devices()[0]
    machine = {"platform": device.platform, "device": device.device_kind}
    return machine | {"cores": len(os.sched_getaffinity(0))} if device.platform == "cpu" else machine


def save_choice(folder: Path, method: str, choice: Choice) -> Path:
    """Write a choice beside an adapter, in place of an earlier one under the same circumstances."""
    kept = [c for c in _read(folder, method) if _circumstances(c) != _circumstances(choice)]
    rows = [
        dataclasses.asdict(dataclasses.replace(c, plan=None)) | {"plan": c.plan and plan_to_json(c.plan)}
        for c in [*kept, choice]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _FILE, json.dumps({"method": method, "choices": rows}, indent=1).encode())
    return folder / _FILE


def find_choice(folder: Path, method: str, batch_size: int = 1, temperature: float = 0.0) -> Choice | None:
    """What was chosen on a machine like this one for the nearest batch size and temperature, or None."""
    here = [choice for choice in _read(folder, method) if choice.machine == this_machine()]
    apart = lambda c: (abs(c.batch_size - batch_size), abs(c.temperature - temperature))  # noqa: E731
    return min(here, key=apart, default=None)


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
    folder, loaded = open_adapter(name, model, adapter)
    choice = find_choice(folder, name, batch_size, temperature)
    if choice is None:
        line = f"{name} was never tuned on a machine like this one (tune.py does): the adapter's own tree"
        return make_drafter(loaded, adapter_plan(loaded, None)), line
    if choice.plan is None:
        return load_method("autoregressive", model), f"no tree of {name} pays on this machine: autoregressive decoding"
    return make_drafter(loaded, adapter_plan(loaded, choice.plan)), f"tuned for this machine: {choice.name}"


def _circumstances(choice: Choice) -> tuple:
    return choice.machine, choice.batch_size, choice.cache_length, choice.temperature


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
