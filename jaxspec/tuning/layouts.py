"""Measure in which layout the kernels of a base are multiplied fastest on this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.files import writable
from jaxspec.model.blocks import product
from jaxspec.progress import Progress
from jaxspec.weights import layouts
from jaxspec.weights.layouts import in_blocks, kernels_by_shape
from jaxspec.weights.model import Model

ROWS = (1, 4, 8, 16, 32, 48, 64)
ROUNDS = 9
_ENOUGH = 1 << 27  # bytes of kernels that no cache holds: they come from memory, as in a step
_GAIN = 1.05  # less may be noise

Samples = dict[tuple[int, int], list[float]]  # seconds in every round by rows and columns per block


def tune_layouts(model: Model) -> None:
    """Measure the layouts of a base's kernels where it is on one CPU, and have it use and remember the fastest.

    Raises UserError where the user's cache cannot be written.
    """
    shapes, found = kernels_by_shape(model.params), {}
    if not model.on_one_cpu or not shapes:  # quantized kernels have one layout
        return
    writable(layouts.FILE.parent)
    with Progress("layouts", len(shapes), "shapes") as progress:
        for number, (shape, kernels) in enumerate(shapes.items(), 1):
            found[shape] = fastest(measure_products(list(kernels.values()), model.base.dtype), shape)
            progress.update(number)
    layouts.write_layouts(model.precision, found)
    model.layouts.update(found)


def measure_products(kernels: Sequence[jax.Array], dtype: jnp.dtype) -> Samples:
    """Seconds of multiplying rows with each of some kernels, in every layout.

    The layouts follow upon each other, so that a slow moment of the machine hurts all alike.

    Args:
      kernels: plain ones of one shape [in, out]; as many of them as are enough count.
      dtype: of the rows.
    """
    trees = [{"kernel": kernel} for kernel in kernels[: max(_ENOUGH // kernels[0].nbytes, 1)]]
    size, width = kernels[0].shape
    widths = (0, layouts.BLOCK // 2, layouts.BLOCK, layouts.BLOCK * 3 // 2)
    blocks = [n for n in widths if n == 0 or width % n == 0]
    held = {n: jax.tree.leaves(in_blocks(trees, lambda _, n=n: n)) for n in blocks}
    multiply, samples, random = jax.jit(product), {(r, n): [] for r in ROWS for n in blocks}, np.random.default_rng(0)
    for turn in range(ROUNDS + 1):
        for rows in ROWS:
            x = jnp.ones((rows, size), dtype)
            for n in random.permutation(blocks).tolist():
                began = time.perf_counter()
                jax.block_until_ready([multiply(x, kernel) for kernel in held[n]])
                if turn:  # the first one compiles
                    samples[rows, n].append(time.perf_counter() - began)
    return samples


def fastest(samples: Samples, shape: tuple[int, int]) -> dict[int, int]:
    """The quickest layout by rows: the default, unless another one beats it in every round but one."""
    chosen = {}
    for rows in ROWS:
        usual = layouts.default_block(rows, shape)
        times = {n: np.array(seconds) for (r, n), seconds in samples.items() if r == rows}
        sure = [n for n in times if np.sum(times[n] * _GAIN > times[usual]) <= 1]
        chosen[rows] = min(sure, key=lambda n: np.median(times[n]), default=usual)
    return chosen
