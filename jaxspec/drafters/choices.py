"""Choices of `jaxspec tune` for a machine: kept in files, and applied to a drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.decoding.method import Calibration
from jaxspec.drafters.costs import kind_of
from jaxspec.drafters.defaults import with_default
from jaxspec.drafters.drafter import Drafter, autoregressive, join_notes
from jaxspec.drafters.source import temperature_key
from jaxspec.errors import UserError
from jaxspec.files import read_json, user_cache, write_json
from jaxspec.machine import this_machine
from jaxspec.trees import TreePlan
from jaxspec.trees.arrays import Path as TreePath
from jaxspec.trees.plan import plan_from_json, plan_to_json

_FILE = "tuned.json"


@dataclasses.dataclass(frozen=True)
class TunedChoice:
    """The fastest way to decode under given circumstances.

    Attributes:
      machine: of `this_machine`.
      dtype: of the base's weights.
      adapter: digest of the weights that it was made for; others would have other accuracies.
      batch_size: prompts decoded together.
      cache_length: S, slots of the cache while measuring.
      temperature: of sampling; 0 is greedy.
      tree: fixed trees, or the budget of a union; None where autoregressive decoding is faster than all of them.
      name: the tree in words.
      info: the figures behind it.
      draft_vocabulary: how many tokens to draft; 0 is all.
      sources: those of a union's methods that pay together.
      calibration: [M][2] of each source, at this temperature alone; those left out keep their own.
    """

    machine: dict[str, Any]
    dtype: str
    adapter: str
    batch_size: int
    cache_length: int
    temperature: float
    tree: TreePlan | str | None
    name: str
    info: dict[str, Any]
    draft_vocabulary: int = 0
    sources: Sequence[str] = ()
    calibration: Mapping[str, Calibration] = dataclasses.field(default_factory=dict)


def save_choice(folder: Path, method: str, choice: TunedChoice) -> Path:
    """Write a choice into a folder, in place of an earlier one under the same circumstances."""
    kept = [c for c in _read(folder, method) if _circumstances(c) != _circumstances(choice)]
    rows = [
        dataclasses.asdict(c) | {"tree": plan_to_json(c.tree) if isinstance(c.tree, TreePlan) else c.tree}
        for c in [*kept, choice]
    ]
    write_json(folder / _FILE, {"method": method, "choices": rows})
    return folder / _FILE


def choice_name(drafter: Drafter) -> str:
    """The names of its methods, in whatever order they were given."""
    return "+".join(sorted(source.method.name for source in drafter.sources))


def find_choice(folder: Path, drafter: Drafter, batch_size: int = 1, temperature: float = 0.0) -> TunedChoice | None:
    """The choice for this machine, drafter and dtype whose circumstances are nearest to those asked for.

    Args:
      folder: where choices are kept; it need not exist.
      drafter: whatever its shape.
      batch_size: a choice made for less than half or more than twice as many prompts does not count.
      temperature: of sampling; choices for greedy decoding do not count for sampling, nor the other way round.

    Returns:
      The nearest choice, the newest of several, or None.

    Raises:
      UserError: a damaged file.
    """
    asked = (this_machine(), drafter.model.precision, drafter.digest)
    near = [
        choice
        for choice in reversed(_read(folder, choice_name(drafter)))
        if (choice.machine, choice.dtype, choice.adapter) == asked
        and batch_size / 2 <= choice.batch_size <= batch_size * 2
        and kind_of(choice.temperature) == kind_of(temperature)
    ]
    return min(near, key=lambda c: (abs(c.temperature - temperature), abs(c.batch_size - batch_size)), default=None)


def _circumstances(choice: TunedChoice) -> tuple:
    return choice.machine, choice.dtype, choice.adapter, choice.batch_size, choice.cache_length, choice.temperature


def _read(folder: Path, method: str) -> list[TunedChoice]:
    file = folder / _FILE
    if not file.exists():
        return []
    content = read_json(file)
    if content.get("method") != method:
        raise UserError(f"{file}: these trees belong to method {content.get('method')!r}, not {method!r}")
    try:
        return [TunedChoice(**row | {"tree": _tree(row["tree"], str(file))}) for row in content["choices"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: not written by `jaxspec tune` ({error})") from None


def _tree(value: Any, file: str) -> TreePlan | str | None:
    return value if value is None or isinstance(value, str) else plan_from_json(value, file)


@dataclasses.dataclass(frozen=True)
class Use:
    """What a drafter is to decode, which says what choice of `jaxspec tune` holds for it.

    Attributes:
      batch_size: texts decoded together, which the default sizes are for.
      temperature: of sampling, 0 is greedy; None where texts may have any: a choice must then have been made both for
        greedy decoding and for sampling.
      slots: of a server, which decodes up to so many texts together: a choice must have been made for so many.
    """

    batch_size: int = 1
    temperature: float | None = None
    slots: int | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures that need a choice."""
        return (0.0, 1.0) if self.temperature is None else (self.temperature,)


