"""Memory and operations that a compiled step needs on each device, as the compiler reports them.

The step is compiled for the mesh it is meant for, so that a configuration that cannot work fails here. For the CPU's
virtual devices its temporaries are an upper bound: that compiler does not order work so as to save memory. For a TPU
or a GPU they are what the chip will use. A GPU's compiler counts no operations; its programs tell their kernels.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from jaxspec.bench.kernels import count_kernels, matrices_of
from jaxspec.errors import first_line
from jaxspec.model.base import Base
from jaxspec.parallel.chips import GPU_MEMORY, Chip, Gpu

# Who multiplies few rows on a GPU: kernels that XLA writes, or NVIDIA's library. A GPU times both for every product,
# which a compiler without one cannot.
_PRODUCTS = {"triton": True, "library": False}


def measure_needs(lowered: Lowered, base: Base, chip: Chip | None, passes: int = 1, trained: int = 0) -> dict[str, Any]:
    """Compile a step, and ask the compiler. A TPU's compiler refuses a step that does not fit, and says how much fits.

    Args:
      lowered: a step whose first argument is the base, or holds it.
      base: without weights.
      chip: whose limits to compare with.
      passes: how often an update reads the weights.
      trained: bytes of the trainable pytree.

    Returns:
      arguments: bytes of the arguments: weights, state, batch.
      unread: bytes of the base's weights where a step does not read them, because it trains others in their place; they
        stay on the device.
      temporaries: bytes of intermediate arrays, and of results that do not take the place of an argument.
      repeated: bytes of the arguments that every pass reads: the weights.
      passes: forward and backward passes of one update; the next two figures are those of one pass.
      flops: operations; not of a GPU.
      bytes: bytes read and written, as the compiler counts them: a copy to faster memory counts every time; not of a
        GPU.
      fits: with a chip, whether its memory holds everything; if not, `reason` may be the only other entry.
      memory_seconds: with a TPU, the least time that reading all arguments takes, weights in every pass.
      compute_seconds: with a TPU, the least time that the arithmetic takes.
      kernels: with a GPU, what `_kernels` says of the program where `triton` multiplies, and where the `library` does.
    """
    if isinstance(chip, Gpu):
        return _gpu_needs(lowered, base, chip, passes, trained)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if chip is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fits": False, "reason": first_line(error)}
    needs, cost = _memory(compiled, base, passes, trained), compiled.cost_analysis()
    needs |= {"flops": cost.get("flops", 0.0), "bytes": cost.get("bytes accessed", 0.0)}
    if chip is None:
        return needs
    return needs | {
        "fits": _fits(needs, chip),
        "memory_seconds": (needs["arguments"] + (passes - 1) * needs["repeated"]) / chip.bandwidth,
        "compute_seconds": passes * needs["flops"] / chip.flops,
    }


def _memory(compiled: Compiled, base: Base, passes: int, trained: int) -> dict[str, int]:
    """The first entries of `measure_needs`."""
    memory, weights = compiled.memory_analysis(), device_bytes(base.params)
    unread = 0 if jax.tree.leaves(compiled.input_shardings[0][0]) else weights  # without a sharding: not an input
    return {
        "arguments": memory.argument_size_in_bytes,
        "unread": unread,
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "repeated": weights - unread + trained,
        "passes": passes,
    }


def _fits(needs: dict[str, Any], chip: Chip) -> bool:
    memory = chip.memory * (GPU_MEMORY if isinstance(chip, Gpu) else 1)
    return needs["arguments"] + needs["unread"] + needs["temporaries"] <= memory


def _gpu_needs(lowered: Lowered, base: Base, chip: Gpu, passes: int, trained: int) -> dict[str, Any]:
    """`measure_needs` for a GPU. Where one of the two ways to multiply cannot be compiled, its kernels are a reason."""
    needs, kernels, last = {}, {}, None
    for name, triton in _PRODUCTS.items():
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": triton}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            kernels[name], last = {"reason": textwrap.shorten(first_line(error), 120)}, error
            continue
        needs = needs or _memory(compiled, base, passes, trained)
        kernels[name] = _kernels(compiled, base, chip)
    if not needs:
        raise last
    return needs | {"fits": _fits(needs, chip), "kernels": kernels}


def _kernels(compiled: Compiled, base: Base, chip: Gpu) -> dict[str, Any]:
    """What a GPU's program amounts to.

    Returns:
      total: kernels of a step, or of an update.
      per_layer: those of the base's layers, by layer.
      outside: the others.
      in_branches: of all those that lie in conditionals and inner loops, outside of CUDA graphs.
      read: bytes that they read.
      written: bytes that they write.
      products: bytes of these that are results of products, partial sums included.
      large: how many arrays as large as a matrix of a layer are written besides those, by dtype and shape.
      least_seconds: least time, see `KernelCounts.least_seconds`.
    """
    counts = count_kernels(compiled.as_text(), matrices_of(base.params))
    return {
        "total": counts.total,
        "per_layer": counts.layers / base.decoder.config.num_layers,
        **{name: getattr(counts, name) for name in ("outside", "in_branches", "read", "written", "products")},
        "large": dict(counts.large),
        "least_seconds": counts.least_seconds(chip.bandwidth),
    }


def needs_text(step: dict[str, Any]) -> str:
    """The figures of `measure_needs` as text, a line, for a GPU three."""
    if "reason" in step:
        return f"DOES NOT FIT ({step['reason']})"
    parts = [f"per device arguments {readable(step['arguments'])}"]
    parts += [f"unread weights {readable(step['unread'])}"] if step["unread"] else []
    parts += [f"temporaries {readable(step['temporaries'])}"]
    if "flops" in step:
        passes = f"{step['passes']} passes of " if step["passes"] > 1 else ""
        parts += [f"{passes}{readable(step['flops'], 'FLOP')} and {readable(step['bytes'])} moved"]
    text = ", ".join(parts)
    if "fits" in step:
        text += "; fits" if step["fits"] else "; DOES NOT FIT"
    if "memory_seconds" in step:
        memory, arithmetic = (f"{1000 * step[f'{part}_seconds']:.2f} ms" for part in ("memory", "compute"))
        text += f"; at least {memory} for memory, {arithmetic} for arithmetic"
    return "\n".join([text, *(f"  {name:8}  {_kernels_text(each)}" for name, each in step.get("kernels", {}).items())])


def _kernels_text(kernels: dict[str, Any]) -> str:
    """The figures of `_kernels` as a line."""
    if "reason" in kernels:
        return f"not compiled ({kernels['reason']})"
    large = ", ".join(f"{count} x {array}" for array, count in kernels["large"].items())
    parts = [
        f"{kernels['total']} kernels, {kernels['per_layer']:.1f} a layer and {kernels['outside']} outside",
        *([f"{kernels['in_branches']} of them in branches"] if kernels["in_branches"] else []),
        f"{readable(kernels['read'])} read",
        f"{readable(kernels['written'])} written, {readable(kernels['products'])} of it by products",
        *([f"as large as a matrix: {large}"] if large else []),
        f"at least {1000 * kernels['least_seconds']:.2f} ms",
    ]
    return "; ".join(parts)


def readable(count: float, unit: str = "B") -> str:
    """A large number with three digits and a decimal prefix: 6.31 TB, 21.4 GFLOP."""
    power = min(int(math.log10(max(count, 1)) / 3), 6)
    scaled, prefix = count / 1000**power, ("", "k", "M", "G", "T", "P", "E")[power]
    digits = max(0, 2 - int(math.log10(max(scaled, 1))))
    return f"{scaled:.{digits}f} {prefix}{unit}"


def device_bytes(tree: Any) -> int:
    """Bytes that arrays with a sharding take on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
