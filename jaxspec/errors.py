"""The one exception users see: a sentence that says what was wrong and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. Entry points print the message on one line of stderr and exit with code 2."""


def suggest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
