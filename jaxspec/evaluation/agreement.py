"""How far two runs of one benchmark agree, on the questions that both have asked."""

from __future__ import annotations

from typing import Any

from jaxspec.evaluation.bench_report import Results, command, interval, reference_of
from jaxspec.evaluation.markdown import row, rule
from jaxspec.evaluation.metrics import Figures, figures
from jaxspec.evaluation.ways import REFERENCE

_MAY_DIFFER = ("limit", "methods", "peers", "assistant")


def asked_again(first: Results, second: Results) -> bool:
    """Whether two benchmarks are runs of the same one, be it of other methods or of fewer questions."""
    return _kept(first) == _kept(second) and bool(_questions(first) & _questions(second))


def _kept(results: Results) -> dict[str, Any]:
    settings = {name: value for name, value in results.setting["settings"].items() if name not in _MAY_DIFFER}
    return settings | {name: results.setting[name] for name in ("fingerprint", "dtype", "device")}


def _questions(results: Results) -> set[tuple]:
    return {(answer["data"], answer["question_id"]) for run in results.rows[REFERENCE] for answer in run}


def agreement(first: Results, second: Results) -> list[str]:
    """Lines that show the figures of both runs side by side, for the ways and questions that they share."""
    shared = _questions(first) & _questions(second)
    before, after = (_figures(results, shared) for results in (first, second))
    heads = ["method", "tokens per step", "again", "speedup, median", "again", "within the interval"]
    table, inside = [row(heads), rule(len(heads))], 0
    for way in (way for way in before if way in after):
        one, other = before[way], after[way]
        within = one.speedup.low is not None and one.speedup.low <= other.speedup.value <= one.speedup.high
        inside += within
        steps = [f"{one.tokens_per_step:.3f}", f"{other.tokens_per_step:.3f}"]
        table.append(row([way, *steps, interval(one.speedup), interval(other.speedup), "yes" if within else "no"]))
    return [
        f"`{command(second.setting)}`",
        "",
        f"The first benchmark once more, {second.setting['began']}: what both runs make of the {len(shared)} questions "
        f"that they share. {inside} of {len(table) - 2} speedups lie in the first run's interval.",
        "",
        *table,
    ]


def _figures(results: Results, questions: set[tuple]) -> dict[str, Figures]:
    """Of every way that is compared with another, on some of the questions."""
    kept = {
        way: [[answer for answer in run if (answer["data"], answer["question_id"]) in questions] for run in runs]
        for way, runs in results.rows.items()
    }
    references = {way: reference_of(results.setting, way) for way in kept}
    found = {way: figures(kept[way], kept[other]) for way, other in references.items() if way != other}
    return {way: value for way, value in found.items() if value is not None}
