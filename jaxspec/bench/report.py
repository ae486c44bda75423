"""summary.json, report.md and plots of a benchmark, made from its answer files alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.answers import Answers
from jaxspec.bench.config import BenchConfig, read_setting, read_written
from jaxspec.bench.markdown import row, rule
from jaxspec.bench.metrics import Estimate, Figures, figures
from jaxspec.bench.overhead import overhead_table
from jaxspec.bench.quality import SCORED
from jaxspec.bench.questions import group_of
from jaxspec.bench.ways import AGAIN, REFERENCE
from jaxspec.config import command_line
from jaxspec.decoding.divergence import NEAR_TIE
from jaxspec.errors import UserError
from jaxspec.files import read_json, read_whole_lines, write_atomically
from jaxspec.plotting import picture

Rows = list[list[dict[str, Any]]]  # rows of answer files, run by run
ALL = "all"
CLOSE_SPEED = 0.03  # ratios of speeds this close to 1 are none: what autoregressive decoding against itself may come to
_BESIDE = {"memory.json": ("peak_bytes", "method_bytes"), "overhead.json": ("code", "ways")}
_RULES = {
    "match": "which owes the text of autoregressive decoding, token for token",
    "rejection": "which when sampling gives another text of the same distribution",
    "typical": "which is **lossy**: another text of another distribution",
}


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything a folder holds.

    Attributes:
      setting: bench.json.
      rows: answers of every way, run by run; of questions that every way has answered.
      figures: {way: {group: figures}}; the group `all` first.
      scores: {way: {kind and name: mean over questions}}, of answers that could be scored, and their perplexity.
      memory: memory.json; empty for a benchmark that was cut short.
      overhead: overhead.json, what a step of every method consists of; empty likewise.
    """

    setting: dict[str, Any]
    rows: dict[str, Rows]
    figures: dict[str, dict[str, Figures]]
    scores: dict[str, dict[str, float]]
    memory: dict[str, Any]
    overhead: dict[str, Any]


def load_results(folder: Path) -> Results:
    """Read a benchmark's folder, finished or not.

    Raises:
      UserError: no benchmark there, or none with an answer of more than one token.
    """
    setting = read_setting(folder)
    ways = list(setting["ways"])
    answers = Answers(folder, ways)
    rows: dict[str, Rows] = {way: [] for way in ways}
    for run in range(1, setting["settings"]["repeats"] + 1):
        for way, found in answers.read(run).items():
            rows[way].append(found)
    groups = [ALL, *sorted({group_of(answer["category"]) for run in rows[REFERENCE] for answer in run})]
    found = {
        way: {
            group: value
            for group in groups
            if (value := figures(_only(runs, group), _only(rows[reference_of(setting, way)], group))) is not None
        }
        for way, runs in rows.items()
    }
    found = {way: groups for way, groups in found.items() if ALL in groups}
    if REFERENCE not in found:
        raise UserError(f"{folder}: no question has an answer of more than one token yet")
    memory, overhead = (
        read_written(folder / name, fields) if (folder / name).exists() else {} for name, fields in _BESIDE.items()
    )
    scores = _mean_scores(read_whole_lines(folder / "scores.jsonl", SCORED), ways)
    if (folder / "perplexity.json").exists():
        for way, value in read_json(folder / "perplexity.json").items():
            if way in scores:
                scores[way]["perplexity under the base"] = value
    return Results(setting, rows, found, scores, memory, overhead)


def reference_of(setting: dict[str, Any], way: str) -> str:
    """The way that another is compared with: autoregressive decoding of the same base."""
    return setting["ways"][way].get("reference", REFERENCE)


def _overhead(results: Results) -> list[str]:
    """Where the time of a step goes."""
    same = results.overhead["code"] == results.setting["code"]
    note = "" if same else " Measured with another version of the code than the answers."
    *table, last = overhead_table(results.overhead["ways"])
    return [*table, last + note]


