"""How far two runs of one benchmark agree, on the questions that both have asked."""

from __future__ import annotations

from typing import Any

from jaxspec.bench.config import REFERENCE
from jaxspec.bench.metrics import Figures, figures
from jaxspec.bench.report import command, interval
from jaxspec.bench.results import Results, reference_of
from jaxspec.markdown import table

_Batch = tuple[tuple, ...]
_MAY_DIFFER = ("data", "limit", "runs", "peers", "assistant")  # settings of benchmarks that are compared


def conditions(results: Results) -> dict[str, Any]:
    """What benchmarks have in common whose figures may be compared."""
    settings = {name: value for name, value in results.setting["settings"].items() if name not in _MAY_DIFFER}
    return settings | {name: results.setting[name] for name in ("fingerprint", "dtype", "device")}


def asked_again(first: Results, second: Results) -> bool:
    """Whether the second benchmark measures nothing that the first has not, be it fewer methods or fewer questions."""
    ways = second.setting["ways"].items() <= first.setting["ways"].items()
    return ways and conditions(first) == conditions(second) and _batches(second) <= _batches(first)


def agreement(first: Results, second: Results) -> list[str]:
    """Lines that show both runs' figures side by side, for what the second has asked again."""
    setting, batches = second.setting, _batches(second)
    before, after = (_figures(results, batches) for results in (first, second))
    inside, rows = [], []
    for way, again in after.items():
        once, within = before[way], ""
        if once.speedup.low is not None:
            inside.append(once.speedup.low <= again.speedup.value <= once.speedup.high)
            within = "yes" if inside[-1] else "no"
        steps = [f"{side.tokens_per_step:.3f}" for side in (once, again)]
        rows.append([way, *steps, interval(once.speedup), interval(again.speedup), within])
    answers, planned = sum(map(len, second.rows[REFERENCE])), setting["questions"] * setting["settings"]["repeats"]
    said = (
        f"The first benchmark once more, {setting['began']}: what both runs measure on {sum(map(len, batches))} "
        f"questions. {sum(inside)} of {len(inside)} speedups lie in the first run's interval."
    )
    said += "" if answers == planned else f" **Unfinished: {answers} of {planned} answers of the second are there.**"
    said += "" if first.setting["code"] == setting["code"] else " The decoding code has changed between the two."
    heads = ["method", "tokens per step", "again", "speedup, median", "again", "within the interval"]
    return [f"`{command(setting)}`", "", said, "", *table(heads, rows)]


def _batch(answer: dict[str, Any]) -> _Batch:
    """The questions that were answered together with one, as data and id."""
    return tuple(map(tuple, answer["batch"]))


def _batches(results: Results) -> set[_Batch]:
    return {_batch(answer) for run in results.rows[REFERENCE] for answer in run}


def _figures(results: Results, batches: set[_Batch]) -> dict[str, Figures]:
    """Of every way that is compared with another, on some of the questions."""
    kept = {way: [[r for r in run if _batch(r) in batches] for run in runs] for way, runs in results.rows.items()}
    references = {way: reference_of(results.setting, way) for way in kept}
    found = {way: figures(kept[way], kept[other]) for way, other in references.items() if way != other}
    return {way: value for way, value in found.items() if value is not None}
