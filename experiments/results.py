"""One page of results from benchmarks' folders: tables, the papers' claims on this base, the papers' own figures.

A benchmark that asks what an earlier one has asked already shows how far the two agree. What `bench.py latency` has
measured may go with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.agreement import agreement, asked_again
from experiments.claims import CHAT, CLAIMS, HOW_SPEEDS_COMPARE, PAPERS, Evidence, Verdict
from experiments.verdicts import CLOSE
from jaxspec.bench.plot import plot_bench
from jaxspec.bench.report import sections
from jaxspec.bench.results import load_results, summary_of
from jaxspec.errors import UserError
from jaxspec.files import read_json, writable, write_atomically
from jaxspec.markdown import row, rule
from jaxspec.tuning.steps import LATENCY, latency_table, plot_latency, read_latency


def write_results(folders: Sequence[Path], output: Path) -> Path:
    """Write results.md, results.json and a plot of every benchmark.

    Args:
      folders: benchmarks' folders, the main one first, and latency's.
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
    named = dict(zip(names, folders, strict=True))
    curves = {name: read_latency(folder) for name, folder in named.items() if (folder / LATENCY).exists()}
    benchmarks = {name: load_results(folder) for name, folder in named.items() if name not in curves}
    if not benchmarks:
        raise UserError("give at least one folder of a benchmark beside latency's")
    ablations = writable(output) / "ablations.json"
    evidence = Evidence(list(benchmarks.values()), read_json(ablations) if ablations.exists() else {})
    main = next(iter(benchmarks))
    again = [name for name, results in benchmarks.items() if name != main and asked_again(benchmarks[main], results)]
    lines = ["# Results", "", f"Made by `python bench.py results` from {', '.join(names)}.", ""]
    versions = {name: results.setting["code"] for name, results in benchmarks.items()}
    versions |= {name: found["code"] for name, found in curves.items()}
    others = [name for name, code in versions.items() if code != versions[main]]
    if others:
        lines += [f"Made with another version of decoding's code than {main}: {', '.join(others)}. What a step costs,"]
        lines += ["with a method or without, may be another there: compare speeds within a section.", ""]
    lines += ["## What the papers claim, on this base", "", *claims_table(evidence), ""]
    for name, results in benchmarks.items():
        lines += [f"## {_title(name)}", ""]
        if name in again:
            lines += [*agreement(benchmarks[main], results), ""]
        else:
            lines += [*sections(results, "###"), *_picture(name, output, lambda file, r=results: plot_bench(r, file))]
    for name, found in curves.items():
        lines += [f"## {_title(name)}: milliseconds of a step by rows", "", *latency_table(found), ""]
        lines += _picture(name, output, lambda file, found=found: plot_latency(found, file))
    lines += ["## What the papers report, on theirs", "", *_papers_table(), ""]
    summaries = {name: summary_of(results) for name, results in benchmarks.items()} | curves
    write_atomically(output / "results.json", json.dumps(summaries, indent=1).encode())
    page = output / "results.md"
    write_atomically(page, "\n".join(lines).encode())
    return page


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _picture(name: str, output: Path, draw: Callable[[Path], bool]) -> list[str]:
    """A line that shows what is drawn, if anything is."""
    file = output / f"results-{name.replace(' ', '-')}.png"
    return [f"![{name}]({file.name})", ""] if draw(file) else []


def claims_table(evidence: Evidence) -> list[str]:
    """A line per claim, and how verdicts are made."""
    verdicts = [(claim, claim.judge.judge(evidence) or Verdict("", "not measured")) for claim in CLAIMS]
    lines = [row(["claim", "source", "measured", "verdict"]), rule(4)]
    lines += [row([c.text, c.source, v.measured, f"**{v.holds}**"]) for c, v in verdicts]
    return [
        *lines,
        "",
        f"{HOW_SPEEDS_COMPARE} Where autoregressive decoding differed from itself by more than that, its own "
        f"difference is the margin, and no pair is called equal. Accuracies of adapters differ from {CLOSE} on, those "
        "of ablations as ablations.md says. Gains on two groups of questions differ where the interval of "
        f"their difference does not hold 0. Conversation: MT-Bench's {', '.join(CHAT)}.",
    ]


def _papers_table() -> list[str]:
    heads = ["method", "base", "device", "speed against autoregressive decoding", "source"]
    return [row(heads), rule(len(heads)), *map(row, PAPERS)]
