"""Grids of rows and columns as SVG: who sees whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

import numpy as np

_CELL, _TOP, _CHARACTER = 18, 26, 6.6  # pixels; of a character its mean width at 12 pixels
_COLOURS = {"text": "#9aa5b1", "prefix": "#5aa469", "node": "#3b6ea5", "probe": "#e08e45"}
_STYLE = "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.grid{stroke:#ddd;fill:none}" + "".join(
    f".{kind}{{fill:{colour}}}" for kind, colour in _COLOURS.items()
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table of filled and empty cells.

    Attributes:
      title: stands above it.
      rows: label and kind (`text`, `prefix`, `node` or `probe`) of each.
      columns: likewise; a cell has the colour of its column.
      filled: [rows, columns] bool.
    """

    title: str
    rows: Sequence[tuple[str, str]]
    columns: Sequence[tuple[str, str]]
    filled: np.ndarray


def svg(grids: Sequence[Grid]) -> str:
    """One picture of grids, one below the other."""
    height, parts = 0, []
    width = max(_left(grid) + _CELL * len(grid.columns) for grid in grids) + 90
    for grid in grids:
        parts += [f'<g transform="translate(0 {height})">', *_grid(grid), "</g>"]
        height += _head(grid) + _CELL * len(grid.rows) + _TOP
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
    return "\n".join([begin, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


def _left(grid: Grid) -> int:
    """The room for labels of rows."""
    return round(36 + _CHARACTER * max(len(label) for label, _ in grid.rows))


def _head(grid: Grid) -> int:
    """The room above the cells, for the title and slanted labels of columns."""
    return round(_TOP + 12 + 0.68 * _CHARACTER * max(len(label) for label, _ in grid.columns))


def _grid(grid: Grid) -> list[str]:
    left, top, (rows, columns) = _left(grid), _head(grid), grid.filled.shape
    lines = [f'<text class="title" x="10" y="{_TOP - 6}">{escape(grid.title)}</text>']
    for number, (label, kind) in enumerate(grid.columns):
        x, y = left + _CELL * number + 8, top - 6
        lines.append(f'<text transform="translate({x} {y}) rotate(-45)">{escape(label)}</text>')
        cells = "".join(
            f"M{left + _CELL * number + 1} {top + _CELL * row + 1}h{_CELL - 2}v{_CELL - 2}h{2 - _CELL}z"
            for row in np.flatnonzero(grid.filled[:, number])
        )
        lines += [f'<path class="{kind}" d="{cells}"/>'] if cells else []
    for number, (label, kind) in enumerate(grid.rows):
        y = top + _CELL * number
        lines.append(f'<rect class="{kind}" x="10" y="{y + 4}" width="10" height="10"/>')
        lines.append(f'<text x="26" y="{y + 13}">{escape(label)}</text>')
    across = "".join(f"M{left} {top + _CELL * row}h{_CELL * columns}" for row in range(rows + 1))
    down = "".join(f"M{left + _CELL * column} {top}v{_CELL * rows}" for column in range(columns + 1))
    return [*lines, f'<path class="grid" d="{across}{down}"/>']
