"""An answer on its way from the engine's thread to the client's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence

import jax

from jaxspec.decoding.scores import Scores
from jaxspec.serving.request import Piece, Request, TokenScore
from jaxspec.serving.slots import RequestState
from jaxspec.serving.text import TextStream


@dataclasses.dataclass
class Times:
    """Times at which an answer reached each stage, by `time.monotonic`; 0 for stages to come.

    Attributes:
      asked: it entered the queue.
      read: reading of its prompt began.
      decoded: its prompt was read, and it got a slot.
    """

    asked: float = dataclasses.field(default_factory=time.monotonic)
    read: float = 0.0
    decoded: float = 0.0


class AnswerStream(AsyncIterator[Piece]):
    """The pieces of one answer, as they come; the last one gives the reason for the end.

    Attributes:
      request: the request that it answers.
      prompt_scores: scores of the prompt's tokens from the second on, where asked for; there with the first piece.
      times: times of its stages.
      cancelled: whether the client wants no more of it.
    """

    def __init__(self, request: Request, decode: Callable[[list[int]], str], seconds: float):
        self.request = request
        self.prompt_scores: list[TokenScore] = []
        self.times = Times()
        self.cancelled = False
        self._deadline = self.times.asked + seconds if seconds else float("inf")
        self._text = TextStream(decode, request.stop)
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
    def late(self) -> bool:
        """Whether its time limit is over."""
        return time.monotonic() > self._deadline

    def put(self, piece: Piece | Exception) -> None:
        """Hand over a piece, or the error that ended the answer."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the client's event loop has ended
            self.cancelled = True

    def extend(self, progress: RequestState, eos: Sequence[int]) -> Piece:
        """The piece that has been added since the last one."""
        stream, tokens = self._text, progress.tokens
        known = len(stream.tokens)
        text = stream.add(tokens[known:], progress.done)
        new, finish, scores = slice(known, len(stream.tokens)), None, []
        if stream.stopped is not None:
            finish = "stop"
        elif progress.done:
            finish = "stop" if tokens and tokens[-1] in eos else "length"
        if self.request.logprobs:
            scores = token_scores(jax.tree.map(lambda x: x[new], progress.scores))
        return Piece(
            text=text,
            tokens=stream.tokens[new],
            drafted_by=progress.drafted_by[new],
            scores=scores,
            steps=progress.steps,
            drafts=progress.drafts,
            drafted=progress.drafted,
            finish=finish,
            stop=stream.stopped,
        )


def token_scores(scores: Scores) -> list[TokenScore]:
    """Scores of host arrays [X] and [X, K], position by position."""
    each = zip(scores.chosen.tolist(), scores.tokens.tolist(), scores.best.tolist(), strict=True)
    return [TokenScore(chosen, list(zip(tokens, best, strict=True))) for chosen, tokens, best in each]
