"""One page of several benchmarks, and of latencies: python -m experiments.results DIR..."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.agreement import agreement, asked_again
from experiments.short_report import short_report
from experiments.stored import store, unpacked
from jaxspec.bench.plot import plot_bench
from jaxspec.bench.report import HOW_TO_READ
from jaxspec.bench.results import Results, load_results, summary_of
from jaxspec.bench.run import CACHE, ROUNDS
from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError
from jaxspec.files import writable, write_atomically, write_json
from jaxspec.tuning.steps import LATENCY, latency_table, plot_latency, read_latency


@dataclasses.dataclass(frozen=True)
class Options:
    """One page of several benchmarks: their tables and plots.

    Attributes:
      folders: of benchmarks, and of latencies. A benchmark that repeats the first one is compared with it.
      output: folder for results.md, results.json, plots, and in `results/` what the page is made of.
    """

    folders: tyro.conf.Positional[tuple[str, ...]]
    output: str = "runs/page"


def read_folders(folders: Sequence[Path]) -> tuple[dict[str, Results], dict[str, dict[str, Any]]]:
    """The benchmarks and the latencies by the names of their folders.

    Raises:
      UserError: no benchmark, a folder without one, or two folders of one name.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"benchmarks on one page need folders of different names, got {', '.join(names)}")
    named = dict(zip(names, folders, strict=True))
    latencies = {name: read_latency(folder) for name, folder in named.items() if (folder / LATENCY).exists()}
    benchmarks = {}
    for name, folder in named.items():
        if name not in latencies:
            with unpacked(folder) as whole:
                benchmarks[name] = load_results(whole)
    if not benchmarks:
        raise UserError("give at least one folder of a benchmark")
    return benchmarks, latencies


def write_results(folders: Sequence[Path], output: Path) -> Path:
    """Write results.md, results.json, a plot of every folder and a packed copy of it. Returns the page.

    Args:
      folders: of benchmarks, the main one first, and of latencies.
      output: folder of the page.

    Raises:
      UserError: folders that make no page, or an output that cannot be written.
    """
    benchmarks, latencies = read_folders(folders)
    writable(output)
    main_one = next(iter(benchmarks.values()))
    codes = {name: results.setting["code"] for name, results in benchmarks.items()}
    codes |= {name: found["code"] for name, found in latencies.items()}
    lines = ["# Results", "", f"Made by `python -m experiments.results` from {', '.join(codes)}.", ""]
    first, *others = codes
    if others := [name for name in others if codes[name] != codes[first]]:
        lines += [
            f"Made with another version of the decoding code than {first}: {', '.join(others)}.",
            "A step may cost more or less there, with a method or without: compare speeds within a section.",
            "",
        ]
    lines += [*_how_to_read(), ""]
    for name, results in benchmarks.items():
        repeats = results is not main_one and asked_again(main_one, results)
        picture = output / f"results-{name}.png"
        lines += [f"## {_title(name)}", ""]
        lines += [*agreement(main_one, results), ""] if repeats else short_report(results)
        lines += [f"![{name}]({picture.name})", ""] if not repeats and plot_bench(results, picture) else []
    for name, found in latencies.items():
        picture = output / f"results-{name}.png"
        plot_latency(found, picture)
        lines += [f"## {_title(name)}: milliseconds of a step by rows", "", *latency_table(found), ""]
        lines += [f"![{name}]({picture.name})", ""]
    summaries = {name: summary_of(results) for name, results in benchmarks.items()} | latencies
    for folder in folders:
        store(folder, output / "results" / folder.resolve().name)
    write_json(output / "results.json", summaries)
    write_atomically(output / "results.md", "\n".join(lines).encode())
    return output / "results.md"


def _how_to_read() -> list[str]:
    """What every section's tables mean."""
    steps = (
        f"Parts of a step are milliseconds of greedy steps, {CACHE} slots of cache, medians of {ROUNDS}: drafting is "
        "the probes' rows, or what follows the pass. In another process, where programs lie elsewhere in memory, any "
        "of them may take a few milliseconds more or less; *step cost* is of the answers themselves."
    )
    more = (
        "results.json has all figures, and `results/` what they were computed from. With its answers unpacked "
        "(`tar -C docs/results/greedy -xf docs/results/greedy/answers.tar.xz`), `jaxspec bench report "
        "docs/results/greedy` makes a report with more tables."
    )
    return [HOW_TO_READ, "", steps, "", more]


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def main(args: list[str]) -> None:
    """Write the page."""
    options = parse(Options, args, prog="python -m experiments.results")
    print(write_results([Path(folder) for folder in options.folders], Path(options.output)))


if __name__ == "__main__":
    run_main(main)
