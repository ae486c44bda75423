"""The layout in which a kernel is multiplied fastest on this machine's CPU (see `jaxspec.model.blocks`).

`jaxspec tune` measures it by shapes of kernels and numbers of rows, and remembers it in the user's cache. The default
was measured on two cores of an AMD EPYC (JAX 0.12).
"""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.errors import UserError
from jaxspec.files import locked, read_json, user_cache, writable, write_json
from jaxspec.machine import this_machine

FILE = user_cache("layouts.json")
BLOCK = 64  # columns
FEW_ROWS = 48  # of a pass; with more, plain kernels are faster
_FEW_OF_MANY = 16  # the same for a kernel of many blocks
_MANY_BLOCKS = 512  # as vocabularies have

Layouts = dict[tuple[int, int], dict[int, int]]  # by a kernel's [in, out] and rows, columns per block; 0 is plain


def block_for(layouts: Layouts, rows: int, shape: tuple[int, int]) -> int:
    """Columns per block of a kernel: as measured with the fewest rows that are enough, else the default."""
    enough = [measured for measured in layouts.get(shape, {}) if measured >= rows]
    return layouts[shape][min(enough)] if enough else default_block(rows, shape)


def default_block(rows: int, shape: tuple[int, int]) -> int:
    """Columns per block of a kernel that was not measured with so many rows."""
    blocks, rest = divmod(shape[1], BLOCK)
    most = FEW_ROWS if blocks < _MANY_BLOCKS else _FEW_OF_MANY
    return 0 if rest or rows > most else BLOCK


def read_layouts(precision: str) -> Layouts:
    """What was measured on a machine like this one, with this JAX, for bases of this precision.

    Nothing where the file is damaged: decoding continues with the default, and `jaxspec tune` writes the file anew.
    """
    try:
        return dict(_parsed(*row) for row in _content().get(_circumstances(precision), {}).items())
    except (AttributeError, TypeError, ValueError):
        return {}


def write_layouts(precision: str, measured: Layouts) -> None:
    """Remember layouts beside those of other shapes. Raises UserError where they cannot be written."""
    writable(FILE.parent)
    with locked(FILE.with_suffix(".lock")):
        rows = {f"{shape[0]}x{shape[1]}": blocks for shape, blocks in (read_layouts(precision) | measured).items()}
        write_json(FILE, _content() | {_circumstances(precision): rows})


def _content() -> dict[str, Any]:
    try:
        return read_json(FILE)
    except UserError:  # none, or damaged
        return {}


def _circumstances(precision: str) -> str:
    here = this_machine() | {"jax": jax.__version__, "precision": precision}
    return ", ".join(f"{name} {value}" for name, value in here.items())


def _parsed(shape: str, blocks: dict[str, int]) -> tuple[tuple[int, int], dict[int, int]]:
    """An entry of the file. Raises ValueError where a block does not divide the columns."""
    size, width = map(int, shape.split("x"))
    if any(n < 0 or (n and width % n) for n in blocks.values()):
        raise ValueError(f"{shape}: {blocks}")
    return (size, width), {int(rows): n for rows, n in blocks.items()}
