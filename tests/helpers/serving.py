"""Asking an engine, an application or a server as their clients do."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from typing import Any

import httpx
import uvicorn

from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.engine import Limits
from jaxspec.serving.request import TokenScore

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]

# Four slots, chunks of prompts that most prompts need two of: every engine of these shapes takes the same programs.
LIMITS = Limits(slots=4, queue=32, max_length=120, prompt_chunk=16)


@dataclasses.dataclass
class Found:
    """A whole answer."""

    answer: AnswerStream
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    drafted_by: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    finish: str | None = None
    stop: str | None = None


async def answer(engine, prompt, cancel_after: int | None = None, **settings: Any) -> Found:
    """Asks and waits for the end; cancels after some pieces."""
    found = Found(engine.submit(prompt, chat=False, **settings))
    if cancel_after == 0:
        found.answer.cancel()
    count = 0
    async for piece in found.answer:
        count += 1
        found.text += piece.text
        found.tokens += piece.tokens
        found.drafted_by += piece.drafted_by
        found.scores += piece.scores
        found.finish, found.stop = piece.finish, piece.stop
        if count == cancel_after:
            found.answer.cancel()
    return found


async def idle(engine):
    """Waits until every slot is free: none may be leaked. A program may still have to be compiled."""
    for _ in range(6000):
        if not engine.running and not engine.waiting:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{engine.running} requests are still running, {engine.waiting} waiting")


@contextlib.contextmanager
def served(app):
    """The port of a server in a thread of this process."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def call(app, *requests):
    """Responses of an application to (method, path, settings of httpx), all at once."""

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            each = (client.request(method, path, **settings) for method, path, settings in requests)
            return await asyncio.gather(*each)

    return asyncio.run(run())


def post(app, path, body, **settings):
    """The response of an application to a JSON body."""
    [response] = call(app, ("POST", path, {"json": body} | settings))
    return response


def letters(rng, count):
    """A random text."""
    return "".join(chr(97 + i) for i in rng.integers(0, 26, count))


def get(app, path, **settings):
    """What a path answers to GET."""
    [response] = call(app, ("GET", path, settings))
    return response


def events(response):
    """The objects of a stream, which must end as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]
