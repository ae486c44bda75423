"""What this machine is: for choices that were made on it, and for whoever reads figures measured on it."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import jax

_HELD, _GRANTED = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # memory mappings
_CPUS = Path("/proc/cpuinfo")
_VECTORS = {"avx512f": "with AVX-512", "avx2": "with AVX2"}  # names of flags, the widest first
_compiled: list[tuple[float, float]] = []  # spans of time in which JAX traced or compiled


def _note_compilation(event: str, seconds: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        end = time.perf_counter()
        while _compiled and _compiled[-1][0] >= end - seconds:  # parts of this one
            _compiled.pop()
        _compiled.append((end - seconds, end))


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


class Stopwatch:
    """Seconds of a block, apart from what JAX compiled in it.

    Attributes:
      seconds: without compilation.
      compile_seconds: tracing and compiling; 0 where every program was known.
    """

    def __enter__(self) -> Stopwatch:
        self._began, self._known = time.perf_counter(), len(_compiled)
        return self

    def __exit__(self, *error: object) -> None:
        self.compile_seconds = sum(end - began for began, end in _compiled[self._known :])
        self.seconds = time.perf_counter() - self._began - self.compile_seconds


def this_machine() -> dict[str, Any]:
    """Platform and kind of device; of a CPU also its name and the number of cores this process may use."""
    device = jax.devices()[0]
    machine = {"platform": device.platform, "device": device.device_kind}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return machine | {"cores": cores, "processor": _processor()} if device.platform == "cpu" else machine


@functools.cache
def _processor() -> str:
    """The processor with its widest vectors, where the system tells: virtual machines of one name differ."""
    if not _CPUS.exists():
        return os.uname().machine
    facts = dict(line.split(":", 1) for line in _CPUS.read_text().splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    vectors = [name for flag, name in _VECTORS.items() if flag in facts.get("flags", "").split()]
    return " ".join([facts.get("model name", os.uname().machine), *vectors[:1]])


def device_name() -> str:
    """The accelerators, or the processor with as many cores as this process may use."""
    machine = this_machine()
    if machine["platform"] == "cpu":
        return f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''} of {machine['processor']}"
    return f"{len(jax.devices())} x {machine['device']}"


def make_room_for_programs(most: int = 100_000) -> None:
    """Forget compiled programs where they hold half of the memory mappings that Linux grants; without, XLA crashes.

    Args:
      most: mappings to hold at most, wherever Linux grants a million; each takes some 40 kB of memory.
    """
    try:
        held, granted = _HELD.read_bytes().count(b"\n"), int(_GRANTED.read_text())
    except OSError:  # not Linux
        return
    if held > min(granted // 2, most):
        jax.clear_caches()
