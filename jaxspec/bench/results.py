"""The figures of a benchmark, read from its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.answers import Answers
from jaxspec.bench.config import REFERENCE
from jaxspec.bench.metrics import FEWEST, Figures, figures
from jaxspec.bench.quality import SCORED
from jaxspec.bench.questions import MT_BENCH, group_of
from jaxspec.bench.setting import read_setting
from jaxspec.errors import UserError
from jaxspec.files import read_json, read_whole_lines

Rows = list[list[dict[str, Any]]]  # rows of answer files, run by run
ALL = "all"
_BESIDE = {"memory.json": ("peak_bytes", "method_bytes"), "overhead.json": ("code", "ways")}


@dataclasses.dataclass(frozen=True)
class Results:
    """The content of a benchmark's folder.

    Attributes:
      setting: content of bench.json.
      rows: answers of every way, run by run, for questions that all ways have answered.
      figures: {way: {group: figures}}; the group `all` first, MT-Bench's categories last, where they are large enough.
      scores: {way: {kind and name: mean over questions}} of the answers that could be scored, and their perplexity.
      memory: content of memory.json; empty for a benchmark that was interrupted.
      overhead: content of overhead.json, the timed parts of every method's step; empty likewise.
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
    answers = Answers(folder, list(setting["ways"]))
    runs = [answers.read(run) for run in range(1, setting["settings"]["repeats"] + 1)]
    rows = {way: [run[way] for run in runs] for way in setting["ways"]}
    found = {way: _by_group(rows[way], rows[reference_of(setting, way)]) for way in rows}
    found = {way: groups for way, groups in found.items() if ALL in groups}
    if REFERENCE not in found:
        raise UserError(f"{folder}: no question has an answer of more than one token yet")
    memory, overhead = (
        read_json(folder / name, fields) if (folder / name).exists() else {} for name, fields in _BESIDE.items()
    )
    return Results(setting, rows, found, _read_scores(folder, list(rows)), memory, overhead)


def reference_of(setting: dict[str, Any], way: str) -> str:
    """The reference of a way: autoregressive decoding of the same base."""
    return setting["ways"][way].get("reference", REFERENCE)


def compared(results: Results) -> list[str]:
    """The ways that have a reference."""
    return [way for way in results.figures if way != reference_of(results.setting, way)]


def summary_of(results: Results) -> dict[str, Any]:
    """All figures as plain values for JSON."""
    ways = {way: {g: dataclasses.asdict(f) for g, f in groups.items()} for way, groups in results.figures.items()}
    measured = {"memory": results.memory, "overhead": results.overhead, "quality": results.scores}
    return {"setting": results.setting} | measured | {"ways": ways}


def _by_group(runs: Rows, plain: Rows) -> dict[str, Figures]:
    """Figures of all questions, of every group that has an answer of more than one token, and of MT-Bench's categories.

    Only categories of MT-Bench with enough questions for an interval have some.
    """
    categories = {answer["category"] for run in plain for answer in run}
    groups = [ALL, *sorted({*map(group_of, categories)}), *MT_BENCH]
    found = {group: figures(_only(runs, group), _only(plain, group)) for group in groups}
    return {
        name: value for name, value in found.items() if value and (name not in MT_BENCH or value.questions >= FEWEST)
    }


def _only(runs: Rows, group: str) -> Rows:
    return [[a for a in run if group in (ALL, a["category"], group_of(a["category"]))] for run in runs]


def _read_scores(folder: Path, ways: list[str]) -> dict[str, dict[str, float]]:
    """Each way's scores, as means over questions, and the perplexity of its answers."""
    values: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for line in read_whole_lines(folder / "scores.jsonl", SCORED):
        for name, value in line["scores"].items():
            values[line["way"]].setdefault(f"{line['kind']} {name}", []).append(value)
    scores = {way: {name: float(np.mean(found)) for name, found in named.items()} for way, named in values.items()}
    if (folder / "perplexity.json").exists():
        for way, value in read_json(folder / "perplexity.json").items():
            scores[way]["perplexity under the base"] = value
    return scores
