"""What a step costs by its number of rows, on a CPU and on a GPU: measured elsewhere, read here."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.files import read_json, read_text
from jaxspec.tuning.latency import RowLatency, fit_latency

_DOCS = Path(__file__).parents[2] / "docs"
_GPU = _DOCS / "h100.json"
_GPU_STEP = re.compile(r"step/7b/batch 1/(\d+) rows")
_KERNELS = _DOCS / "h100-kernels.json"  # of `jaxspec bench kernels --json`
_KERNEL_SECONDS = 1.7e-6  # from kernel to kernel inside one CUDA graph
_CPU = _DOCS / "results" / "latency" / "latency.json"
_CPU_CURVE = {"model": "smollm2-135m", "batch_size": 1, "cache_length": 512}


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a step on a device.

    Attributes:
      name: of the device and the base whose steps were timed.
      latency: of verifying so many rows.
      drafting: what a method adds to that, by its name; of one that is not here nothing is known.
    """

    name: str
    latency: RowLatency
    drafting: Mapping[str, float]

    def seconds(self, method: str, rows: int) -> float:
        """Of a step that verifies so many rows and drafts with a method."""
        return self.latency(rows) + self.drafting[method]

    def autoregressive(self) -> float:
        """Seconds of a step of autoregressive decoding."""
        return self.latency(1)


@functools.cache
def gpu_costs() -> Costs:
    """An H100 with the shapes of a 7B base.

    A step of few rows may be padded: where more rows take less time, these count. Drafting is computed: the kernels
    that the compiled step of a method has beyond one that drafts nothing, each of 1.7 microseconds.
    """
    by_match = {_GPU_STEP.fullmatch(name): figures for name, figures in read_json(_GPU)["figures"].items()}
    timed = {int(match[1]): figures["milliseconds"] / 1000 for match, figures in by_match.items() if match}
    rows = sorted(timed)
    padded = np.minimum.accumulate([timed[count] for count in reversed(rows)])[::-1]
    latency = RowLatency(tuple(rows), tuple(padded.tolist()))
    return Costs("H100, 7B", latency, {name: _KERNEL_SECONDS * count for name, count in further_kernels().items()})


@functools.cache
def compiled_steps() -> dict[str, dict[str, Any]]:
    """Steps of a 7B base compiled for an H100, by what they draft with."""
    return {step["drafter"]: step for step in json.loads(read_text(_KERNELS))}


def further_kernels() -> dict[str, int]:
    """Kernels of a step by method, beyond those of a step that drafts nothing."""
    steps = compiled_steps()
    [bare] = [step for name, step in steps.items() if name == "64 rows"]
    drafting = {name.split()[0]: step for name, step in steps.items() if not name.split()[0].isdigit()}
    return {name: max(_kernels(step) - _kernels(bare), 0) for name, step in drafting.items()}


def _kernels(step: Mapping[str, Any]) -> int:
    """With XLA's own kernels for products: NVIDIA's library pads rows first, and how often depends on their number."""
    return step["kernels"]["triton"]["total"]


@functools.cache
def cpu_costs() -> Costs:
    """Two cores with the default model; all rows were timed with the vocabulary projection: drafting adds nothing."""
    [curve] = [c for c in read_json(_CPU)["curves"] if {name: c[name] for name in _CPU_CURVE} == _CPU_CURVE]
    latency = fit_latency({int(rows): seconds for rows, seconds in curve["seconds"].items()})
    return Costs("CPU, 135M", latency, dict.fromkeys(further_kernels(), 0.0))
