"""Responses: the objects of the OpenAI interface, complete or in chunks."""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxspec.decoding.draft import PREDICTED
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.text import TextStream
from jaxspec.serving.answer import AnswerStream
from jaxspec.serving.logprobs import TokenTexts
from jaxspec.serving.protocol import Asked
from jaxspec.serving.request import Piece
from jaxspec.weights.spelling import Spelling


@dataclasses.dataclass
class Choice:
    """One answer so far.

    Attributes:
      answer: the stream of its pieces.
      prompt: the prompt's text, where it is echoed.
      whole: all its pieces, joined.
      texts: texts of its tokens, where log-probabilities were returned.
      parts: text of the tokens whose sources were returned.
    """

    answer: AnswerStream
    prompt: str = ""
    whole: Piece = Piece()
    texts: TokenTexts | None = None
    parts: TextStream | None = None


class Replies:
    """Maker of the objects that answer one request.

    Args:
      asked: the request.
      drafter: the engine's drafter.
      spelling: of its tokenizer.
      model: the model's name for clients.
      drafting: whether to tell of each answer how its drafts fared.
    """

    def __init__(self, asked: Asked, drafter: Drafter, spelling: Spelling, model: str, drafting: bool = False):
        self._asked, self._drafter, self._spelling, self._model = asked, drafter, spelling, model
        self._drafting = drafting
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The complete answer."""
        message = {"role": "assistant", "refusal": None}
        made = [self._choice(i, choice, choice.whole, "message", message) for i, choice in enumerate(choices)]
        return self._object(made, "chat.completion") | {"usage": self.usage(choices)} | self._metrics(choices)

    def openings(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The chunks that open chat answers; completions have none."""
        start = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        count = len(choices) if self._asked.chat else 0
        return [self._object([{"index": i} | start]) | self._usage_so_far(choices) for i in range(count)]

    def chunk(self, index: int, choices: Sequence[Choice], piece: Piece) -> dict[str, Any]:
        """The chunk for a piece of the choice of that index."""
        made = self._choice(index, choices[index], piece, "delta", {})
        return self._object([made]) | self._usage_so_far(choices)

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk, with the numbers of tokens used."""
        return self._object([]) | {"usage": self.usage(choices)} | self._metrics(choices)

    def _usage_so_far(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {"usage": self.usage(choices)} if self._asked.continuous_usage else {}

    def _metrics(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """How the drafts of a single answer fared; nothing of several, or where nothing was drafted."""
        if not self._drafting or len(choices) > 1 or not choices[0].whole.drafts:
            return {}
        return {"metrics": {"speculative_decoding": speculation(choices[0].whole, self._drafter.on_device.shape.depth)}}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Numbers of tokens, counting each prompt once; predicted ones are those that were drafted as such."""
        prompt = sum(len(choice.answer.request.ids) for choice in choices[:: self._asked.n])
        cached = sum(choice.answer.cached for choice in choices[:: self._asked.n])
        completion = sum(len(choice.whole.tokens) for choice in choices)
        masks = [sources for choice in choices for sources in choice.whole.drafted_by]
        predicted = sum(choice.whole.predicted for choice in choices)
        accepted = sum(bits >= PREDICTED for bits in masks)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(predicted - accepted, 0)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
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
        text = choice.prompt + piece.text if first else piece.text
        made = {"index": index} | ({key: message | {"content": text}} if self._asked.chat else {"text": text})
        made |= {"finish_reason": piece.finish, "logprobs": self._logprobs(choice, piece, first)}
        if piece.finish:
            made["stop_reason"] = piece.stop
        if self._asked.sources:
            made["parts"] = self._parts(choice, piece)
        return made

    def _logprobs(self, choice: Choice, piece: Piece, first: bool) -> Any:
        """Log-probabilities of a piece's tokens, after the prompt's where it is echoed."""
        if (count := self._asked.logprobs) is None:
            return None
        if first or choice.texts is None:
            choice.texts = TokenTexts(self._spelling, choice.prompt)
        if self._asked.chat:
            return {"content": choice.texts.chat(piece.tokens, piece.scores, count), "refusal": None}
        asked = choice.answer.request.ids if first and choice.prompt else []
        scores = [None, *choice.answer.prompt_scores] if asked else []
        before = choice.texts.lists(asked, scores, count)
        if first:
            choice.texts.end_prompt()
        told = choice.texts.lists(piece.tokens, piece.scores, count)
        return {name: before[name] + told[name] for name in told}

    def _parts(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """The text of each token of a piece, and its source: the base, a trained method, or a lookup."""
        sources = [source for source in self._drafter.sources if source.facts.distances]
        decode = functools.partial(self._drafter.model.decode, continues=not self._asked.chat)
        choice.parts = choice.parts or TextStream(decode, self._asked.stop)
        parts = []
        for number, (token, mask) in enumerate(zip(piece.tokens, piece.drafted_by, strict=True), 1):
            text = choice.parts.add([token], piece.finish is not None and number == len(piece.tokens))
            offered = [source for bit, source in enumerate(sources) if mask >> bit & 1]
            learnt = any(source.facts.learned for source in offered)
            kind = "learnt" if learnt else "lookup" if offered else "base"
            parts.append({"text": text, "kind": kind, "methods": [source.method.name for source in offered]})
        return parts


def speculation(answer: Piece, depth: int) -> dict[str, Any]:
    """Figures of an answer's drafts under the names that vLLM gives them.

    Args:
      answer: the whole answer.
      depth: of the deepest draft.
    """
    # A step emits what it has accepted, then a token of the base's own; the first token is the prompt's.
    runs = "".join("1" if sources else " " for sources in answer.drafted_by).split()
    histogram = [0] * (depth + 1)
    for run in runs:
        histogram[len(run)] += 1
    histogram[0] = answer.drafts - len(runs)
    accepted = sum(map(len, runs))
    return {
        "mean_acceptance_length": 1 + accepted / answer.drafts,
        "draft_acceptance_rate": accepted / answer.drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": answer.drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": answer.drafted,
        "num_spec_tokens": depth,
    }
