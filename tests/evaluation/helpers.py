"""A small benchmark's settings."""

from jaxspec.evaluation.bench_config import BenchConfig


def config_of(files, **changes):
    adapters = f"ppd={files}/ppd,medusa={files}/medusa"
    defaults = {"methods": "ppd=chain:2,medusa", "data": f"{files}/questions.jsonl", "adapters": adapters}
    return BenchConfig(**(defaults | {"max_new_tokens": 8} | changes))
