"""Lines of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def row(cells: Sequence[Any]) -> str:
    """A line of a table; a bar inside a cell is escaped, or it would begin another."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def rule(count: int) -> str:
    """The line between the head of a table of so many columns and its body."""
    return row(["---"] * count)
