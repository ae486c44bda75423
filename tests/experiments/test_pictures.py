"""The pictures of the papers' pages show what the methods do now."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from experiments.grids import Grid, svg
from experiments.pictures import pictures

FOLDER = Path("docs/papers")


def test_pictures_are_current_and_small():
    """`python -m experiments.pictures` draws them."""
    drawn = pictures()
    assert drawn == {file.stem: file.read_text() for file in FOLDER.glob("*.svg")}
    assert {file.stem for file in FOLDER.glob("*.md")} == drawn.keys()
    assert all(len(content) < 40_000 for content in drawn.values())


def test_a_cell_is_drawn_where_a_row_sees_a_column():
    rows, columns = [("a & b", "node"), ("c", "probe")], [("all", "text"), ("a & b", "node"), ("c", "probe")]
    grid = Grid("who sees whom", rows, columns, np.array([[1, 1, 0], [1, 0, 1]], bool))
    content = svg([grid, grid])
    ElementTree.fromstring(content)
    cells = re.findall(r'<path class="(\w+)" d="(M[^"]+z)"', content)
    assert [(kind, path.count("M")) for kind, path in cells] == 2 * [("text", 2), ("node", 1), ("probe", 1)]
    left = [int(path[1:].split()[0]) for _, path in cells[:3]]
    assert left[2] - left[1] == left[1] - left[0] > 0