def _mean_scores(lines: Sequence[dict[str, Any]], ways: Sequence[str]) -> dict[str, dict[str, float]]:
    values: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for line in (line for line in lines if line["way"] in values):
        for name, value in line["scores"].items():
            values[line["way"]].setdefault(f"{line['kind']} {name}", []).append(value)
    return {way: {name: float(np.mean(found)) for name, found in scores.items()} for way, scores in values.items()}


def _only(runs: Rows, group: str) -> Rows:
    return [[answer for answer in run if group in (ALL, group_of(answer["category"]))] for run in runs]


def write_bench_report(results: Results, folder: Path) -> Path:
    """Write summary.json, report.md and its plots into a benchmark's folder.

    Returns:
      The report.
    """
    write_atomically(folder / "summary.json", json.dumps(summary_of(results), indent=1).encode())
    picture = folder / "report.png"
    drawn = plot_bench(results, picture)
    lines = ["# Benchmark", "", *sections(results, "##")]
    lines += [f"![speedup, tokens per step, acceptance]({picture.name})"] if drawn else []
    file = folder / "report.md"
    write_atomically(file, "\n".join([*lines, ""]).encode())
    return file


def sections(results: Results, heading: str) -> list[str]:
    """Everything that a report says in words and tables.

    Args:
      results: what to report.
      heading: what marks the title of a section.
    """
    parts = {
        "All questions": [*overall_table(results), *control_line(results)],
        "Speedup by category": by_group(results, lambda f: interval(f.speedup)),
        "Tokens per step by category": by_group(results, lambda f: f"{f.tokens_per_step:.2f}"),
        "Acceptance by depth": _acceptance(results),
        "Where the time of a step goes": _overhead(results) if results.overhead else [],
        "Quality": _quality(results) if any(results.scores.values()) else [],
        "Where answers differ": _differences(results),
    }
    lines = [*setting_lines(results), ""]
    for title, body in parts.items():
        lines += [f"{heading} {title}", "", *body, ""] if body else []
    return lines


def summary_of(results: Results) -> dict[str, Any]:
    """All figures as plain values, for programs."""
    ways = {way: {g: dataclasses.asdict(f) for g, f in groups.items()} for way, groups in results.figures.items()}
    measured = {"memory": results.memory, "overhead": results.overhead, "quality": results.scores}
    return {"setting": results.setting} | measured | {"ways": ways}


def command(setting: dict[str, Any]) -> str:
    """The command line of a benchmark: what differs from the defaults, files without their folders."""
    return command_line(["python", "bench.py"], setting["settings"], BenchConfig())


def setting_lines(results: Results) -> list[str]:
    """The command, the machine, and how to read the tables."""
    s, settings = results.setting, results.setting["settings"]
    drawn = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    if settings["mt_bench_temperatures"]:
        drawn = f"MT-Bench's categories at its temperatures, the others {drawn}"
    asked, runs = s["questions"], settings["repeats"]
    answered = sum(map(len, results.rows[REFERENCE]))
    unfinished = "" if answered == asked * runs else f" **Unfinished: {answered} of {asked * runs} answers are there.**"
    lines = [
        f"`{command(s)}`",
        "",
        f"{s['model']} ({s['dtype']}) on {s['device']}, jax {s['jax']}, {s['began']}, version {s['code']} of what "
        f"decodes. {asked} questions, {drawn}, up to {settings['max_new_tokens']} tokens per turn, "
        f"{settings['batch_size']} at a time, {runs} run(s).{unfinished}",
        "",
        f"Acceptance: {s['settings']['accept']}, {_RULES[s['settings']['accept']]}. Every question is answered by all "
        "methods in turn, compilation apart. Speedups compare pairs, the same question answered both ways: the median "
        "and the mean, with 95% intervals. They are of decoding; the column *with prefill* is Spec-Bench's speedup, "
        "whose script however counts the reference's tokens anew from the text. Tokens/s, ms per step and *step cost*, "
        "the time of a step over that of an autoregressive one, are medians over questions, each its own: for one "
        "question alone, speedup = tokens per step / step cost.",
    ]
    lines += [f"\n{way['note']}" for way in s["ways"].values() if "note" in way]
    own = [way for way in s["ways"] if reference_of(s, way) not in (REFERENCE, way)]
    if own:
        lines += ["", f"{', '.join(own)}: compared with autoregressive decoding of the base that the method has tuned."]
    libraries = dict.fromkeys(way["library"] for way in s["ways"].values() if "library" in way)
    for library in libraries:
        lines.append(f"\nThe peers (hf) are {library}; compared with jaxspec's autoregressive decoding, as all others.")
    if s["left_out"]:
        lines += ["", f"{len(s['left_out'])} questions of the files are too long for the base and were left out."]
    if results.memory:
        peak = results.memory["peak_bytes"] / 2**20
        lines += ["", f"Peak memory, of all methods together and of the programs compiled for them: {peak:,.0f} MiB."]
    return lines


