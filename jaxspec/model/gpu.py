"""Kernels written for GPUs: where they run, and how a program holds them beside the code of other devices.

They are written in Pallas and compiled by Triton, for NVIDIA GPUs of compute capability 8.0 or more. Everywhere else
runs the plain code that every such kernel stands in for, which is also what is differentiated.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jaxspec.parallel.chips import GPUS

OLDEST = (8, 0)  # compute capability
_INTERPRET = False  # tests set it: kernels run on the CPU, step by step

# Said of every program with such a kernel, to developers of JAX's users rather than to ours.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")


def has_kernels() -> bool:
    """Whether what is traced now may run on a GPU for which there are kernels: the mesh's, or else this process's.

    `JAXSPEC_KERNELS=0` in the environment turns them off.
    """
    if _INTERPRET:
        return True
    if os.environ.get("JAXSPEC_KERNELS") == "0":
        return False
    absent, here = jax.sharding.get_abstract_mesh().abstract_device, jax.devices()[0]
    if absent is None or absent.device_kind == here.device_kind:
        return here.platform == "gpu" and capability_of(here) >= OLDEST
    return absent.device_kind in {gpu.kind for gpu in GPUS.values() if gpu.capability >= OLDEST}


def capability_of(device: jax.Device) -> tuple[int, ...]:
    """The compute capability of an NVIDIA GPU; (0,) of any other device: of AMD's GPUs it is a name."""
    capability = getattr(device, "compute_capability", "")
    return tuple(map(int, capability.split("."))) if re.fullmatch(r"\d+\.\d+", capability) else (0,)


def has_bfloat16() -> bool:
    """Whether this process's devices compute in bfloat16; NVIDIA GPUs before compute capability 8.0 do not."""
    return not (0,) < capability_of(jax.devices()[0]) < OLDEST


def plain_note() -> str:
    """One line for users whose GPU runs plain code in place of the kernels; empty for all others."""
    device = jax.devices()[0]
    return "" if device.platform != "gpu" or has_kernels() else older_note(device.device_kind)


def older_note(kind: str) -> str:
    """The line for a kind of GPU without kernels."""
    oldest = ".".join(map(str, OLDEST))
    return f"{kind}: attention takes several kernels a layer here; one takes a GPU of {oldest} or later"


def either(kernel: Callable, plain: Callable, *operands: Any) -> Any:
    """A kernel on NVIDIA's GPUs, plain code with the same results elsewhere and under differentiation.

    Neither may close over arrays. Call it only where `has_kernels`: other programs need not know of kernels at all.
    """

    @jax.custom_jvp
    def chosen(*operands: Any) -> Any:
        if _INTERPRET:
            return kernel(*operands)
        return lax.platform_dependent(*operands, cuda=kernel, default=plain)

    @chosen.defjvp
    def _(primals: Sequence, tangents: Sequence) -> Any:
        return jax.jvp(plain, primals, tangents)

    return chosen(*operands)


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    aliases: Mapping[int, int] | None = None,
    warps: int = 4,
    stages: int = 2,
) -> list[jax.Array]:
    """Run a kernel on whole arrays.

    Args:
      kernel: takes references to the operands and to the outputs.
      grid: instances, at most three dimensions.
      outputs: shapes and dtypes.
      operands: arrays; a slice of a larger one would be copied.
      aliases: outputs that are operands changed in place, {operand: output}.
      warps: per instance.
      stages: how far loops read ahead.
    """
    from jax.experimental import pallas as pl  # only where there are GPUs: importing it takes a while
    from jax.experimental.pallas import triton

    options = triton.CompilerParams(num_warps=warps, num_stages=stages)
    aliases = dict(aliases or {})
    call = pl.pallas_call(
        kernel,
        out_shape=list(outputs),
        grid=grid,
        input_output_aliases=aliases,
        compiler_params=options,
        interpret=_INTERPRET,
    )
    return call(*operands)


def block(size: int, least: int = 16) -> int:
    """The power of two that holds `size`, as Triton wants them; 16 is the least that tensor cores take."""
    return max(least, 1 << (size - 1).bit_length())
