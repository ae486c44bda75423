"""Compare methods on the same questions, report the results, measure step times and devices, or count kernels."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jaxspec.bench.config import BenchConfig, check_bench
from jaxspec.bench.device import DeviceConfig, measure_device, read_device
from jaxspec.bench.device_report import write_device_report
from jaxspec.bench.kernel_table import KernelsConfig, compile_steps, kernel_table
from jaxspec.bench.report import overall_table, write_bench_report
from jaxspec.bench.results import load_results
from jaxspec.bench.run import run_bench
from jaxspec.cli.options import load_base, parse
from jaxspec.cli.program import enable_compilation_cache
from jaxspec.files import writable
from jaxspec.parallel.sharding import in_mesh, mesh_of
from jaxspec.tuning.steps import LATENCY, LatencyConfig, latency_table, measure_steps, read_latency, write_latency

_AROUND = 10.0  # seconds to start Python and to write a report, which count towards a time limit


@dataclasses.dataclass(frozen=True)
class Compare(BenchConfig):
    """Answer the same questions with several methods in turn. The same command resumes an interrupted run.

    Attributes:
      output: folder for the answers, summary.json, report.md and plots.
      run_code: score HumanEval by running the programs in the answers, within limits of time and memory. Code written
        by a model runs with your rights: use a container where that matters.
      perplexity: also measure the perplexity of the answers under the base, for acceptance rules and bases that change
        the text.
      json: print summary.json instead of the table.
    """

    output: str = "runs/bench"
    run_code: bool = False
    perplexity: bool = False
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """Write the tables and plots of a folder again, from its measurements.

    Attributes:
      folder: of `jaxspec bench compare` or `jaxspec bench latency`.
      json: print summary.json, or latency.json, instead of the table.
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Latency(LatencyConfig):
    """Measure the time of a step by its number of rows, and the time to read the memory alone.

    Attributes:
      output: folder for latency.json, latency.md and latency.png. The same command resumes an interrupted run.
    """

    output: str = "runs/latency"


@dataclasses.dataclass(frozen=True)
class Device(DeviceConfig):
    """Measure an accelerator: decoding, steps of larger models, training. The same command resumes an interrupted run.

    Attributes:
      output: folder for device.json, device.md and device.png.
      report: make the page from earlier measurements, without a device.
    """

    output: str = "runs/device"
    report: bool = False


@dataclasses.dataclass(frozen=True)
class Kernels(KernelsConfig):
    """Compile decoding steps for a GPU, which need not be here, and count the kernels that they launch.

    Attributes:
      json: print the figures as JSON instead of a table.
    """

    json: bool = False


def main(args: list[str]) -> None:
    """Parse, and run the subcommand."""
    options = parse(Compare | Report | Latency | Device | Kernels, args)
    commands = {Compare: compare, Report: report, Latency: latency, Device: device, Kernels: kernels}
    commands[type(options)](options)


def compare(options: Compare) -> None:
    """Ask the questions, and report."""
    check_bench(options)
    enable_compilation_cache()
    model = load_base(options.model, options.dtype, options.mesh, options.template, options.weights)
    output = Path(options.output)
    try:
        with in_mesh(mesh_of(model.params)):
            run_bench(options, model, output, _say, options.run_code, options.perplexity)
    except (KeyboardInterrupt, OSError, jax.errors.JaxRuntimeError):
        if (output / "bench.json").exists():
            _say(
                f"the answers so far are in {output}: the same command resumes, "
                f"and `jaxspec bench report {output}` shows them"
            )
        raise
    show(output, options.json)


def report(options: Report) -> None:
    """Report on a folder."""
    folder = Path(options.folder)
    if not (folder / LATENCY).exists():
        show(folder, options.json)
        return
    results = read_latency(folder)
    write_latency(results, writable(folder))
    print(json.dumps(results, indent=1) if options.json else "\n".join(latency_table(results)))


def show(folder: Path, as_json: bool) -> None:
    """Write the report of a benchmark and print its main table."""
    results = load_results(folder)
    page = write_bench_report(results, writable(folder))
    print((folder / "summary.json").read_text() if as_json else "\n".join(overall_table(results)))
    _say(f"written to {page}")


def latency(options: Latency) -> None:
    """Measure steps."""
    enable_compilation_cache()
    print("\n".join(latency_table(measure_steps(options, Path(options.output)))))
    _say(f"written to {options.output}")


def device(options: Device) -> None:
    """Measure a device, or report on one."""
    began, folder = time.monotonic(), Path(options.output)
    if not options.report:
        enable_compilation_cache()
        measure_device(options, folder, began - _AROUND, _say)
    page = write_device_report(read_device(folder), folder)
    print(page.read_text())
    _say(f"written to {page}")


def kernels(options: Kernels) -> None:
    """Compile steps, and print a table."""
    steps = compile_steps(options, _say)
    print(json.dumps(steps, indent=1) if options.json else "\n".join(kernel_table(steps)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
