"""One page of results from benchmarks' folders: tables, the papers' claims on this base, the papers' own figures."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import UserError
from jaxspec.evaluation.bench_report import (
    Results,
    by_group,
    differences,
    interval,
    load_results,
    overall_table,
    reference_of,
    setting_lines,
    write_bench_report,
)
from jaxspec.evaluation.markdown import row, rule
from jaxspec.evaluation.metrics import figures
from jaxspec.files import write_atomically
from jaxspec.model.hf import read_json

_CHAT = "mt_bench"  # the group of questions that code and mathematics are compared with
_CLOSE = 0.01  # accuracies closer than this are called equal

# Speedups as the papers report them: method, base, device, benchmark, where it stands.
PAPERS = (
    ("PPD", "Vicuna-7B", "A100-40GB", "MT-Bench 2.24, at 2.54 tokens per step (Medusa 2.09, at 2.51)", "Table 6.1"),
    ("BiTA", "LLaMA-2-7B-chat", "A800", "XSum 2.19, MT-Bench 2.38, HumanEval-X 2.73", "Table 1"),
    ("SPACE", "LLaMA-2-7B", "A800", "XSum 1.94, HumanEval-X 3.18, at 2.23 and 3.54 tokens per step", "Table 1"),
    ("Hidden Transfer", "Vicuna-7B", "A100-80GB", "XSum 1.79, GSM8K 2.22 (Medusa 1.39 and 1.73)", "Table 1"),
    ("Amphista", "Vicuna-7B", "A100-40GB", "Spec-Bench 2.13 (Medusa 1.57, Hydra++ 2.03)", "Table 4"),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was measured of a claim.

    Attributes:
      measured: in words.
      holds: `holds`, `does not hold`, `undecided`, or in how many cases.
    """

    measured: str
    holds: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What claims are judged by.

    Attributes:
      benchmarks: the first one is the main one.
      ablations: content of ablations.json; empty without one.
    """

    benchmarks: Sequence[Results]
    ablations: dict[str, Any]


Judge = Callable[[Evidence], Verdict | None]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says.

    Attributes:
      text: in our words.
      source: where.
      judge: makes the verdict; None where the evidence does not tell.
    """

    text: str
    source: str
    judge: Judge


def faster(one: str, other: str) -> Judge:
    """The judge of: one way is faster than another, question by question."""

    def judge(evidence: Evidence) -> Verdict | None:
        results = evidence.benchmarks[0]
        if not {one, other} <= results.rows.keys():
            return None
        found = figures(results.rows[one], results.rows[other])
        if found is None:
            return None
        speed, steps = found.speedup, [results.figures[way]["all"].tokens_per_step for way in (one, other)]
        measured = f"{interval(speed)} times its speed, {steps[0]:.2f} against {steps[1]:.2f} tokens per step"
        if speed.low is None or speed.low <= 1 <= speed.high:
            return Verdict(measured, "undecided")
        return Verdict(measured, "holds" if speed.low > 1 else "does not hold")

    return judge


def predicts(one: str, other: str, k: int, first: int) -> Judge:
    """The judge of: one adapter has the token among its k best candidates more often, from a distance on."""

    def judge(evidence: Evidence) -> Verdict | None:
        ways = evidence.benchmarks[0].setting["ways"]
        found = [ways.get(way, {}).get("accuracy") for way in (one, other)]
        if None in found:
            return None
        return _compared(*found, k, first)

    return judge


def trained(study: str, one: str, other: str) -> Judge:
    """The judge of: of two trainings of one ablation, the one is right more often."""

    def judge(evidence: Evidence) -> Verdict | None:
        found = evidence.ablations.get("trainings", {}).get(study, {})
        if not {one, other} <= found.keys():
            return None
        return _compared(found[one]["accuracy"], found[other]["accuracy"], 1, 1)

    return judge


def _compared(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], k: int, first: int) -> Verdict:
    ours, theirs = (np.array(accuracy)[first - 1 :, :k].sum(axis=1) for accuracy in (one, other))
    both = min(len(ours), len(theirs))
    ours, theirs = ours[:both], theirs[:both]
    where = "/".join(str(first + number) for number in range(both))
    listed = [" / ".join(f"{value:.3f}" for value in values) for values in (ours, theirs)]
    measured = f"top-{k} at distance {where}: {listed[0]} against {listed[1]}"
    gap = ours - theirs
    if np.abs(gap).max() < _CLOSE:
        return Verdict(measured, "no difference")
    if gap.min() > -_CLOSE:
        return Verdict(measured, "holds")
    return Verdict(measured, "does not hold" if gap.max() < _CLOSE else "in part")


