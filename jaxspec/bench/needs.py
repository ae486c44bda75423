"""Memory and operations that a compiled step needs on each device, as the compiler reports them.

The step is compiled for the mesh it is meant for, so that a configuration that cannot work fails here. For the CPU's
virtual devices its temporaries are an upper bound: that compiler does not order work so as to save memory. For a TPU
they are what the chip will use.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.stages import Lowered

from jaxspec.errors import first_line
from jaxspec.parallel.chips import Chip


def measure_needs(
    lowered: Lowered, chip: Chip | None, passes: int = 1, weights: int = 0, trained: int = 0
) -> dict[str, Any]:
    """Compile a step, and ask the compiler. A TPU's compiler refuses a step that does not fit, and says how much fits.

    Args:
      lowered: a step whose first argument is the base.
      chip: whose limits to compare with.
      passes: how often an update reads the weights.
      weights: bytes of the base's weights.
      trained: bytes of the trainable pytree.

    Returns:
      arguments: bytes of the arguments: weights, state, batch.
      unread: bytes of the base's weights where a step does not read them, because it trains others in their place; they
        stay on the device.
      temporaries: bytes of intermediate arrays, and of results that do not take the place of an argument.
      repeated: bytes of the arguments that every pass reads: the weights.
      passes: forward and backward passes of one update; the next two figures are those of one pass.
      flops: operations.
      bytes: bytes read and written, as the compiler counts them: a copy to faster memory counts every time.
      fits: with a chip, whether its memory holds everything; if not, `reason` may be the only other entry.
      memory_seconds: with a chip, the least time that reading all arguments takes, weights in every pass.
      compute_seconds: with a chip, the least time that the arithmetic takes.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if chip is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fits": False, "reason": first_line(error)}
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    unread = 0 if jax.tree.leaves(compiled.input_shardings[0][0]) else weights  # without a sharding: not an input
    needs = {
        "arguments": memory.argument_size_in_bytes,
        "unread": unread,
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "repeated": weights - unread + trained,
        "passes": passes,
        "flops": cost.get("flops", 0.0),
        "bytes": cost.get("bytes accessed", 0.0),
    }
    if chip is None:
        return needs
    return needs | {
        "fits": needs["arguments"] + unread + needs["temporaries"] <= chip.memory,
        "memory_seconds": (needs["arguments"] + (passes - 1) * needs["repeated"]) / chip.bandwidth,
        "compute_seconds": passes * needs["flops"] / chip.flops,
    }


def needs_text(step: dict[str, Any]) -> str:
    """The figures of `measure_needs` as text."""
    if "reason" in step:
        return f"DOES NOT FIT ({step['reason']})"
    parts = [f"per device arguments {readable(step['arguments'])}"]
    parts += [f"unread weights {readable(step['unread'])}"] if step["unread"] else []
    parts += [f"temporaries {readable(step['temporaries'])}"]
    passes = f"{step['passes']} passes of " if step["passes"] > 1 else ""
    parts += [f"{passes}{readable(step['flops'], 'FLOP')} and {readable(step['bytes'])} moved"]
    text = ", ".join(parts)
    if "fits" in step:
        verdict = "fits" if step["fits"] else "DOES NOT FIT"
        memory, arithmetic = (f"{1000 * step[f'{part}_seconds']:.2f} ms" for part in ("memory", "compute"))
        text += f"; {verdict}; at least {memory} for memory, {arithmetic} for arithmetic"
    return text


def readable(count: float, unit: str = "B") -> str:
    """A large number with three digits and a decimal prefix: 6.31 TB, 21.4 GFLOP."""
    power = min(int(math.log10(max(count, 1)) / 3), 6)
    scaled, prefix = count / 1000**power, ("", "k", "M", "G", "T", "P", "E")[power]
    digits = max(0, 2 - int(math.log10(max(scaled, 1))))
    return f"{scaled:.{digits}f} {prefix}{unit}"


def device_bytes(tree: Any) -> int:
    """Bytes that arrays with a sharding take on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
