"""Markdown tables, as lists of lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table with a head and as many cells in every row; a bar inside a cell is escaped, or it would begin another."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
