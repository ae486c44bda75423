"""A drafter as a user writes it: `eagle:confidence=0.3+suffix tree=best:5 vocabulary=8192 adapter=PATH`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.method import Method
from jaxspec.errors import UserError, suggest
from jaxspec.files import display_name
from jaxspec.methods import METHODS
from jaxspec.trees import TreePlan
from jaxspec.trees.arrays import Path as TreePath
from jaxspec.weights.model import Model
from jaxspec.weights.shapes import SMOLLM2_135M

_FORM = (
    "METHOD[:SETTING=VALUE,...][+METHOD...] [tree=SPEC] [vocabulary=N] [adapter=DIR] [draft=MODEL] [draft-adapter=DIR]"
)
_EXAMPLE = "eagle:confidence=0.3+suffix tree=best:5 vocabulary=8192"
_KINDS = {int: "a whole number", float: "a number"}


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """One method of a drafter.

    Attributes:
      method: with the settings that were given; the others have their defaults.
      settings: names and values of those that were given. Where an adapter brings the others, they replace its own.
    """

    method: Method
    settings: tuple[tuple[str, int | float], ...] = ()

    @property
    def text(self) -> str:
        """As a user writes it."""
        settings = ",".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.method.name}:{settings}" if settings else self.method.name


@dataclasses.dataclass(frozen=True)
class DrafterSpec:
    """The methods of a drafter, and how to load them. Made by `parse_drafter`.

    The fields behind `methods` take what the arguments of `load_drafter` take; None leaves the choice to the adapter.

    Attributes:
      methods: one, or those of a union.
      tree: the draft tree.
      vocabulary: how many tokens may be drafted; 0 is all.
      adapter: folder of an adapter.
      draft: a draft model.
      draft_adapter: adapter of a draft model.
    """

    methods: tuple[MethodSpec, ...]
    tree: str | TreePlan | Sequence[TreePath] | None = None
    vocabulary: int | None = None
    adapter: str | Path | None = None
    draft: Model | str | Path | None = None
    draft_adapter: str | Path | None = None

    @property
    def text(self) -> str:
        """As a user writes it, with files and folders by their own names: what is kept names no machine's paths."""
        values = {name.replace("_", "-"): getattr(self, name) for name in _SETTINGS}
        words = [f"{name}={_word(value)}" for name, value in values.items() if value is not None]
        return shlex.join(["+".join(each.text for each in self.methods), *words])

    def with_settings(self, **settings: Any) -> DrafterSpec:
        """The same with further settings, by the names of the fields; None for those that were not given.

        Raises UserError for one that is there already, and for a draft vocabulary of a tree that brings its own.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        for name, value in given.items():
            if (held := getattr(self, name)) is not None:
                word = name.replace("_", "-")
                both = f"{_word(held)!r} and as {_word(value)!r}"
                raise UserError(f"drafter {self.text!r}: {word} is given twice, as {both}")
        spec = dataclasses.replace(self, **given)
        if spec.tree == "auto" and spec.vocabulary is not None:
            raise UserError(
                f"drafter {self.text!r}: a tree of auto brings its own vocabulary: leave vocabulary={spec.vocabulary} "
                "(--draft-vocabulary) out"
            )
        return spec

    def accepted_by(self, acceptance: Acceptance) -> DrafterSpec:
        """The same with the method's own tree where none was given and candidates are to be drawn.

        Those of a union, or chosen in every step, are not: the rule would be `Match` without a word.
        """
        needs_tree = acceptance.draws and self.tree is None and len(self.methods) == 1
        return dataclasses.replace(self, tree="own") if needs_tree else self


def _word(value: object) -> str:
    """A setting in a word: values that Python code gives may have no text that a user could write."""
    if isinstance(value, Model):
        return value.name
    if isinstance(value, str | Path):
        return display_name(str(value))
    return str(value) if isinstance(value, int) else "given"


_SETTINGS = tuple(field.name for field in dataclasses.fields(DrafterSpec)[1:])


def parse_drafter(text: str | Sequence[str]) -> DrafterSpec:
    """Read a drafter.

    Args:
      text: `METHOD[:SETTING=VALUE,...][+METHOD...]`, then settings as `NAME=VALUE` in any order, quoted as in a shell;
        or a list of methods.

    Raises:
      UserError: an unknown method or setting, a value that does not fit, a setting that is given twice, or methods that
        cannot be joined. The message quotes the word that is wrong and shows an example.
    """
    if not isinstance(text, str):
        text = "+".join(text)
    try:
        first, *words = shlex.split(text) or [""]
        methods = tuple(_parse_method(word) for word in first.split("+"))
        if len(methods) > 1:
            _check_union([each.method for each in methods])
        settings = _parse_settings(words) if words else {}
    except (UserError, ValueError) as error:  # ValueError: an open quote
        raise UserError(f"drafter {text!r}: {error}; expected {_FORM}, as in {_EXAMPLE!r}") from None
    return DrafterSpec(methods).with_settings(**settings)


def _parse_method(text: str) -> MethodSpec:
    """A method by its name, with the settings behind it. Raises UserError for what it does not have."""
    name, _, given = text.partition(":")
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{suggest(name, METHODS)}; imported methods: {', '.join(METHODS)}")
    cls, settings = METHODS[name], {}
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    if cls.adjustable is not None:
        defaults = {setting: defaults[setting] for setting in cls.adjustable}
        if given and not defaults:
            raise UserError(f"{text}: the settings of {name} are those of its adapter")
    for part in given.split(",") if given else []:
        setting, _, value = part.partition("=")
        if setting not in defaults:
            known = ", ".join(defaults) or "no settings"
            raise UserError(f"{name} has no setting {setting!r}{suggest(setting, defaults)}; it has {known}")
        kind = type(defaults[setting])
        try:
            settings[setting] = kind(value)
        except ValueError:
            raise UserError(f"{name}: {setting} must be {_KINDS[kind]}, got {value!r}") from None
    return MethodSpec(cls(**settings), tuple(settings.items()))


def _check_union(methods: Sequence[Method]) -> None:
    """Raise UserError for methods that cannot be joined."""
    names = [method.name for method in methods]
    for method in methods:
        if names.count(method.name) > 1:
            raise UserError(f"{method.name} is there twice")
        if type(method) is Method:
            raise UserError(f"{method.name} drafts nothing, leave it out")
    # What adds rows does so on every base.
    adding = [method.name for method in methods if method.facts(SMOLLM2_135M).adds_rows]
    if len(adding) > 1:
        raise UserError(f"only one method of a union can have probes or a window, got {' and '.join(adding)}")


def _parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """The settings of a drafter by the names of its fields, from words such as `tree=best:5`."""
    settings = {}
    known = [name.replace("_", "-") for name in _SETTINGS]
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise UserError(f"got {word!r}{suggest(name, known)}")
        if name in settings:
            raise UserError(f"{name} is given twice, the second time as {word!r}")
        if name == "vocabulary" and not value.isdecimal():
            raise UserError(f"vocabulary must be a whole number, got {value!r}")
        settings[name] = int(value) if name == "vocabulary" else value
    return {name.replace("-", "_"): value for name, value in settings.items()}
