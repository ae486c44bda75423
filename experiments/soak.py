"""A running server under thousands of mixed requests: python -m experiments.soak --url http://127.0.0.1:8000.

Requests of all kinds, some of which hang up midway and some of which are refused, so many at a time. What memory the
server's process has, as it says itself at /metrics, is compared at the end with what it was after the first thousand.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from experiments.load import check_local
from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError, check_at_least

_WORDS = "why how does the sky rain tell me a story about cats and old ships in ten lines please list three"
_SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers shortly. " * 6}
_MARK = 1000  # requests between two looks at memory
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


@dataclasses.dataclass(frozen=True)
class Options:
    """Send mixed requests to a server of this machine.

    Attributes:
      url: of the server.
      requests: how many; what memory grows by counts from the first thousand on.
      concurrency: requests under way at once.
      tokens: of a prompt and of an answer at most, about.
      seed: of what is asked.
    """

    url: str = "http://127.0.0.1:8000"
    requests: int = 10_000
    concurrency: int = 12
    tokens: int = 96
    seed: int = 0


def draw(rng: np.random.Generator, tokens: int) -> tuple[str, dict[str, Any], bool]:
    """Path and body of a random request, and whether its client hangs up after the first event."""
    words = _WORDS.split()
    text = " ".join(rng.choice(words, rng.integers(1, tokens)))
    body = {
        "max_tokens": int(rng.integers(1, tokens)),
        "temperature": float(rng.choice([0.0, 0.7, 1.2])),
        "top_p": float(rng.choice([1.0, 0.9])),
        "seed": int(rng.integers(2**31)),
        "n": int(rng.choice([1, 1, 1, 3])),
        "stop": list(rng.choice([*words, "\n", "."], rng.integers(0, 3))),
        "drafting": bool(rng.random() < 0.7),
        "stream": bool(rng.random() < 0.7),
        "sources": bool(rng.random() < 0.2),
    }
    scored, hangs_up = rng.random() < 0.2, body["stream"] and rng.random() < 0.15
    if rng.random() < 0.1:
        body |= [{"temperature": "hot"}, {"max_tokens": -1}, {"model": "another"}, {"no_such_field": 1}][
            rng.integers(4)
        ]
    if rng.random() < 0.3:
        return _TEXT, body | {"prompt": text, "echo": scored} | ({"logprobs": 2} if scored else {}), hangs_up
    messages = [*([_SYSTEM] if rng.random() < 0.5 else []), {"role": "user", "content": text}]
    return _CHAT, body | {"messages": messages, "logprobs": scored}, hangs_up


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], hangs_up: bool) -> str:
    """Send a request, and say what came of it in a word."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return f"refused with {response.status_code}" if response.status_code < 500 else "failed"
        if not body["stream"]:
            return "finished" if json.loads(await response.aread())["choices"] else "failed"
        last = ""
        async for line in response.aiter_lines():
            if hangs_up:
                return "hung up"
            if line.startswith('data: {"error"'):
                return "failed"
            last = line or last
        return "finished" if last == "data: [DONE]" else "failed"


async def memory(client: httpx.AsyncClient) -> float:
    """MB that the server's process has."""
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        if family.name == "process_resident_memory_bytes":
            return family.samples[0].value / 1e6
    raise UserError("the server does not say how much memory it has; that is known on Linux alone")


async def run(options: Options) -> tuple[collections.Counter[str], list[float]]:
    """What came of the requests, and the server's memory before them, after every thousand, and at the end."""
    rng, came_of = np.random.default_rng(options.seed), collections.Counter()
    numbers, taken = iter(range(1, options.requests + 1)), []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:

        async def keep_asking() -> None:
            for number in numbers:  # one iterator for all who ask
                try:
                    came_of[await ask(client, *draw(rng, options.tokens))] += 1
                except httpx.HTTPError as error:
                    came_of[f"failed: {type(error).__name__}"] += 1
                if number % _MARK == 0:
                    taken.append(await memory(client))
                    print(f"after {number} requests: {taken[-1]:.0f} MB", flush=True)

        before = await memory(client)
        print(f"before: {before:.0f} MB", flush=True)
        await asyncio.gather(*(keep_asking() for _ in range(options.concurrency)))
        return came_of, [before, *taken, await memory(client)]


def main(args: list[str]) -> None:
    """Ask, and print."""
    options = parse(Options, args)
    check_at_least(options, {"requests": _MARK, "concurrency": 1, "tokens": 2})
    check_local(options.url)
    try:
        came_of, taken = asyncio.run(run(options))
    except httpx.ConnectError:
        raise UserError(f"no server answers at {options.url}; start one with `jaxspec serve`") from None
    print(", ".join(f"{count} {what}" for what, count in sorted(came_of.items())))
    first, last = taken[1], taken[-1]
    print(f"memory: {taken[0]:.0f} MB before, {first:.0f} MB after {_MARK} requests, {last:.0f} MB at the end", end="")
    print(f" ({last / first - 1:+.1%})")


if __name__ == "__main__":
    run_main(main)
