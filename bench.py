"""How much faster, and is it the same? python bench.py --methods ppd,bita --data FILE; or report|results|latency."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro

from experiments.results import write_results
from jaxspec import load_model
from jaxspec.bench.config import BenchConfig, check_bench
from jaxspec.bench.report import load_results, overall_table, write_bench_report
from jaxspec.bench.run import run_bench
from jaxspec.cli.options import enable_compilation_cache, parse, run_main
from jaxspec.files import writable
from jaxspec.parallel.sharding import in_mesh, mesh_of
from jaxspec.tuning.steps import (
    LATENCY,
    LatencyConfig,
    latency_table,
    measure_steps,
    read_latency,
    write_latency,
)


@dataclasses.dataclass(frozen=True)
class Options(BenchConfig):
    """Answer the same questions with several methods in turn; a killed run goes on with the same command.

    `python bench.py report DIR` writes the tables and plots of a folder again; `python bench.py results DIR...` makes
    one page of several, with the papers' claims; `python bench.py latency` measures steps against rows, batch and
    cache length.

    Attributes:
      output: folder for the answers, summary.json, report.md and plots.
      run_code: score HumanEval by running the programs that the answers hold, within limits of time and memory; what
        a model writes is run with your rights: use a container where that matters.
      perplexity: also score how probable the base finds the answers; for rules and bases that change the text.
      json: print summary.json instead of the table.
    """

    output: str = "runs/bench"
    run_code: bool = False
    perplexity: bool = False
    json: bool = False


@dataclasses.dataclass(frozen=True)
class LatencyOptions(LatencyConfig):
    """Measure a step's time against its rows, with the time that reading the memory alone takes.

    Attributes:
      output: folder for latency.json, latency.md and latency.png.
    """

    output: str = "runs/latency"


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """The tables and plots of a folder once more, from what was measured.

    Attributes:
      folder: of a benchmark, or of latencies.
      json: print summary.json, or latency.json, instead of the table.
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    json: bool = False


@dataclasses.dataclass(frozen=True)
class PageOptions:
    """One page of several benchmarks: their tables, what holds of the papers' claims, and the papers' own figures.

    Attributes:
      folders: of benchmarks, and of latencies; claims are judged by the first. A benchmark that repeats the first one
        is compared with it.
      output: folder for results.md, results.json and plots; an ablations.json that lies there counts as evidence.
    """

    folders: tyro.conf.Positional[tuple[str, ...]]
    output: str = "runs/page"


def bench(args: list[str]) -> None:
    """Ask and report."""
    options = parse(Options, args, prog="bench.py")
    check_bench(options)
    enable_compilation_cache()
    model = load_model(options.model, options.dtype or None, options.mesh, options.template)
    say = functools.partial(print, file=sys.stderr)
    kept = f"answers so far are in {options.output}: the same command goes on, bench.py report shows them"
    try:
        with in_mesh(mesh_of(model.params)):
            run_bench(options, model, Path(options.output), say, options.run_code, options.perplexity)
    except (KeyboardInterrupt, OSError, jax.errors.JaxRuntimeError):
        if (Path(options.output) / "bench.json").exists():
            say(kept)
        raise
    show(Path(options.output), options.json)


def report(args: list[str]) -> None:
    """Report on a folder."""
    options = parse(ReportOptions, args, prog="bench.py report")
    folder = Path(options.folder)
    if (folder / LATENCY).exists():
        found = read_latency(folder)
        write_latency(found, writable(folder))
        print(json.dumps(found, indent=1) if options.json else "\n".join(latency_table(found)))
    else:
        show(folder, options.json)


def show(folder: Path, as_json: bool) -> None:
    """Write the report of a folder and print its main table."""
    results = load_results(folder)
    page = write_bench_report(results, writable(folder))
    print((folder / "summary.json").read_text() if as_json else "\n".join(overall_table(results)))
    print(f"written to {page}", file=sys.stderr)


def results(args: list[str]) -> None:
    """Write the page."""
    options = parse(PageOptions, args, prog="bench.py results")
    print(write_results([Path(folder) for folder in options.folders], Path(options.output)))


def latency(args: list[str]) -> None:
    """Measure steps."""
    options = parse(LatencyOptions, args, prog="bench.py latency")
    enable_compilation_cache()
    print("\n".join(latency_table(measure_steps(options, Path(options.output)))))
    print(f"written to {options.output}", file=sys.stderr)


def main(args: list[str]) -> None:
    """Bench, unless the first word says otherwise."""
    commands = {"report": report, "results": results, "latency": latency}
    if args and args[0] in commands:
        commands[args[0]](args[1:])
    else:
        bench(args)


if __name__ == "__main__":
    run_main(main)
