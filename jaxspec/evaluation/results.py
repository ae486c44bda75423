"""One page of results from benchmarks' folders: tables, the papers' claims on this base, the papers' own figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxspec.errors import UserError
from jaxspec.evaluation.bench_report import (
    Results,
    by_group,
    differences,
    interval,
    load_results,
    overall_table,
    plot_bench,
    setting_lines,
    summary_of,
)
from jaxspec.evaluation.claims import CLAIMS, CLOSE, CLOSE_SPEED, PAPERS, Evidence, Verdict
from jaxspec.evaluation.markdown import row, rule
from jaxspec.files import writable, write_atomically
from jaxspec.model.hf import read_json


def write_results(folders: Sequence[Path], output: Path) -> Path:
    """Write results.md, results.json and a plot of every benchmark.

    Args:
      folders: benchmarks' folders, the main one first.
      output: folder of the page; an ablations.json that lies there counts as evidence.

    Returns:
      The page.

    Raises:
      UserError: no folders, one without a benchmark, two of one name, or an output that cannot be written.
    """
    if not folders:
        raise UserError("give at least one folder of a benchmark")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"benchmarks on one page need folders of different names, got {', '.join(names)}")
    benchmarks = {name: load_results(folder) for name, folder in zip(names, folders, strict=True)}
    ablations = writable(output) / "ablations.json"
    evidence = Evidence(list(benchmarks.values()), read_json(ablations) if ablations.exists() else {})
    lines = ["# Results", "", f"Made by `python bench.py results` from the benchmarks {', '.join(names)}.", ""]
    for name, results in benchmarks.items():
        lines += _benchmark(name, results, output)
    lines += ["## What the papers claim, on this base", "", *claims_table(evidence), ""]
    lines += ["## What the papers report, on theirs", "", *_papers_table(), ""]
    summaries = {name: summary_of(results) for name, results in benchmarks.items()}
    write_atomically(output / "results.json", json.dumps(summaries, indent=1).encode())
    page = output / "results.md"
    write_atomically(page, "\n".join(lines).encode())
    return page


def _benchmark(name: str, results: Results, output: Path) -> list[str]:
    """The section of one benchmark."""
    lines = [f"## {name.replace('_', ' ').capitalize()}", "", *setting_lines(results), "", *overall_table(results), ""]
    lines += ["Speedup by category:", "", *by_group(results, lambda f: interval(f.speedup)), ""]
    lines += ["Tokens per step by category:", "", *by_group(results, lambda f: f"{f.tokens_per_step:.2f}"), ""]
    lines += ["Where answers differ:", "", *differences(results), ""]
    picture = output / f"results-{name.replace(' ', '-')}.png"
    return [*lines, f"![{name}]({picture.name})", ""] if plot_bench(results, picture) else lines


def claims_table(evidence: Evidence) -> list[str]:
    """A line per claim, and how verdicts are made."""
    verdicts = [(claim, claim.judge.judge(evidence) or Verdict("", "not measured")) for claim in CLAIMS]
    lines = [row(["claim", "source", "measured", "verdict"]), rule(4)]
    lines += [row([c.text, c.source, v.measured, f"**{v.holds}**"]) for c, v in verdicts]
    return [
        *lines,
        "",
        "A comparison of speeds is undecided where 1 lies within its interval; accuracies count as different from "
        f"{CLOSE} on, speedups of categories from {CLOSE_SPEED} on.",
    ]


def _papers_table() -> list[str]:
    heads = ["method", "base", "device", "speed against autoregressive decoding", "source"]
    return [row(heads), rule(len(heads)), *map(row, PAPERS)]
