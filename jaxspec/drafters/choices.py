"""What `jaxspec tune` chose for this machine: which of a drafter's methods, and the tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxspec.drafters.budget import Budget
from jaxspec.drafters.choice import TunedChoice, choice_name, find_choice
from jaxspec.drafters.drafter import Drafter, autoregressive, join_notes
from jaxspec.errors import UserError
from jaxspec.files import shipped_folder, user_cache
from jaxspec.machine import this_machine


def choose_tree(drafter: Drafter, batch_size: int = 1, temperature: float = 0.0) -> Drafter:
    """The drafter with what `jaxspec tune` chose for this machine, as `load_drafter` has it with `auto`.

    Args:
      drafter: of any methods; where nothing was chosen they keep their own tree.
      batch_size: prompts decoded together.
      temperature: of sampling; 0 is greedy.
    """
    name = drafter.name
    if not drafter.drafts:
        return dataclasses.replace(drafter, note=f"{name} drafts nothing: there is no tree to choose")
    choice = tuned_choice(drafter, batch_size, temperature)
    if choice is None:
        own = drafter.with_tree(None)
        words = own.shape.spec if isinstance(own.shape, Budget) else "its own tree"
        line = f"{name} was never tuned for this machine and batch size (`jaxspec tune` does it): {words}"
        return dataclasses.replace(own, note=join_notes(drafter.note, line))
    return as_chosen(drafter, choice)


def as_chosen(drafter: Drafter, choice: TunedChoice) -> Drafter:
    """The drafter as `tuned_choice` has it: with that tree and the sources it is of, or autoregressive decoding."""
    if choice.tree is None:
        note = f"no tree of {drafter.name} pays on this machine: autoregressive decoding"
        return autoregressive(drafter.model).with_tree(None, note=note)
    where = "this machine" if choice.machine == this_machine() else "another machine (run `jaxspec tune` for this one)"
    line = f"tuned for {where}: {choice.name} (batch {choice.batch_size}, temperature {choice.temperature:g})"
    chosen = _chosen_sources(drafter, choice)
    trained = any(source.trained for source in chosen.sources)
    return chosen.with_tree(choice.tree, choice.draft_vocabulary if trained else None, join_notes(drafter.note, line))


def _chosen_sources(drafter: Drafter, choice: TunedChoice) -> Drafter:
    """Those of a drafter's sources that a choice is of, calibrated as it says."""
    kind = "sampled" if choice.temperature else "greedy"
    sources = []
    for source in drafter.sources:
        name = source.method.name
        if name in choice.calibration:
            source = dataclasses.replace(source, calibration={kind: choice.calibration[name]})
            source.calibrations()  # refuses a damaged one
        if name in (choice.sources or [name]):
            sources.append(source)
    if not sources:
        raise UserError(f"the choice for {drafter.name} names other methods: {', '.join(choice.sources)}")
    return dataclasses.replace(drafter, sources=tuple(sources))


def tuned_choice(drafter: Drafter, batch_size: int, temperature: float) -> TunedChoice | None:
    """What `jaxspec tune` chose for this machine; of methods that are not tuned beside an adapter, else what ships."""
    wanted = (drafter, batch_size, temperature)
    if _keeps_beside_adapter(drafter):
        return find_choice(drafter.source.adapter.folder, *wanted)
    shipped = shipped_folder("adapters") / "unions" / choice_name(drafter)
    return find_choice(choice_folder(drafter), *wanted) or find_choice(shipped, *wanted, anywhere=True)


def choice_folder(drafter: Drafter) -> Path | None:
    """Where `jaxspec tune` keeps its choices: beside the one adapter, else in the user's cache."""
    if _keeps_beside_adapter(drafter):
        return drafter.source.adapter.folder
    return user_cache("unions", choice_name(drafter))


def _keeps_beside_adapter(drafter: Drafter) -> bool:
    return len(drafter.sources) == 1 and drafter.source.trained
