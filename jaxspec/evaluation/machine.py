"""What figures were measured on."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jaxspec.methods.tuned import this_machine


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
