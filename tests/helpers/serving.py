"""Asking an engine as its clients do."""

import asyncio
import dataclasses
from typing import Any

from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.engine import Limits
from jaxspec.serving.request import TokenScore

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


def letters(rng, count):
    """A random text."""
    return "".join(chr(97 + i) for i in rng.integers(0, 26, count))
