"""summary.json, report.md and plots of a benchmark, made from its answer files alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import markdown
from jaxspec.bench import speed_bench
from jaxspec.bench.config import AGAIN, REFERENCE, BenchConfig
from jaxspec.bench.metrics import Estimate, Figures
from jaxspec.bench.plot import plot_bench
from jaxspec.bench.questions import MT_BENCH
from jaxspec.bench.results import ALL, Results, compared, reference_of, summary_of
from jaxspec.bench.run import CACHE, ROUNDS
from jaxspec.config import command_line
from jaxspec.files import write_atomically, write_json
from jaxspec.generation.divergence import NEAR_TIE
from jaxspec.markdown import table

CLOSE_SPEED = 0.03  # ratios of speeds this close to 1 are none: what autoregressive decoding against itself may come to
_RULES = {
    "match": "the text must match that of autoregressive decoding, token for token",
    "rejection": "when sampling, another text of the same distribution",
    "block": "when sampling, another text of the same distribution",
    "typical": "when sampling **lossy**, another text of another distribution",
}
HOW_TO_READ = (
    "All methods answer each question in turn; compilation does not count. Speedups compare pairs, the same question "
    "answered both ways, by the time of decoding: the median and the mean, with 95% intervals. The column *with "
    "prefill* is Spec-Bench's speedup, but its script counts the reference's tokens by tokenizing the text again. "
    "Tokens/s, ms per step and *step cost*, the time of a step over that of an autoregressive one, are medians over "
    "questions. Of a single question, speedup = tokens per step / step cost."
)

_SPEED_BENCH = (
    "*Length*: tokens per step, the bonus included. *Rate*: accepted over drafted tokens; of trees, which draft "
    "alternatives, it is lower than of chains. A *position*: how often a token was accepted there, of the steps that "
    "accepted all before it and had a candidate."
)


def write_bench_report(results: Results, folder: Path) -> Path:
    """Write summary.json, report.md and its plots into a benchmark's folder. Returns the report."""
    write_json(folder / "summary.json", summary_of(results))
    lines = ["# Benchmark", "", *sections(results, "##")]
    if plot_bench(results, folder / "report.png"):
        lines += ["![speedup, tokens per step, acceptance](report.png)"]
    file = folder / "report.md"
    write_atomically(file, "\n".join([*lines, ""]).encode())
    return file


def sections(results: Results, heading: str) -> list[str]:
    """The text and tables of a report.

    Args:
      results: the results to report.
      heading: Markdown prefix of section titles.
    """
    speedup, tokens = (lambda f: interval(f.speedup)), (lambda f: f"{f.tokens_per_step:.2f}")
    parts = {
        "All questions": [*overall_table(results), *control_line(results)],
        "Speedup by category": by_group(results, speedup),
        "Tokens per step by category": by_group(results, tokens),
        "Speedup by category of MT-Bench": by_group(results, speedup, MT_BENCH),
        "Tokens per step by category of MT-Bench": by_group(results, tokens, MT_BENCH),
        "Acceptance by depth": _acceptance(results),
        "SPEED-Bench: length, rate and conditional acceptance": _speed_bench(results),
        "Where the time of a step goes": _overhead(results),
        "Quality": _quality(results),
        "Where answers differ": differences(results),
    }
    how = f"{acceptance_rule(results)} {HOW_TO_READ}"
    about = [f"`{command(results.setting)}`", circumstances(results), how, *remarks(results)]
    return [*(line for paragraph in about for line in (paragraph, "")), *markdown.sections(parts, heading)]


def command(setting: dict[str, Any]) -> str:
    """The command line of a benchmark: settings that differ from the defaults, files without their folders."""
    runs = [word for run in setting["settings"]["runs"] for word in ("--run", run)]
    settings = {name: value for name, value in setting["settings"].items() if name != "runs"}
    return command_line(["jaxspec", "bench", "compare", *runs], settings, BenchConfig())


def acceptance_rule(results: Results) -> str:
    """A sentence about the rule of acceptance and what it keeps."""
    rule = results.setting["settings"]["accept"]
    return f"Acceptance: {rule}, {_RULES[rule]}."