def gains_more(group: str) -> Judge:
    """The judge of: on a group of questions methods gain more speed than on conversations."""

    def judge(evidence: Evidence) -> Verdict | None:
        speeds: dict[str, dict[str, float]] = {}
        for results in reversed(evidence.benchmarks):
            for way in (way for way in results.figures if way != reference_of(results.setting, way)):
                speeds.setdefault(way, {}).update({g: f.speedup.value for g, f in results.figures[way].items()})
        pairs = {way: (found[group], found[_CHAT]) for way, found in speeds.items() if {group, _CHAT} <= found.keys()}
        if not pairs:
            return None
        measured = ", ".join(f"{way} {ours:.2f} against {chat:.2f}" for way, (ours, chat) in pairs.items())
        more = sum(ours > chat for ours, chat in pairs.values())
        word = {len(pairs): "holds", 0: "does not hold"}.get(more, f"for {more} of {len(pairs)}")
        return Verdict(measured, word)

    return judge


CLAIMS = (
    Claim("deep prompts beat mask tokens alone", "BiTA, Table 3", trained("bita_prompting", "deep", "none")),
    Claim("Hidden Transfer is faster than Medusa", "Hidden Transfer, Table 1", faster("hidden_transfer", "medusa")),
    Claim("and predicts better", "Hidden Transfer, Figure 3", predicts("hidden_transfer", "medusa", 1, 1)),
    Claim("Amphista is faster than Medusa", "Amphista, Table 1", faster("amphista", "medusa")),
    Claim("and than Hydra++", "Amphista, Table 1", faster("amphista", "hydra")),
    Claim("Amphista predicts better than Medusa", "Amphista, Figure 1", predicts("amphista", "medusa", 1, 1)),
    Claim("PPD is faster than Medusa", "PPD, Table 6.1", faster("ppd", "medusa")),
    Claim("PPD predicts distant tokens better than Medusa", "PPD, Figure 6.3", predicts("ppd", "medusa", 10, 2)),
    Claim("mathematics gains more than conversation", "all five", gains_more("math_reasoning")),
    Claim("code gains more than conversation", "all five", gains_more("humaneval")),
)


def write_results(folders: Sequence[Path], output: Path) -> Path:
    """Write results.md, results.json and a plot of every benchmark.

    Args:
      folders: benchmarks' folders, the main one first.
      output: folder of the page; an ablations.json that lies there counts as evidence.

    Returns:
      The page.

    Raises:
      UserError: no folders, one without a benchmark, or two of one name.
    """
    if not folders:
        raise UserError("give at least one folder of a benchmark")
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"benchmarks on one page need folders of different names, got {', '.join(names)}")
    found = [load_results(folder) for folder in folders]
    output.mkdir(parents=True, exist_ok=True)
    ablations = output / "ablations.json"
    evidence = Evidence(found, read_json(ablations) if ablations.exists() else {})
    lines = ["# Results", "", f"Written by `python bench.py results {' '.join(names)}` from what it names.", ""]
    summaries = {}
    for name, folder, results in zip(names, folders, found, strict=True):
        write_bench_report(results, folder)
        summaries[name] = read_json(folder / "summary.json")
        shutil.copyfile(folder / "report.png", output / f"results-{name}.png")
        lines += _benchmark(name, results)
    lines += ["## What the papers claim, on this base", "", *claims_table(evidence), ""]
    lines += ["## What the papers report, on theirs", "", *_papers_table(), ""]
    write_atomically(output / "results.json", json.dumps(summaries, indent=1).encode())
    page = output / "results.md"
    write_atomically(page, "\n".join(lines).encode())
    return page


def _benchmark(name: str, results: Results) -> list[str]:
    """The section of one benchmark."""
    lines = [f"## {name.replace('_', ' ').capitalize()}", "", *setting_lines(results), "", *overall_table(results), ""]
    lines += ["Speedup by category:", "", *by_group(results, lambda f: interval(f.speedup)), ""]
    lines += ["Tokens per step by category:", "", *by_group(results, lambda f: f"{f.tokens_per_step:.2f}"), ""]
    return [*lines, "Where answers differ:", "", *differences(results), "", f"![{name}](results-{name}.png)", ""]


def claims_table(evidence: Evidence) -> list[str]:
    """A line per claim that the evidence says something of."""
    lines = [row(["claim", "source", "measured", "verdict"]), rule(4)]
    for claim in CLAIMS:
        verdict = claim.judge(evidence)
        if verdict:
            lines.append(row([claim.text, claim.source, verdict.measured, f"**{verdict.holds}**"]))
    return lines


def _papers_table() -> list[str]:
    heads = ["method", "base", "device", "speed against autoregressive decoding", "source"]
    return [row(heads), rule(len(heads)), *map(row, PAPERS)]
