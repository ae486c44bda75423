"""Responses: the objects of the OpenAI interface, complete or in chunks."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxspec.decoding.draft import PREDICTED
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.text import TextStream
from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.protocol import Asked
from jaxspec.serving.request import Piece, TokenScore

_LEAST = -9999.0  # JSON has no infinity


@dataclasses.dataclass
class Choice:
    """One answer so far.

    Attributes:
      answer: the stream of its pieces.
      prompt: the prompt's text, where it is echoed.
      whole: all its pieces, joined.
      offset: character offset of the next token's text, for log-probabilities.
      parts: text of the tokens whose sources were returned.
    """

    answer: AnswerStream
    prompt: str = ""
    whole: Piece = Piece()
    offset: int = 0
    parts: TextStream | None = None


class Replies:
    """Maker of the objects that answer one request.

    Args:
      asked: the request.
      drafter: the engine's drafter.
      model: the model's name for clients.
    """

    def __init__(self, asked: Asked, drafter: Drafter, model: str):
        self._asked, self._drafter, self._model = asked, drafter, model
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The complete answer."""
        message = {"role": "assistant", "refusal": None}
        made = [self._choice(i, choice, choice.whole, "message", message) for i, choice in enumerate(choices)]
        return self._object(made, "chat.completion") | {"usage": self.usage(choices)}

    def openings(self, count: int) -> list[dict[str, Any]]:
        """The chunks that open `count` chat answers; completions have none."""
        start = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        return [self._object([{"index": i} | start]) for i in range(count if self._asked.chat else 0)]

    def chunk(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The chunk for a piece."""
        return self._object([self._choice(index, choice, piece, "delta", {})])

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk, with the numbers of tokens used."""
        return self._object([]) | {"usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Numbers of tokens, counting each prompt once; predicted ones are those that were drafted as such."""
        prompt = sum(len(choice.answer.request.ids) for choice in choices[:: self._asked.n])
        completion = sum(len(choice.whole.tokens) for choice in choices)
        masks = [sources for choice in choices for sources in choice.whole.drafted_by]
        predicted = sum(choice.whole.predicted for choice in choices)
        accepted = sum(bits >= PREDICTED for bits in masks)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(predicted - accepted, 0)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": details,
            "decoding_steps": sum(choice.whole.steps for choice in choices),
            "drafted_tokens": sum(choice.whole.drafted for choice in choices),
            "accepted_tokens": sum(bits > 0 for bits in masks),
        }

    def _object(self, choices: list[dict[str, Any]], chat_kind: str = "chat.completion.chunk") -> dict[str, Any]:
        kind = chat_kind if self._asked.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _choice(self, index: int, choice: Choice, piece: Piece, key: str, message: dict[str, Any]) -> dict[str, Any]:
        """A piece of an answer, which may be the whole one; the first piece follows the prompt where it is echoed."""
        first = len(choice.whole.tokens) == len(piece.tokens)
        text = (choice.prompt if first else "") + piece.text
        made = {"index": index} | ({key: message | {"content": text}} if self._asked.chat else {"text": text})
        made |= {"finish_reason": piece.finish, "logprobs": self._logprobs(choice, piece, first)}
        if piece.finish:
            made["stop_reason"] = piece.stop
        if self._asked.sources:
            made["parts"] = self._parts(choice, piece)
        return made

    def _logprobs(self, choice: Choice, piece: Piece, first: bool) -> Any:
        """Log-probabilities of a piece's tokens, after the prompt's where it is echoed."""
        if self._asked.logprobs is None:
            return None
        tokens, scores = piece.tokens, piece.scores
        if self._asked.chat:
            each = zip(tokens, scores, strict=True)
            return {"content": [self._scored(token, score) for token, score in each], "refusal": None}
        if first and choice.prompt:
            ids = choice.answer.request.ids
            tokens, scores = ids + tokens, [None, *choice.answer.prompt_scores, *scores]
        return self._listed(choice, tokens, scores)

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
        return self._drafter.model.tokenizer.decode([token])

    def _parts(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """The text of each token of a piece, and its source: the base, a trained method, or a lookup."""
        sources = [source for source in self._drafter.sources if source.facts.distances]
        choice.parts = choice.parts or TextStream(self._drafter.model.decode, self._asked.stop)
        parts = []
        for number, (token, mask) in enumerate(zip(piece.tokens, piece.drafted_by, strict=True), 1):
            text = choice.parts.add([token], piece.finish is not None and number == len(piece.tokens))
            offered = [source for bit, source in enumerate(sources) if mask >> bit & 1]
            learnt = any(source.facts.trained for source in offered)
            kind = "learnt" if learnt else "lookup" if offered else "base"
            parts.append({"text": text, "kind": kind, "methods": [source.method.name for source in offered]})
        return parts
