"""The one exception users see: a sentence that says what was wrong and what to do about it."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(Exception):
    """Bad input. Entry points print the message, nearly always one line, on stderr and exit with code 2."""


def check_at_least(settings: object, least: Mapping[str, float], method: str = "") -> None:
    """Raise UserError for a setting that is too small, or has no values.

    Args:
      settings: whatever has them as attributes.
      least: by name, `part.name` for one of a part; of a tuple every element must be so large, and there must be one.
      method: whose settings they are, for the message; empty for options of a command.
    """
    for name, value in least.items():
        given = operator.attrgetter(name)(settings)
        shown = f"{method}: {name}" if method else name.replace("_", "-")
        if given == ():
            raise UserError(f"give at least one value for {shown}")
        smallest = min(given) if isinstance(given, tuple) else given
        if not smallest >= value:  # nor is NaN
            raise UserError(f"{shown} must be at least {value}, got {smallest}")


def suggest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the first known word that begins with the word, else the closest one, or nothing."""
    words = list(known)
    begun = [each for each in words if word.strip("-") and each.startswith(word)]
    matches = begun or difflib.get_close_matches(word[:100], words, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def first_line(error: Exception) -> str:
    """The first line of what an error of another library says, which may fill pages, or its type."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In words, one for every name whose values differ."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name.replace('_', '-')} {old.get(name)!r}, not {new.get(name)!r}" for name in names]
