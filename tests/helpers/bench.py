"""A small benchmark's settings, and what it holds."""

import json

from jaxspec.bench.answers import Answers
from jaxspec.bench.config import BenchConfig


def config_of(files, **changes):
    adapters = f"ppd={files}/ppd,medusa={files}/medusa"
    defaults = {"methods": "ppd=chain:2,medusa", "data": f"{files}/questions.jsonl", "adapters": adapters}
    return BenchConfig(**(defaults | {"max_new_tokens": 8} | changes))


def texts_of(folder, way, run=1):
    """What a method said to every question, turn by turn."""
    rows = [json.loads(line) for line in Answers(folder, [way]).file(way, run).open()]
    return {row["question_id"]: row["choices"][0]["turns"] for row in rows}
