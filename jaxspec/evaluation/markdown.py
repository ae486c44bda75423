"""Lines of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def row(cells: Sequence[Any]) -> str:
    """A line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def rule(count: int) -> str:
    """The line between the head of a table of so many columns and its body."""
    return row(["---"] * count)
