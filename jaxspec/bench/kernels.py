"""The kernels of a compiled GPU program: how many a step launches, and how many bytes they read and write.

On a GPU a small step waits for the start of kernels rather than for memory. A program tells both before it runs, and
can be compiled where no GPU is (`jaxspec.parallel.chips`).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax

from jaxspec.bench.hlo import Array, Computation, Instruction, Program, parse_program
from jaxspec.decoding.drafter import DRAFTING
from jaxspec.model.quantized import is_quantized

SECONDS = 1.7e-6  # from the start of one small kernel to that of the next, within a CUDA graph on an H100
BANDWIDTH_SHARE = 0.8  # of the published bandwidth that streaming a large array reaches there
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice", "scatter"}
_RENAMES = {"bitcast", "reshape", "get-tuple-element", "copy", "convert"}


@dataclasses.dataclass
class KernelCounts:
    """What the kernels of a computation amount to.

    Attributes:
      layers: kernels of the base's layers in its own pass.
      outside: all others.
      in_branches: those of both that lie in a branch of a conditional or in an inner loop: outside of CUDA graphs.
      read: bytes read, every operand of every kernel once, of what is sliced the slices.
      written: bytes written.
      products: bytes of `written` that are results of matrix products, partial sums included.
      large: arrays written that are as large as a matrix of a layer and not a product's result, by their text.
    """

    layers: int = 0
    outside: int = 0
    in_branches: int = 0
    read: int = 0
    written: int = 0
    products: int = 0
    large: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        """All kernels."""
        return self.layers + self.outside

    def add(self, other: KernelCounts, times: int = 1) -> None:
        """Count what another computation amounts to, so many times, too: one that is not in the outermost loop."""
        for name in ("layers", "outside", "read", "written", "products"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        self.in_branches += times * other.total
        for array, count in other.large.items():
            self.large[array] += times * count

    def least_seconds(self, bandwidth: float) -> float:
        """The least time of a step on a device of a published bandwidth, in bytes per second."""
        return (self.read + self.written) / (BANDWIDTH_SHARE * bandwidth) + self.total * SECONDS


def matrices_of(params: Any) -> set[tuple[int, int]]:
    """The shapes [in, out] of the matrices of a base's layers, on one device."""
    shapes = set()
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_quantized):
        if "layers_" in jax.tree_util.keystr(path) and leaf.ndim >= 2:
            numbers, packed = (leaf.values, leaf.per_byte) if is_quantized(leaf) else (leaf, 1)
            rows, columns = numbers.sharding.shard_shape(numbers.shape)[-2:]
            shapes.add((rows * packed, columns))
    return shapes


def count_kernels(text: str, matrices: Collection[tuple[int, int]] = ()) -> KernelCounts:
    """Count the kernels of one step of a compiled program.

    Of a conditional the branch with most kernels counts; a loop counts as often as it runs, once where that is unknown.

    Args:
      text: what `compiled.as_text()` returns. Where most of the program is one loop, its body counts.
      matrices: shapes [in, out] of the layers' matrices.
    """
    program = parse_program(text)
    step, whole = (
        _count(program, each, matrices) for each in (program.loop_body(), program.computations[program.entry])
    )
    return step if 2 * step.total >= whole.total else whole


def _count(program: Program, computation: Computation, matrices: Collection[tuple[int, int]]) -> KernelCounts:
    kernels = KernelCounts()
    for each in computation.instructions:
        if each.opcode in _FREE or each.opcode.endswith("-done"):
            continue
        if each.opcode == "while":
            for name in each.computations("body", "condition"):
                kernels.add(_count(program, program.computations[name], matrices), each.trips or 1)
        elif each.opcode == "conditional":
            names = each.computations("branch_computations", "true_computation", "false_computation")
            branches = [_count(program, program.computations[name], matrices) for name in names]
            kernels.add(max(branches, key=lambda branch: branch.total))
        elif each.opcode == "call":
            for name in each.computations("to_apply"):
                kernels.add(_count(program, program.computations[name], matrices))
        else:
            _count_kernel(kernels, program, computation, each, matrices)
    return kernels


