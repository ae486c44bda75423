"""Markdown tables, as lists of lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table with a head and as many cells in every row."""
    return [row(heads), rule(len(heads)), *map(row, rows)]


def row(cells: Sequence[Any]) -> str:
    """A line of a table; a bar inside a cell is escaped, or it would begin another."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def rule(count: int) -> str:
    """The line between the head of a table of so many columns and its body."""
    return row(["---"] * count)
