"""What this machine is: for choices that hold on it alone, and for whoever reads figures measured on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


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
