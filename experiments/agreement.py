"""How far two runs of one benchmark agree, on the questions that both have asked."""

from __future__ import annotations

from typing import Any

from jaxspec.bench.metrics import Figures, figures
from jaxspec.bench.report import Results, command, interval, reference_of
from jaxspec.bench.ways import REFERENCE
from jaxspec.markdown import row, rule

_MAY_DIFFER = ("limit", "methods", "peers", "assistant")
_Batch = tuple[tuple, ...]


def asked_again(first: Results, second: Results) -> bool:
    """Whether the second benchmark measures nothing that the first has not, be it fewer methods or fewer questions."""
    ways = second.setting["ways"].items() <= first.setting["ways"].items()
    return ways and _kept(first) == _kept(second) and _batches(second) <= _batches(first)


def _kept(results: Results) -> dict[str, Any]:
    settings = {name: value for name, value in results.setting["settings"].items() if name not in _MAY_DIFFER}
    return settings | {name: results.setting[name] for name in ("fingerprint", "dtype", "device")}


def _batch(answer: dict[str, Any]) -> _Batch:
    """The questions that were answered together with one, as data and id."""
    return tuple(map(tuple, answer["batch"]))


def _batches(results: Results) -> set[_Batch]:
    return {_batch(answer) for run in results.rows[REFERENCE] for answer in run}


def agreement(first: Results, second: Results) -> list[str]:
    """Lines that show both runs' figures side by side, of what the second has asked again."""
    before, after = (_figures(results, _batches(second)) for results in (first, second))
    heads = ["method", "tokens per step", "again", "speedup, median", "again", "within the interval"]
    table, inside = [row(heads), rule(len(heads))], []
    for way, other in after.items():
        one, within = before[way], ""
        if one.speedup.low is not None:
            inside.append(one.speedup.low <= other.speedup.value <= one.speedup.high)
            within = "yes" if inside[-1] else "no"
        steps = [f"{one.tokens_per_step:.3f}", f"{other.tokens_per_step:.3f}"]
        table.append(row([way, *steps, interval(one.speedup), interval(other.speedup), within]))
    asked = sum(map(len, _batches(second)))
    answers = sum(map(len, second.rows[REFERENCE]))
    meant = second.setting["questions"] * second.setting["settings"]["repeats"]
    same = first.setting["code"] == second.setting["code"]
    return [
        f"`{command(second.setting)}`",
        "",
        f"The first benchmark once more, {second.setting['began']}: what both runs make of {asked} questions. "
        f"{sum(inside)} of {len(inside)} speedups lie in the first run's interval."
        + ("" if answers == meant else f" **Unfinished: {answers} of {meant} answers of the second are there.**")
        + ("" if same else " Decoding's code has changed between the two."),
        "",
        *table,
    ]


def _figures(results: Results, batches: set[_Batch]) -> dict[str, Figures]:
    """Of every way that is compared with another, on some of the questions."""
    kept = {
        way: [[answer for answer in run if _batch(answer) in batches] for run in runs]
        for way, runs in results.rows.items()
    }
    references = {way: reference_of(results.setting, way) for way in kept}
    found = {way: figures(kept[way], kept[other]) for way, other in references.items() if way != other}
    return {way: value for way, value in found.items() if value is not None}
