"""Responses: the objects of the OpenAI interface, complete or in chunks."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxspec.drafters.drafter import Drafter
from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.protocol import Asked
from jaxspec.serving.request import Piece, TokenScore
from jaxspec.serving.text import TextStream

_LEAST = -9999.0  # JSON has no infinity


@dataclasses.dataclass
class Choice:
    """One answer so far.

    Attributes:
      answer: the stream of its pieces.
      prompt: the prompt's text, where it is echoed.
      text: text of the answer.
      tokens: tokens of the answer.
      drafted_by: per token, as in `Piece`.
      scores: per token, where log-probabilities were asked for.
      piece: the last piece.
      offset: character offset of the next token's text, for log-probabilities.
    """

    answer: AnswerStream
    prompt: str = ""
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    drafted_by: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    piece: Piece = Piece()
    offset: int = 0

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.drafted_by += piece.drafted_by
        self.scores += piece.scores
        self.piece = piece


class Replies:
    """Maker of the objects that answer one request.

    Args:
      asked: the request.
      drafter: the engine's drafter.
      model: the model's name for clients.
    """

    def __init__(self, asked: Asked, drafter: Drafter, model: str):
        self._asked, self._drafter, self._model = asked, drafter, model
        self._tokenizer = drafter.model.tokenizer
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._streams: dict[int, TextStream] = {}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The complete answer."""
        made = [self._choice(i, choice) for i, choice in enumerate(choices)]
        kind = "chat.completion" if self._asked.chat else "text_completion"
        return self._object(kind, made) | {"usage": self.usage(choices)}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = choice.prompt + choice.text
        if self._asked.chat:
            content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            content = {"text": text}
        made = {"index": index} | content | self._end(choice.piece)
        made["logprobs"] = self._logprobs(choice, choice.tokens, choice.scores, first=True)
        return made | self._sources(index, choice, choice.tokens, choice.drafted_by)

    def opening(self, index: int, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first token, where there is one."""
        if self._asked.chat:
            return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})
        return None

    def chunk(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The chunk for a piece."""
        first = len(choice.tokens) == len(piece.tokens)
        text = (choice.prompt if first else "") + piece.text
        content: dict[str, Any] = {"delta": {"content": text}} if self._asked.chat else {"text": text}
        made = {"index": index} | content | self._end(piece)
        made["logprobs"] = self._logprobs(choice, piece.tokens, piece.scores, first)
        return self._chunk(made | self._sources(index, choice, piece.tokens, piece.drafted_by))

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk, with the numbers of tokens used."""
        return self._object(self._kind_of_chunk, []) | {"usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Numbers of tokens, counting each prompt once."""
        prompt = sum(len(choice.answer.request.ids) for choice in choices[:: self._asked.n])
        completion = sum(len(choice.tokens) for choice in choices)
        accepted = sum(sources > 0 for choice in choices for sources in choice.drafted_by)
        drafted = sum(choice.piece.drafted for choice in choices)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": details,
            "decoding_steps": sum(choice.piece.steps for choice in choices),
            "drafted_tokens": drafted,
        }

    @property
    def _kind_of_chunk(self) -> str:
        return "chat.completion.chunk" if self._asked.chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._object(self._kind_of_chunk, [{"finish_reason": None, "logprobs": None} | choice])

    def _end(self, piece: Piece) -> dict[str, Any]:
        return {"finish_reason": piece.finish} | ({"stop_reason": piece.stop} if piece.finish else {})

    def _logprobs(self, choice: Choice, tokens: list[int], scores: list[TokenScore], first: bool) -> Any:
        """Log-probabilities of some tokens, after the prompt's where it is echoed."""
        if self._asked.logprobs is None:
            return None
        if self._asked.chat:
            each = zip(tokens, scores, strict=True)
            return {"content": [self._scored(token, score) for token, score in each], "refusal": None}
        whole: list[TokenScore | None] = list(scores)
        if first and choice.prompt:
            ids = choice.answer.request.ids
            tokens, whole = ids + tokens, [None, *choice.answer.prompt_scores, *scores]
        return self._listed(choice, tokens, whole)

    def _scored(self, token: int, score: TokenScore) -> dict[str, Any]:
        best = [self._token(one, logprob) for one, logprob in score.best[: self._asked.logprobs]]
        return self._token(token, score.logprob) | {"top_logprobs": best}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode(errors="replace"))}

    def _listed(self, choice: Choice, tokens: list[int], scores: list[TokenScore | None]) -> dict[str, Any]:
        """Log-probabilities in the form of completions: lists, with the best tokens and the token itself for each."""
        texts, offsets, best = [self._text(token) for token in tokens], [], []
        for text, token, score in zip(texts, tokens, scores, strict=True):
            offsets.append(choice.offset)
            choice.offset += len(text)
            kept = score and [*score.best[: self._asked.logprobs], (token, score.logprob)]
            best.append(kept and {self._text(one): max(logprob, _LEAST) for one, logprob in kept})
        own = [score and max(score.logprob, _LEAST) for score in scores]
        return {"tokens": texts, "token_logprobs": own, "top_logprobs": best, "text_offset": offsets}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _sources(self, index: int, choice: Choice, tokens: list[int], drafted_by: list[int]) -> dict[str, Any]:
        """The source of each part of the text: the base, a trained method, or a lookup."""
        if not self._asked.sources:
            return {}
        sources = [source for source in self._drafter.sources if source.facts.distances]
        if index not in self._streams:
            self._streams[index] = TextStream(self._drafter.model.decode, self._asked.stop)
        stream, parts = self._streams[index], []
        for number, (token, by) in enumerate(zip(tokens, drafted_by, strict=True), 1):
            text = stream.add([token], choice.piece.finish is not None and number == len(tokens))
            offered = [source for bit, source in enumerate(sources) if by >> bit & 1]
            learnt = any(source.facts.trained for source in offered)
            kind = "learnt" if learnt else "lookup" if offered else "base"
            parts.append({"text": text, "kind": kind, "methods": [source.method.name for source in offered]})
        return {"parts": parts}
