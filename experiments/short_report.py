"""A benchmark in few lines, for a page of several: `jaxspec bench report` has all of its tables."""

from __future__ import annotations

from jaxspec.bench.config import AGAIN
from jaxspec.bench.questions import MT_BENCH
from jaxspec.bench.report import (
    acceptance_rule,
    circumstances,
    command,
    control_line,
    differences,
    interval,
    overall_table,
    remarks,
)
from jaxspec.bench.results import ALL, Results, compared
from jaxspec.markdown import table


def short_report(results: Results) -> list[str]:
    """Setting, main table, speed and tokens per step by category, a step's parts, and answers that differ."""
    about = [f"`{command(results.setting)}`:", circumstances(results), acceptance_rule(results), *remarks(results)]
    lines = [" ".join(about), "", *overall_table(results), *control_line(results)]
    for part in (_by_category(results), _steps(results), _different(results)):
        lines += ["", *part] if part else []
    return [*lines, ""]


def _by_category(results: Results) -> list[str]:
    """One line per method; nothing where no category has enough questions for an interval, or there is only one."""
    ways = [way for way in compared(results) if way != AGAIN]
    groups = dict.fromkeys(g for way in ways for g in results.figures[way] if g != ALL and g not in MT_BENCH)
    measured = any(f.speedup.low is not None for way in ways for g, f in results.figures[way].items() if g in groups)
    if len(groups) < 2 or not measured:
        return []
    rows = []
    for way in ways:
        figures = [results.figures[way].get(group) for group in groups]
        rows.append([way, *(f"{f.tokens_per_step:.2f}: {interval(f.speedup)}" if f else "" for f in figures)])
    counts = {group: results.figures[ways[0]][group].questions for group in groups}
    heads = ["tokens per step: speedup", *(f"{group} ({count})" for group, count in counts.items())]
    return table(heads, rows)


def _steps(results: Results) -> list[str]:
    """How often drafts are accepted by depth, and the parts of a step in milliseconds; nothing without the latter."""
    drafting = {way: f[ALL].acceptance for way, f in results.figures.items() if f[ALL].acceptance}
    if not (drafting and results.overhead.get("ways")):
        return []
    deepest, timed = max(map(len, drafting.values())), results.overhead["ways"]
    rows = []
    for way, rates in drafting.items():
        cells = [f"{rate:.3f}" for rate in rates] + [""] * (deepest - len(rates))
        rows.append([way, *cells, *(_parts(timed[way]) if way in timed else [""] * 5)])
    heads = ["method", *(f"accepted, depth {depth + 1}" for depth in range(deepest))]
    lines = table([*heads, "nodes", "autoregressive, ms", "verifying", "drafting", "whole step"], rows)
    if results.overhead["code"] != results.setting["code"]:
        lines += ["", "Steps were timed with another version of the code than the answers."]
    return lines


def _parts(parts: dict[str, float]) -> list[str]:
    plain, verifying, whole = (1e3 * parts[part] for part in ("plain", "verifying", "whole"))
    return [str(parts["nodes"]), *(f"{value:.1f}" for value in (plain, verifying - plain, whole - verifying, whole))]


def _different(results: Results) -> list[str]:
    """Nothing where the main table says that all answers are identical."""
    figures = [results.figures[way][ALL] for way in compared(results)]
    return differences(results) if any(f.identical != f.answers for f in figures) else []
