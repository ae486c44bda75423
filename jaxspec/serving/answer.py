"""An answer on its way from the engine's thread to the client's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import jax

from jaxspec.decoding.scores import Scores
from jaxspec.errors import UserError
from jaxspec.generation.job import NOT_FINITE
from jaxspec.generation.text import TextStream
from jaxspec.serving.request import Finish, Piece, Request, TokenScore


class AnswerStream(AsyncIterator[Piece]):
    """The pieces of one answer, as they come; the last one gives the reason for the end.

    Times are those of `time.monotonic`.

    Attributes:
      request: the request that it answers.
      prompt_scores: log-probabilities of the prompt's tokens from the second on, if the request asks for them; set
        before the first piece.
      cached: number of the prompt's tokens that were not read again; set before the first piece.
      asked_at: time at which the request entered the queue.
      read_at: time at which reading of the prompt began; None before.
      decoded_at: time at which the prompt was read and the first token known; None before.
      cancelled: whether the client has cancelled it.
    """

    def __init__(self, request: Request, decode: Callable[[list[int], bool], str], seconds: float):
        self.request = request
        self.prompt_scores: list[TokenScore] = []
        self.cached = 0
        self.asked_at = time.monotonic()
        self.read_at: float | None = None
        self.decoded_at: float | None = None
        self.cancelled = False
        self._deadline = self.asked_at + seconds if seconds else float("inf")
        self._text = TextStream(lambda ids: decode(ids, request.continues), request.stop, request.min_new_tokens)
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue()
        self._ended = False

    def cancel(self) -> None:
        """Cancel the answer; its slot is free after the steps under way."""
        self.cancelled = True

    async def __anext__(self) -> Piece:
        """The next piece. Raises the error that ended the answer in the engine."""
        if self._ended:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            self._ended = True
            raise piece
        self._ended = piece.finish is not None
        return piece

    # For the engine's thread

    @property
    def interruption(self) -> Finish | None:
        """The reason to end it before its text does, if there is one."""
        return "cancelled" if self.cancelled else "timeout" if time.monotonic() > self._deadline else None

    def put(self, piece: Piece | Exception) -> None:
        """Hand over a piece, or the error that ended the answer."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the client's event loop has ended
            self.cancelled = True

    def extend(self, so_far: Piece, scores: Scores | None) -> Piece:
        """The piece that extends the answer to the tokens `so_far`, with their scores, or to its first stop text.

        Raises UserError where the base's logits were not finite.
        """
        if not so_far.finite:
            raise UserError(NOT_FINITE)
        stream, before = self._text, len(self._text.tokens)
        text = stream.add(so_far.tokens[before:], so_far.finish is not None)
        new = slice(before, len(stream.tokens))
        return dataclasses.replace(
            so_far,
            text=text,
            tokens=stream.tokens[new],
            drafted_by=so_far.drafted_by[new],
            scores=token_scores(jax.tree.map(lambda x: x[new], scores)) if self.request.logprobs else [],
            finish=so_far.finish if stream.stopped is None else "stop",
            stop=stream.stopped,
        )


def token_scores(scores: Scores) -> list[TokenScore]:
    """Scores of host arrays [X] and [X, K], position by position."""
    each = zip(scores.chosen.tolist(), scores.tokens.tolist(), scores.best.tolist(), strict=True)
    return [TokenScore(chosen, list(zip(tokens, best, strict=True))) for chosen, tokens, best in each]