def circumstances(results: Results) -> str:
    """Number of questions and repeats, sampling settings, and the machine."""
    s, settings = results.setting, results.setting["settings"]
    drawn = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    if settings["mt_bench_temperatures"]:
        drawn = f"MT-Bench's categories at its temperatures, the others {drawn}"
    repeated = f", {settings['repeats']} times" if settings["repeats"] > 1 else ""
    planned, answered = s["questions"] * settings["repeats"], sum(map(len, results.rows[REFERENCE]))
    unfinished = "" if answered == planned else f" **Unfinished: {answered} of {planned} answers are there.**"
    return (
        f"{s['model']} ({s['dtype']}) on {s['device']}, jax {s['jax']}, {s['began']}, code {s['code']}. "
        f"{s['questions']} questions{repeated}, {drawn}, up to {settings['max_new_tokens']} tokens per turn, "
        f"{settings['batch_size']} at a time.{unfinished}"
    )


def remarks(results: Results) -> list[str]:
    """Remarks on single ways, on questions and on memory."""
    s, ways = results.setting, results.setting["ways"]
    notes: dict[str, list[str]] = {}
    for name, way in ways.items():
        if "note" in way:
            notes.setdefault(way["note"], []).append(name)
    said = [f"{', '.join(names)}: {note}." for note, names in notes.items()]
    if own := [way for way in ways if reference_of(s, way) not in (REFERENCE, way)]:
        said.append(f"{', '.join(own)}: compared with autoregressive decoding of the base that the method has tuned.")
    for library in dict.fromkeys(way["library"] for way in ways.values() if "library" in way):
        said.append(f"The peers (hf) are {library}, compared with jaxspec's autoregressive decoding like all others.")
    if s["left_out"]:
        said.append(f"{len(s['left_out'])} questions are too long for the base and were left out.")
    if results.memory:
        peak = results.memory["peak_bytes"] / 2**20
        said.append(f"Peak memory, of all methods and their compiled programs together: {peak:,.0f} MiB.")
    return said


def overall_table(results: Results) -> list[str]:
    """The main table, one line per way."""
    repeated = results.setting["settings"]["repeats"] > 1
    whole = all(len(rows) == results.setting["questions"] for rows in results.rows[REFERENCE])
    sizes, rows = results.memory.get("method_bytes", {}), []
    for way, groups in results.figures.items():
        f, info = groups[ALL], results.setting["ways"][way]
        peer = "library" in info
        row = {
            "method": way,
            "rows": "" if peer else info.get("rows", 1),
            "draft vocabulary": (info["draft_vocabulary"] or "all") if "draft_vocabulary" in info else "",
            "tokens per step": f"{f.tokens_per_step:.2f}",
            "tokens/s": f"{f.tokens_per_second:.1f}",
            "speedup, median": interval(f.speedup),
            "speedup, mean": interval(f.mean_speedup),
            "with prefill": f"{f.with_prefill:.2f}",
            "ms per step": f"{f.step_milliseconds:.1f}",
            "step cost": f"{f.step_cost:.2f}",
            "drafter, MiB": f"{sizes[way] / 2**20:.1f}" if way in sizes and not peer else "",
            "identical": f"{f.identical} of {f.answers}" if f.answers and way in compared(results) else "",
        }
        if repeated:
            for name, values in (("tokens per step", f.run_tokens_per_step), ("speedup", f.run_speedups)):
                spread = f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}" if whole else "unfinished"
                row[f"{name}, mean ± SD of runs"] = spread
        rows.append(row)
    return table(list(rows[0]), [row.values() for row in rows])


def control_line(results: Results) -> list[str]:
    """A line about how far speedups can be trusted."""
    if AGAIN not in results.figures:
        return []
    control = results.figures[AGAIN][ALL].speedup
    within = "within" if abs(control.value - 1) <= CLOSE_SPEED else "**not within**"
    return ["", f"Autoregressive decoding against itself: {interval(control, 3)}, {within} {CLOSE_SPEED} of 1."]


def by_group(results: Results, cell: Callable[[Figures], str], of: Collection[str] = ()) -> list[str]:
    """A table of one figure: one line per way that is compared with another, one column per group of questions.

    The groups are those in `of`, by default all but MT-Bench's categories. Empty without groups.
    """
    groups = {g: f for g, f in results.figures[REFERENCE].items() if (g in of if of else g not in MT_BENCH)}
    if not groups:
        return []
    rows = [
        [way, *(cell(results.figures[way][g]) if g in results.figures[way] else "" for g in groups)]
        for way in compared(results)
    ]
    return table(["method", *(f"{group} ({figures.questions})" for group, figures in groups.items())], rows)


