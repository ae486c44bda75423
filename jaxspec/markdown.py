"""Markdown, as lists of lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table; rows may end early. A bar inside a cell is escaped, or it would begin another."""
    whole = ([*row, *[""] * (len(heads) - len(row))] for row in rows)
    lines = [heads, ["---"] * len(heads), *whole]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def sections(parts: Mapping[str, Sequence[str]], heading: str = "##") -> list[str]:
    """The lines of every part under its title; parts without lines are left out."""
    return [line for title, body in parts.items() if body for line in (f"{heading} {title}", "", *body, "")]
