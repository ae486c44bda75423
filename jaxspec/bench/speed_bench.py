"""SPEED-Bench's splits (nvidia/SPEED-Bench), as published or as its scripts prepare them.

As published, texts that belong to other data sets are placeholders: a turn begins with a marker, and a script of the
benchmark fills it in. Prepared files have `turns` too, or in their place `messages` of the user.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError

COLUMNS = ("question_id", "category", "src_id", "turns")
PREFIX = "speed/"  # of its categories in results
_MARKER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_SHOWN = 8  # ids in a message

Rows = list[tuple[int, dict[str, Any]]]


def prepared(path: Path, rows: Iterable[tuple[int, dict[str, Any]]], skip_placeholders: bool) -> Rows:
    """Numbers and rows of a question file, SPEED-Bench's with their texts in `turns`; other rows as they are.

    Args:
      path: the file, for messages.
      rows: numbers and rows.
      skip_placeholders: leave out questions whose texts are still to be filled in, where others have theirs.

    Raises:
      UserError: placeholders, or messages that are not the user's; names the questions.
    """
    filled, waiting = [], []
    for number, row in rows:
        row = _with_turns(row, f"{path}:{number}")
        if _is_placeholder(row):
            waiting.append(row["question_id"])
        else:
            filled.append((number, row))
    if waiting and not (filled and skip_placeholders):
        raise _unfilled(path, waiting, len(filled) + len(waiting))
    return filled


def _unfilled(path: Path, waiting: list[Any], count: int) -> UserError:
    """The error that names the questions that are waiting for their texts, of `count` in the file."""
    named = ", ".join(map(str, waiting[:_SHOWN])) + (f" and {len(waiting) - _SHOWN} more" * (len(waiting) > _SHOWN))
    skip = ", or leave them out with --skip-placeholders" if len(waiting) < count else ""
    return UserError(
        f"{path}: {len(waiting)} of {count} questions are placeholders, whose texts SPEED-Bench's own script fetches: "
        f"{named}; give the file that it writes{skip}"
    )


def _with_turns(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row whose `messages` became `turns`. Raises UserError for one that is not the user's."""
    messages = row.get("messages")
    if "turns" in row or not {*COLUMNS[:-1], "messages"} <= set(row) or not isinstance(messages, list):
        return row
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            raise UserError(f"{where}: expected messages of the user alone, found {str(message)[:80]}")
    kept = {name: value for name, value in row.items() if name != "messages"}
    return kept | {"turns": [message.get("content") for message in messages]}


def _is_placeholder(row: dict[str, Any]) -> bool:
    """Whether a row of SPEED-Bench has no texts, or the marker in one."""
    turns = row.get("turns")
    if not set(COLUMNS) <= set(row) or not isinstance(turns, list | None):
        return False
    texts = [turn for turn in turns or [] if turn is not None]
    return all(isinstance(t, str) for t in texts) and (
        not any(t.strip() for t in texts) or any(t.startswith(_MARKER) for t in texts)
    )