def _count_kernel(
    kernels: KernelCounts,
    program: Program,
    computation: Computation,
    kernel: Instruction,
    matrices: Collection[tuple[int, int]],
) -> None:
    """Count one kernel. Its parts tell where it comes from where it does not say so itself."""
    fused = [program.computations[name] for name in kernel.computations("calls")]
    parts = [kernel, *(each for computation in fused for each in reversed(computation.instructions))]
    origin = next((each.origin for each in parts if each.origin), "")
    if re.search(r"\blayers_\d+", origin) and DRAFTING not in origin:
        kernels.layers += 1
    else:
        kernels.outside += 1
    kernels.read += _read(computation, kernel, fused)
    written = _written(computation, kernel, fused)
    kernels.written += sum(array.size for array in written)
    if _is_product(kernel, fused):
        kernels.products += sum(array.size for array in written)
        return
    for array in written:
        if _as_large_as_a_matrix(array.shape, array.elements, matrices):
            dims = ",".join(map(str, array.shape))
            kernels.large[f"{array.dtype}[{dims}]"] += 1


def _is_library(kernel: Instruction) -> bool:
    """Whether a kernel is a library's product."""
    return "cublas" in kernel.attributes


def _is_product(kernel: Instruction, fused: list[Computation]) -> bool:
    """Whether a kernel multiplies matrices on tensor cores or by a library."""
    if kernel.opcode == "custom-call":
        return _is_library(kernel)
    return any(each.opcode == "dot" for computation in fused for each in computation.instructions) or (
        "gemm" in kernel.attributes
    )


def _as_large_as_a_matrix(shape: tuple[int, ...], elements: int, matrices: Collection[tuple[int, int]]) -> bool:
    """Whether an array has the elements of a layer's smallest matrix and one of its dimensions."""
    sides = {side for matrix in matrices for side in matrix}
    smallest = min((rows * columns for rows, columns in matrices), default=0)
    return bool(matrices) and elements >= smallest and bool(sides & set(shape))


def _read(computation: Computation, kernel: Instruction, fused: list[Computation]) -> int:
    """Bytes that a kernel reads."""
    aliased = _aliased(kernel)
    total = 0
    for place, operand in enumerate(kernel.operands):
        size = sum(array.size for array in computation.by_name[operand].arrays)
        if fused:
            size = min(size, _read_of(fused[0], fused[0].parameters[place].name, size))
        total += 0 if place in aliased else size
    return total


def _read_of(fused: Computation, name: str, size: int) -> int:
    """Bytes that a fused computation reads of one value, of `size` bytes in all."""
    total = 0
    for user in fused.users[name]:
        if user.opcode in _SLICES and user.operands[0] == name:
            total += user.arrays[0].size
        elif user.opcode in _UPDATES and user.operands[0] == name:
            continue
        elif user.opcode in _RENAMES and not user.root:
            total += _read_of(fused, user.name, size)
        else:
            return size
    return total


def _written(computation: Computation, kernel: Instruction, fused: list[Computation]) -> list[Array]:
    """Arrays that a kernel writes: of an update in place, what is new; a library's workspace is not counted."""
    if aliased := _aliased(kernel):
        others = [name for place, name in enumerate(kernel.operands) if place not in aliased]
        return [array for name in others for array in computation.by_name[name].arrays]
    if not fused:
        return [array for array in kernel.arrays if not (_is_library(kernel) and array.dtype == "s8")]
    root = fused[0].root
    results = [fused[0].by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return [_update(fused[0], result) or result.arrays[0] for result in results]


def _update(fused: Computation, result: Instruction) -> Array | None:
    """The new part of an array that is updated in place; None where it is made anew."""
    while result.opcode in _RENAMES and result.operands:
        result = fused.by_name[result.operands[0]]
    if result.opcode not in _UPDATES:
        return None
    return fused.by_name[result.operands[1 if result.opcode == "dynamic-update-slice" else -1]].arrays[0]


def _aliased(kernel: Instruction) -> set[int]:
    """Places of the operands that a kernel of ours writes some of its other operands into.

    A library's product that is added to an operand writes all of that.
    """
    if _is_library(kernel):
        return set()
    aliases = kernel.attributes.partition("output_to_operand_aliasing=")[2]
    return {int(place) for place in re.findall(r"\{[\d, ]*\}: \((\d+), \{", aliases)}