def overall_table(results: Results) -> list[str]:
    """The main table, a line per way."""
    heads = ["method", "rows", "draft vocabulary", "tokens per step", "tokens/s", "speedup, median", "speedup, mean"]
    heads += ["with prefill", "ms per step", "step cost", "drafter, MiB", "identical"]
    repeated = results.setting["settings"]["repeats"] > 1
    heads += ["tokens per step, mean ± SD of runs", "speedup, mean ± SD of runs"] if repeated else []
    lines = [row(heads), rule(len(heads))]
    sizes = results.memory.get("method_bytes", {})
    whole = all(len(rows) == results.setting["questions"] for rows in results.rows[REFERENCE])
    for way, groups in results.figures.items():
        f, info = groups[ALL], results.setting["ways"][way]
        cells = [
            way,
            "" if "library" in info else info.get("rows", 1),
            (info["draft_vocabulary"] or "all") if "draft_vocabulary" in info else "",
            f"{f.tokens_per_step:.2f}",
            f"{f.tokens_per_second:.1f}",
            interval(f.speedup),
            interval(f.mean_speedup),
            f"{f.with_prefill:.2f}",
            f"{f.step_milliseconds:.1f}",
            f"{f.step_cost:.2f}",
            f"{sizes[way] / 2**20:.1f}" if way in sizes and "library" not in info else "",
            f"{f.identical} of {f.answers}" if f.answers and way != reference_of(results.setting, way) else "",
        ]
        if repeated:
            cells += [_mean_and_spread(v) if whole else "unfinished" for v in (f.run_tokens_per_step, f.run_speedups)]
        lines.append(row(cells))
    return lines


def control_of(results: Results) -> Estimate | None:
    """Speed of autoregressive decoding against itself, where both took part."""
    return results.figures[AGAIN][ALL].speedup if AGAIN in results.figures else None


def control_line(results: Results) -> list[str]:
    """A line that says how far to trust speedups."""
    found = control_of(results)
    if found is None:
        return []
    within = "within" if abs(found.value - 1) <= CLOSE_SPEED else "**not within**"
    return ["", f"Autoregressive decoding against itself: {interval(found, 3)}, {within} {CLOSE_SPEED} of 1."]


def by_group(results: Results, cell: Callable[[Figures], str]) -> list[str]:
    """A table of one figure, a line per way that is compared with another, and a column per category."""
    groups = list(results.figures[REFERENCE])
    counts = [results.figures[REFERENCE][group].questions for group in groups]
    lines = [row(["method", *(f"{g} ({n})" for g, n in zip(groups, counts, strict=True))])]
    lines.append(rule(len(groups) + 1))
    for way in _compared(results):
        found = results.figures[way]
        lines.append(row([way, *(cell(found[g]) if g in found else "" for g in groups)]))
    return lines


def _compared(results: Results) -> list[str]:
    """The ways that are compared with another."""
    return [way for way in results.figures if way != reference_of(results.setting, way)]


def _acceptance(results: Results) -> list[str]:
    drafting = {way: f[ALL].acceptance for way, f in results.figures.items() if f[ALL].acceptance}
    deepest = max(map(len, drafting.values()), default=0)
    if not deepest:
        return ["Nothing was drafted."]
    lines = [row(["method", *(f"depth {d + 1}" for d in range(deepest))]), rule(deepest + 1)]
    for way, rates in drafting.items():
        lines.append(row([way, *(f"{rate:.3f}" for rate in rates), *[""] * (deepest - len(rates))]))
    return lines


