"""Reads and writes of all layers' keys and values as one GPU kernel each; elsewhere every layer has its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model.gpu import block, has_kernels, launch
from jaxspec.parallel.sharding import over_mesh

MOST_ROWS = 128
_ARRAYS = 80  # of a kernel, whose parameters have 4 KB
_WHOLE = ("batch", "heads")


def takes(rows: Sequence[jax.Array], buffers: Sequence[jax.Array] = ()) -> bool:
    """Whether the kernels serve these arrays on GPUs: a step's rows, and arrays of which all layers' are alike."""
    alike = all(len({(x.shape, x.dtype) for x in arrays}) == 1 for arrays in (rows, buffers or rows))
    return alike and rows[0].shape[2] <= MOST_ROWS and has_kernels()


def pick_rows(arrays: Sequence[jax.Array], index: jax.Array) -> list[jax.Array]:
    """Pick rows [B, P] out of arrays [B, K, R, Dh]: [B, K, P, Dh] each."""

    def run(index: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        (B, K, _, Dh), dtype = arrays[0].shape, arrays[0].dtype
        picked = [jax.ShapeDtypeStruct((B, K, index.shape[1], Dh), dtype)] * len(arrays)
        return launch(_pick, (len(arrays), K, B), picked, index, *arrays)

    return _in_parts(run, index, arrays)


def write_rows(buffers: Sequence[jax.Array], new: Sequence[jax.Array], at: jax.Array) -> list[jax.Array]:
    """Write rows [B, K, P, Dh] into buffers [B, K, S, Dh], in place, from slots `at` [B] on."""

    def run(at: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        new, buffers = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
        aliases = {1 + len(new) + i: i for i in range(len(buffers))}
        written = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers]
        grid = (len(buffers), buffers[0].shape[1], buffers[0].shape[0])
        return launch(_write, grid, written, at, *new, *buffers, aliases=aliases)

    return _in_parts(run, at, new, buffers)


def _in_parts(run: Callable, first: jax.Array, *lists: Sequence[jax.Array]) -> list[jax.Array]:
    """A function of an array [B] or [B, P] and of lists of arrays [B, K, ...], in kernels of so many, over the mesh."""
    sizes, count, results = lists[0][0].shape[:2], len(lists[0]), []
    for start in range(0, count, _ARRAYS):
        arrays = [x for each in lists for x in each[start : start + _ARRAYS]]
        outputs = [_WHOLE] * (len(arrays) // len(lists))
        divided = over_mesh(lambda *x: tuple(run(*x)), sizes, [("batch",), *[_WHOLE] * len(arrays)], outputs)
        results += divided(first, *arrays)
    return results


def _pick(index: Any, *refs: Any) -> None:
    """One head of one text in one array."""
    sources, results = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    rows = index.shape[1]

    def picked(b: jax.Array, place: jax.Array, load: Callable) -> jax.Array:
        return load(index.at[b, place], mask=place < rows, other=0)

    _copy(rows, sources, results, source_row=picked)


def _write(at: Any, *refs: Any) -> None:
    """Likewise."""
    third = len(refs) // 3
    new, buffers = refs[:third], refs[2 * third :]
    rows, last = new[0].shape[2], buffers[0].shape[2] - new[0].shape[2]  # clamped as `dynamic_update_slice` clamps

    def slot(b: jax.Array, place: jax.Array, load: Callable) -> jax.Array:
        return jnp.clip(load(at.at[b]), 0, last) + place

    _copy(rows, new, buffers, target_row=slot)


def _copy(
    count: int, sources: Any, targets: Any, source_row: Callable | None = None, target_row: Callable | None = None
) -> None:
    """Copy so many rows of one array, which this instance's number says: each row's place may be another in either."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import load, store

    number, k, b = (pl.program_id(axis) for axis in range(3))
    Dh = sources[0].shape[3]
    place, d = jnp.arange(block(count, 1)), jnp.arange(block(Dh))
    kept = (place < count)[:, None] & (d < Dh)[None]
    read = place if source_row is None else source_row(b, place, load)
    written = place if target_row is None else target_row(b, place, load)

    def copy(source: Any, target: Any) -> None:
        x = load(source.at[b, k, read[:, None], d[None]], mask=kept, other=0)
        store(target.at[b, k, written[:, None], d[None]], x.astype(target.dtype), mask=kept)

    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        pl.when(number == i)(functools.partial(copy, source, target))