def choose_tree(drafter: Drafter, use: Use = Use()) -> Drafter:
    """The drafter with what `jaxspec tune` chose for this machine, else with rows chosen in every step.

    Args:
      drafter: of any methods, whatever its shape.
      use: what it is to decode.

    Raises:
      UserError: a damaged file of choices.
    """
    if not drafter.drafts:
        return dataclasses.replace(drafter, note=f"{drafter.name} drafts nothing: there is no tree to choose")
    folder, texts = choice_folder(drafter), use.slots or use.batch_size
    choices = [find_choice(folder, drafter, texts, temperature) for temperature in use.temperatures]
    if all(choices) and all(_same_way(choices[0], other) for other in choices[1:]):
        return as_chosen(drafter, *choices)
    return with_default(drafter, use.batch_size)


def _same_way(one: TunedChoice, other: TunedChoice) -> bool:
    """Whether two choices draft alike, whatever their calibrations."""
    return all(getattr(one, name) == getattr(other, name) for name in ("tree", "draft_vocabulary", "sources"))


def shaped(
    drafter: Drafter,
    tree: str | TreePlan | Sequence[TreePath] | None,
    draft_vocabulary: int | None = None,
    use: Use = Use(),
) -> Drafter:
    """The drafter with the tree and draft vocabulary that are asked for; the arguments are those of `load_drafter`.

    Raises:
      UserError: a tree or a draft vocabulary that does not fit, or, where `auto` is asked for by name, a damaged file.
    """
    if tree not in (None, "auto", "own"):
        return drafter.with_tree(tree, draft_vocabulary, drafter.note)
    drafter = drafter.with_tree(None, draft_vocabulary, drafter.note)
    if tree == "own" or (tree is None and not drafter.drafts):
        return drafter
    if draft_vocabulary is not None:  # a choice has its own
        return with_default(drafter, use.batch_size)
    try:
        return choose_tree(drafter, use)
    except UserError as error:
        if tree == "auto":
            raise
        warned = dataclasses.replace(drafter, note=join_notes(drafter.note, f"warning: {error}"))
        return with_default(warned, use.batch_size)


def as_chosen(drafter: Drafter, choice: TunedChoice, *others: TunedChoice) -> Drafter:
    """The drafter with the tree of a choice and the sources it is of, or autoregressive decoding.

    Of others that draft alike at another temperature it takes the calibrations, too.
    """
    if choice.tree is None:
        note = f"no tree of {drafter.name} pays on this machine: autoregressive decoding"
        return autoregressive(drafter.model).with_tree(None, note=note)
    temperatures = " and ".join(f"{each.temperature:g}" for each in (choice, *others))
    line = f"tuned for this machine: {choice.name} (batch {choice.batch_size}, temperature {temperatures})"
    chosen = _chosen_sources(drafter, (choice, *others))
    trained = any(source.trained for source in chosen.sources)
    return chosen.with_tree(choice.tree, choice.draft_vocabulary if trained else None, join_notes(drafter.note, line))


def _chosen_sources(drafter: Drafter, choices: Sequence[TunedChoice]) -> Drafter:
    """The drafter with the sources of choices that draft alike, calibrated as these say."""
    sources, chosen = [], choices[0].sources
    for source in drafter.sources:
        name = source.method.name
        made = [choice for choice in choices if name in choice.calibration]
        if made:
            tables = {temperature_key(choice.temperature): choice.calibration[name] for choice in made}
            source = dataclasses.replace(source, calibration=tables)
            source.calibrations()  # refuses a damaged one
        if name in (chosen or [name]):
            sources.append(source)
    if not sources:
        raise UserError(f"the choice for {drafter.name} names other methods: {', '.join(chosen)}")
    return dataclasses.replace(drafter, sources=tuple(sources))


def choice_folder(drafter: Drafter) -> Path:
    """The folder of the choices of `jaxspec tune`: that of the one adapter, else one in the user's cache."""
    if len(drafter.sources) == 1 and drafter.source.trained and drafter.source.adapter.folder is not None:
        return drafter.source.adapter.folder
    return user_cache("unions", choice_name(drafter))