def _quality(results: Results) -> list[str]:
    kinds = list(dict.fromkeys(name for scores in results.scores.values() for name in scores))
    lines = [row(["method", *kinds]), rule(len(kinds) + 1)]
    for way, scores in results.scores.items():
        lines.append(row([way, *(f"{scores[name]:.3f}" if name in scores else "" for name in kinds)]))
    return lines


def _differences(results: Results) -> list[str]:
    """One line per answer that is not autoregressive decoding's, among those that owe its text."""
    lines, owed = [], 0
    for way in _compared(results):
        for number, rows in enumerate(results.rows[way], 1):
            for answer in rows:
                owed += len(answer["choices"][0]["divergence"])
                for turn, parting in enumerate(answer["choices"][0]["divergence"], 1):
                    if parting:
                        where = f"{answer['data']} {answer['question_id']}, turn {turn}, run {number}"
                        gap = _gap(results, parting)
                        lines.append(f"- {way}: {where}, from token {parting['index'] + 1} on; {gap}")
    if not owed:
        return ["No answer owes the text of autoregressive decoding: differences are not listed."]
    return lines or [f"Nowhere among the {owed} answers that owe the text of autoregressive decoding, token by token."]


def _gap(results: Results, parting: dict[str, Any]) -> str:
    """What a gap between two scores says. In 16 bits passes of other shapes round differently by much more."""
    if -1 in parting["tokens"]:
        return "one answer ends where the other goes on"
    gap = parting["gap"]
    if gap is None:
        return "a token that the filters let through in one pass and not in the other"
    word = "a near-tie" if gap < NEAR_TIE else "no near-tie"
    return f"gap {gap:.2g}" + (f", {word}" if results.setting["dtype"] == "float32" else "")


def _mean_and_spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


def interval(estimate: Estimate, digits: int = 2) -> str:
    """An estimate with its interval, where it has one."""
    if estimate.low is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def _spread(estimate: Estimate) -> tuple[float, float]:
    """How far its interval reaches below and above a value."""
    if estimate.low is None:
        return 0, 0
    return max(estimate.value - estimate.low, 0), max(estimate.high - estimate.value, 0)


def plot_bench(results: Results, file: Path) -> bool:
    """Draw speedup and tokens per step by category, and acceptance by depth. Returns whether there is anything to."""
    groups = list(results.figures[REFERENCE])
    ways = _compared(results)
    if not ways:
        return False
    depths = max(len(results.figures[way][ALL].acceptance) for way in ways)
    with picture(file, 3, 1, (11, 12), dpi=100) as axes:
        width, places = 0.8 / len(ways), np.arange(len(groups))
        for number, way in enumerate(ways):
            found = [results.figures[way].get(group) for group in groups]
            at = places + (number - (len(ways) - 1) / 2) * width
            speed = [f.speedup.value if f else 0 for f in found]
            spread = np.array([_spread(f.speedup) if f else (0, 0) for f in found]).T
            axes[0].bar(at, speed, width, yerr=spread, label=way, error_kw={"linewidth": 0.8})
            axes[1].bar(at, [f.tokens_per_step if f else 0 for f in found], width, label=way)
            rates = results.figures[way][ALL].acceptance
            axes[2].bar(np.arange(1, len(rates) + 1) + at[0] - places[0], rates, width, label=way)
        for axis, name in ((axes[0], "speedup against autoregressive"), (axes[1], "tokens per step")):
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xticks(places, groups)
            axis.set(ylabel=name)
        axes[2].set(xlabel="depth", ylabel="accepted of offered", ylim=(0, 1), xticks=range(1, depths + 1))
        axes[0].legend(fontsize=8, ncols=min(len(ways), 6), loc="lower center", bbox_to_anchor=(0.5, 1))
    return True
