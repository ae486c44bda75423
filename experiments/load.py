"""A running server under load, with and without drafts in turn: python -m experiments.load --url http://127.0.0.1:8000.

Every run asks the same prompts, so many at a time, and waits for the last; load.json has the figures of each. A request
with drafts and the same one without, in the same round, are a pair; the speedup is that of prompts, each over all its
pairs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.bench.metrics import Estimate, estimate
from jaxspec.bench.report import interval
from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError, check_at_least, first_line
from jaxspec.files import writable, write_json
from jaxspec.markdown import table
from jaxspec.training.examples import read_prompts

_HERE = ("127.0.0.1", "localhost", "::1")
_DRAFTS = "vllm:spec_decode_num_drafts"


@dataclasses.dataclass(frozen=True)
class Options:
    """Put load on a server of this machine.

    Attributes:
      prompts: a JSONL file with a prompt per line.
      column: field of that file that holds the prompt.
      url: of the server.
      concurrency: requests under way at once, one round of runs for each.
      requests: per run.
      tokens: of an answer at most.
      temperature: of sampling; 0 is greedy.
      rounds: runs of each kind; the median counts.
      output: folder for load.json.
    """

    prompts: str
    column: str = "prompt"
    url: str = "http://127.0.0.1:8000"
    concurrency: tuple[int, ...] = (1, 4, 8, 16, 32)
    requests: int = 32
    tokens: int = 64
    temperature: float = 0.0
    rounds: int = 3
    output: Path = Path("runs/load")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One request: seconds to its first token and to its end, its tokens and steps."""

    first: float
    whole: float
    tokens: int
    steps: int


def check_local(url: str) -> None:
    """Raise UserError for a server that is not on this machine."""
    if urlsplit(url).hostname not in _HERE:
        raise UserError(f"url must be one of this machine, got {url}")


async def ask(client: httpx.AsyncClient, options: Options, prompt: str, drafting: bool) -> Timing:
    """Ask for one answer, streamed."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.tokens,
        "temperature": options.temperature,
        "seed": 0,
        "drafting": drafting,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.perf_counter(), 0.0, {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise UserError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.perf_counter() - began
    whole = time.perf_counter() - began
    return Timing(first or whole, whole, usage["completion_tokens"], usage["decoding_steps"])


async def drafts_so_far(client: httpx.AsyncClient) -> float:
    """Steps that had a candidate, of all requests that the server has had. Raises UserError where it does not tell."""
    page = f"{str(client.base_url).rstrip('/')}/metrics"
    try:
        response = await client.get("/metrics")
        families = list(text_string_to_metric_families(response.text)) if response.status_code == 200 else []
    except (httpx.TransportError, ValueError) as error:
        raise UserError(f"{page} cannot be read: {first_line(error)}") from None
    counts = [family.samples[0].value for family in families if family.name == _DRAFTS and family.samples]
    if not counts:
        told = f"answered {response.status_code} without {_DRAFTS}"
        raise UserError(f"{page} {told}; url must be that of `jaxspec serve`")
    return counts[0]


async def run(options: Options, prompts: Sequence[str], concurrency: int, drafting: bool) -> dict[str, Any]:
    """All requests, so many at a time; the figures."""
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=options.url, timeout=600) as client:

        async def one(number: int) -> Timing:
            async with gate:
                return await ask(client, options, prompts[number % len(prompts)], drafting)

        drafts_before = await drafts_so_far(client)
        began = time.perf_counter()
        timings = await asyncio.gather(*map(one, range(options.requests)))
        seconds = time.perf_counter() - began
        drafts = await drafts_so_far(client) - drafts_before
    first = [timing.first for timing in timings]
    each = [(timing.whole - timing.first) / max(timing.tokens - 1, 1) for timing in timings]
    steps = max(sum(timing.steps for timing in timings), 1)
    return {
        "tokens_per_second": sum(timing.tokens for timing in timings) / seconds,
        "tokens_per_step": sum(timing.tokens - 1 for timing in timings) / steps,
        "drafted_steps": drafts / steps,
        "first_median": statistics.median(first),
        "first_95": float(np.quantile(first, 0.95)),
        "token_median": statistics.median(each),
        "token_95": float(np.quantile(each, 0.95)),
        "seconds": [timing.whole for timing in timings],
        "prompts": len(prompts),
    }


def main(args: list[str]) -> None:
    """Measure, print, write."""
    options = parse(Options, args)
    check_at_least(options, {"concurrency": 1, "requests": 1, "tokens": 1, "rounds": 1})
    check_local(options.url)
    prompts = read_prompts(options.prompts, options.column)
    results: list[dict[str, Any]] = []
    folder = writable(options.output)
    for drafting in (True, False):  # to warm up: prompts come for the first time, rows are added
        asyncio.run(run(options, prompts, max(options.concurrency), drafting))
    for concurrency in options.concurrency:
        for number in range(options.rounds):
            for drafting in (False, True) if number % 2 else (True, False):
                figures = asyncio.run(run(options, prompts, concurrency, drafting))
                results.append({"concurrency": concurrency, "round": number, "drafting": drafting} | figures)
                write_json(folder / "load.json", results)
    print(report(results))


def report(results: Sequence[dict[str, Any]]) -> str:
    """A line per concurrency and kind: medians over the rounds, and the speedup of pairs with its 95% interval."""
    rows = []
    for concurrency, drafting in sorted({(row["concurrency"], row["drafting"]) for row in results}):
        own = [row for row in results if (row["concurrency"], row["drafting"]) == (concurrency, drafting)]
        median = {name: statistics.median(row[name] for row in own) for name in own[0] if name != "seconds"}
        rows.append(
            [
                str(concurrency),
                "yes" if drafting else "no",
                f"{median['tokens_per_second']:.1f}",
                interval(speedup(results, concurrency)) if drafting else "",
                f"{median['tokens_per_step']:.2f}",
                f"{median['drafted_steps']:.0%}",
                f"{median['first_median']:.2f}, {median['first_95']:.2f}",
                f"{1e3 * median['token_median']:.0f}, {1e3 * median['token_95']:.0f}",
            ]
        )
    head = ["at once", "drafts", "tokens/s", "speedup of a request", "per step", "steps with a draft"]
    head += ["first token, s (median, 95%)", "per token, ms (median, 95%)"]
    return "\n".join(table(head, rows))


def speedup(results: Sequence[dict[str, Any]], concurrency: int) -> Estimate:
    """The median over prompts of a request's time without drafts over its time with them.

    Of each prompt it is the geometric mean over rounds, and over how often a run has asked it: repeats of a prompt are
    alike, and as values of their own they would make the interval too narrow.
    """
    own = [row for row in results if row["concurrency"] == concurrency]
    seconds = {(row["round"], row["drafting"]): np.log(row["seconds"]) for row in own}
    rounds = [number for number, drafting in seconds if drafting and (number, False) in seconds]
    logs = np.mean([seconds[number, False] - seconds[number, True] for number in rounds], axis=0)  # [requests]
    asked = np.arange(len(logs)) % own[0]["prompts"]
    return estimate(np.exp(np.bincount(asked, logs) / np.bincount(asked)), np.median)


if __name__ == "__main__":
    run_main(main)
