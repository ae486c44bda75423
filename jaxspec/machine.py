"""What this machine is: for choices that hold on it alone, and for whoever reads figures measured on it."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import jax

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def this_machine() -> dict[str, Any]:
    """Platform, kind of device, and where the device is a CPU the number of cores this process may use."""
    device = jax.devices()[0]
    machine = {"platform": device.platform, "device": device.device_kind}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return machine | {"cores": cores} if device.platform == "cpu" else machine


def processor() -> str:
    """The name of the processor, where the system tells."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def device_name() -> str:
    """The accelerators, or the processor with as many cores as this process may use."""
    machine = this_machine()
    if machine["platform"] == "cpu":
        return f"{machine['cores']} cores of {processor()}"
    return f"{len(jax.devices())} x {machine['device']}"


def keep_freed_memory() -> None:
    """Have malloc reuse large blocks instead of handing them back to the kernel; call it before JAX starts threads.

    On a CPU, XLA allocates a program's temporaries anew at every call. In fresh mappings every page is a fault. For
    glibc; other C libraries stay as they are, and so does a glibc whose settings the environment gives.
    """
    given = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not given:
        libc = ctypes.CDLL(None)
        # one arena: those that later threads are given hand large blocks back whatever the other two say
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)
