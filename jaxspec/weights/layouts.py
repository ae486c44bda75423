"""Layouts of kernels: which one is multiplied fastest on this machine's CPU, and kernels in it.

`jaxspec.model.blocks` says what the layouts are. In blocks of 64 columns a step of a 135M model takes 36 ms on two
cores instead of 46 with 8 rows, 182 instead of 156 with 64 (JAX 0.12). From how many rows on plain kernels are faster
depends on the kernel, the machine and JAX: `jaxspec tune` measures it and writes it to the user's cache. The default is
what two cores of an AMD EPYC have measured. Accelerators want the plain layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxspec.errors import UserError
from jaxspec.files import locked, read_json, user_cache, writable, write_json
from jaxspec.machine import this_machine

FILE = user_cache("layouts.json")
BLOCK = 64  # columns
FEW_ROWS = 48  # of a pass; with more, plain kernels are faster
_FEW_OF_MANY = 16  # the same for a kernel of many blocks
_MANY_BLOCKS = 512  # as vocabularies have
_ALIGNED = 64  # bytes; arrays that begin elsewhere JAX copies

Kernels = dict[tuple, jax.Array]  # by their places in a tree, all of one shape
Copies = dict[tuple[tuple[int, int], int], Kernels]  # in blocks, by shape and columns per block
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
    """The layouts measured on a machine like this one, with this JAX, for bases of this precision.

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


def kernels_by_shape(params: Any, names: Sequence[str] = ("kernel", "lm_head")) -> dict[tuple[int, int], Kernels]:
    """The plain kernels [in, out] of a pytree: its leaves of two axes with one of these names."""
    found: dict[tuple[int, int], Kernels] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        if jax.tree_util.keystr(path[-1:], simple=True) in names and leaf.ndim == 2:
            found.setdefault(leaf.shape, {})[path] = leaf
    return found


def in_blocks(
    params: Any,
    block: Callable[[tuple[int, int]], int],
    names: Sequence[str] = ("kernel", "lm_head"),
    made: Copies | None = None,
) -> Any:
    """A pytree with its kernels in blocks; all other leaves are those of `params`.

    Args:
      params: what holds kernels.
      block: n, a divisor of the columns, for the shape of a kernel; 0 leaves it plain.
      names: of the leaves that `product` multiplies with.
      made: copies made before, which are taken again; those made now are added.
    """
    made, chosen = {} if made is None else made, {}
    for shape, kernels in kernels_by_shape(params, names).items():
        if n := block(shape):
            if (shape, n) not in made:
                made[shape, n] = _side_by_side({path: _blocks(leaf, n) for path, leaf in kernels.items()})
            chosen |= made[shape, n]
    return jax.tree.map_with_path(lambda path, leaf: chosen.get(path, leaf), params) if chosen else params


def _blocks(kernel: jax.Array, block: int) -> np.ndarray:
    """[in, out] to [out / n, in, n], a view."""
    kernel = np.asarray(kernel)
    return kernel.reshape(len(kernel), -1, block).swapaxes(0, 1)


def _side_by_side(arrays: dict[tuple, np.ndarray]) -> Kernels:
    """A copy of NumPy arrays on a CPU, all in one stretch of memory.

    Linux gives large stretches large pages, with which steps of a 135M model take 4 to 7% less time.
    """
    room = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays.values()]
    memory = np.empty(sum(room) + _ALIGNED, np.uint8)
    starts = itertools.accumulate(room[:-1], initial=-memory.ctypes.data % _ALIGNED)

    def place(array: np.ndarray, start: int) -> jax.Array:
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return jax.device_put(copy, may_alias=True)

    with ThreadPoolExecutor() as pool:
        return dict(zip(arrays, pool.map(place, arrays.values(), starts), strict=True))
