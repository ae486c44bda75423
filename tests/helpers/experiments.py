"""Benchmarks and results of the lab by hand."""

import json
from typing import Any

from experiments.lab.jobs import all_jobs
from experiments.lab.lab import Lab, identity_of
from jaxspec.bench.config import REFERENCE
from jaxspec.bench.metrics import figures
from jaxspec.bench.results import ALL, Results
from jaxspec.drafters import METHODS


def answer(number: int, seconds: float, lengths: list[int], category: str) -> dict[str, Any]:
    """An answer of one turn, whose steps made so many tokens each, and prefill one."""
    made = {"new_tokens": [sum(lengths) + 1], "decoding_steps": [len(lengths)], "accept_lengths": lengths}
    times = {"decode_seconds": [seconds], "wall_time": [seconds + 1]}
    drafts = {"offered": [[0]], "accepted": [[0]], "divergence": [None]}
    question = {"data": "f", "question_id": number, "category": category, "batch": [["f", number]]}
    return question | {"choices": [made | times | drafts]}


def benchmark(ways: dict[str, tuple], category: str = "qa", accuracies: dict | None = None, **settings: Any) -> Results:
    """A benchmark of {way: (seconds of every question, lengths of its steps)}."""
    rows = {
        way: [[answer(number, each, lengths, category) for number, each in enumerate(seconds)]]
        for way, (seconds, lengths) in ways.items()
    }
    found = {way: {ALL: figures(rows[way], rows[REFERENCE])} for way in ways}
    named = {way: {"accuracy": (accuracies or {}).get(way, [])} for way in ways}
    named |= {way: named[way] | {"adapter": "a digest"} for way in ways if way in METHODS and way != REFERENCE}
    setting = {"fingerprint": "a base", "dtype": "float32", "device": "a machine", "code": "this", "began": "today"}
    setting |= {"questions": len(rows[REFERENCE][0]), "ways": named}
    setting |= {"settings": {"limit": 0, "runs": [], "repeats": 1} | settings}
    return Results(setting, rows, found, {}, {}, {})


def put(lab: Lab, name: str, result: dict[str, Any]) -> None:
    """Store the result of one of the lab's jobs."""
    [job] = [job for job in all_jobs() if job.name == name]
    file = lab.file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"job": identity_of(job), "result": result, "seconds": 1, "device": "this"}))