def interval(estimate: Estimate, digits: int = 2) -> str:
    """An estimate with its interval, where it has one."""
    if estimate.low is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def _acceptance(results: Results) -> list[str]:
    drafting = {way: f[ALL].acceptance for way, f in results.figures.items() if f[ALL].acceptance}
    if not drafting:
        return ["Nothing was drafted."]
    deepest = max(map(len, drafting.values()))
    rows = [[way, *(f"{rate:.3f}" for rate in rates)] for way, rates in drafting.items()]
    return table(["method", *(f"depth {depth}" for depth in range(1, deepest + 1))], rows)


def _speed_bench(results: Results) -> list[str]:
    """SPEED-Bench's own figures, a line per category and way that drafts, and how to read them."""
    drafting = [
        (group, way, figures[group])
        for group in results.figures[REFERENCE]
        if group.startswith(speed_bench.PREFIX)
        for way, figures in results.figures.items()
        if group in figures and figures[group].acceptance
    ]
    if not drafting:
        return []
    deepest = max(len(f.acceptance) for _, _, f in drafting)
    rows = [
        [
            group.removeprefix(speed_bench.PREFIX),
            way,
            f.questions,
            f"{f.tokens_per_step:.2f}",
            "" if f.acceptance_rate is None else f"{f.acceptance_rate:.3f}",
            *(f"{rate:.3f}" for rate in f.acceptance),
        ]
        for group, way, f in drafting
    ]
    heads = ["category", "method", "questions", "length", "rate", *(f"position {n + 1}" for n in range(deepest))]
    return [*table(heads, rows), "", _SPEED_BENCH]


def _overhead(results: Results) -> list[str]:
    """The table of a step's parts in milliseconds, and how to read it."""
    if not results.overhead.get("ways"):
        return []
    heads = ["method", "nodes", "rows", "autoregressive", "verifying the nodes", "drafting", "whole step"]
    rows = []
    for name, parts in results.overhead["ways"].items():
        plain, verifying, whole = (1e3 * parts[part] for part in ("plain", "verifying", "whole"))
        seconds = (plain, verifying - plain, whole - verifying, whole)
        rows.append([name, parts["nodes"], parts["rows"], *(f"{value:.1f}" for value in seconds)])
    remark = (
        f"Milliseconds of greedy steps, {CACHE} slots of cache, medians of {ROUNDS}. Drafting is the probes' rows, "
        "or what follows the pass. In another process, where programs lie elsewhere in memory, any of these may take a "
        "few milliseconds more or less; *step cost* above is of the answers themselves."
    )
    if results.overhead["code"] != results.setting["code"]:
        remark += " Measured with another version of the code than the answers."
    return [*table(heads, rows), "", remark]


def _quality(results: Results) -> list[str]:
    kinds = list(dict.fromkeys(name for scores in results.scores.values() for name in scores))
    rows = [
        [way, *(f"{scores[kind]:.3f}" if kind in scores else "" for kind in kinds)]
        for way, scores in results.scores.items()
    ]
    return table(["method", *kinds], rows) if kinds else []


def differences(results: Results) -> list[str]:
    """One line per answer that differs from autoregressive decoding's although it must match it."""
    turns = [
        (f"{way}: {answer['data']} {answer['question_id']}, turn {turn}, run {run}", divergence)
        for way in compared(results)
        for run, rows in enumerate(results.rows[way], 1)
        for answer in rows
        for turn, divergence in enumerate(answer["choices"][0]["divergence"], 1)
    ]
    if not turns:
        return ["No text must match that of autoregressive decoding: differences are not listed."]
    different = [(where, found) for where, found in turns if found]
    if not different:
        return [f"Nowhere: all {len(turns)} answers match those of autoregressive decoding, token for token."]
    return [f"- {where}, from token {found['index'] + 1} on; {_gap(results, found)}" for where, found in different]


def _gap(results: Results, divergence: dict[str, Any]) -> str:
    """A remark on the gap between two scores. In 16 bits, passes of other shapes differ by much larger gaps."""
    if -1 in divergence["tokens"]:
        return "one answer ends where the other continues"
    gap = divergence["gap"]
    if gap is None:
        return "a token that the filters let through in one pass and not in the other"
    word = "a near-tie" if gap < NEAR_TIE else "no near-tie"
    return f"gap {gap:.2g}" + (f", {word}" if results.setting["dtype"] == "float32" else "")
