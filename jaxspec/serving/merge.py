"""The pieces of several answers as one stream, while the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import ClientDisconnect, Request

from jaxspec.serving.fields import ApiError
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.replies import Choice
from jaxspec.serving.request import Piece


async def merged(
    choices: Sequence[Choice], metrics: Metrics, seconds: float, request: Request | None = None
) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all choices as they come, with the numbers of their choices, and counted.

    All choices are cancelled when it ends early.

    Args:
      choices: the answers; each gets its pieces joined.
      metrics: what counts them.
      seconds: the time limit of a request, for errors.
      request: the request whose client has to stay connected; None: anybody.

    Raises:
      ApiError: an answer failed or took too long.
      ClientDisconnect: the client is gone.
    """
    pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def pump(index: int, choice: Choice) -> None:
        try:
            async for piece in metrics.watch(choice.answer):
                pieces.put_nowait((index, piece))
        except Exception as error:
            pieces.put_nowait((index, error))

    async def watch_client() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        pieces.put_nowait((0, ClientDisconnect()))

    tasks = [asyncio.ensure_future(pump(*item)) for item in enumerate(choices)]
    if request is not None:
        tasks.append(asyncio.ensure_future(watch_client()))
    try:
        unfinished = len(choices)
        while unfinished:
            index, piece = await pieces.get()
            if isinstance(piece, ClientDisconnect):
                raise piece
            if isinstance(piece, Exception):
                raise ApiError(500, f"the request failed in the engine: {type(piece).__name__}") from piece
            if piece.finish == "timeout":
                raise ApiError(504, f"the answer took longer than {seconds:g} s", code="timeout")
            choices[index].whole = choices[index].whole.followed_by(piece)
            yield index, piece
            unfinished -= piece.finish is not None
    finally:
        for choice in choices:
            choice.answer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
