"""Requests to an engine, and the pieces of its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxspec.config import SamplingConfig
from jaxspec.errors import UserError

Finish = Literal["stop", "length", "cancelled", "timeout"]


class Busy(UserError):
    """The queue is full; try again later."""


class Closed(UserError):
    """The engine takes no more requests."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
      ids: of the prompt.
      max_new_tokens: stop there, or at an end-of-text token.
      sampling: how tokens are drawn; greedy by default.
      seed: with sampling, decides the text.
      stop: texts that end the answer, and are cut off.
      drafting: whether to draft; the text is the same.
      logprobs: whether to tell the tokens' log-probabilities.
      prompt_logprobs: whether to tell the prompt's, too: `AnswerStream.prompt_scores`, there with the first piece.
    """

    ids: list[int]
    max_new_tokens: int = 128
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    stop: Sequence[str] = ()
    drafting: bool = True
    logprobs: bool = False
    prompt_logprobs: bool = False


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """The base's log-probabilities at one position of a text, before temperature and filters.

    Attributes:
      logprob: log-probability of the token there.
      best: the most probable tokens there with their log-probabilities, falling.
    """

    logprob: float
    best: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text and tokens added to an answer.

    Attributes:
      text: new text. It may lag behind the tokens: the possible start of a stop text, or an incomplete character, is
        held back.
      tokens: new tokens, an end-of-text token included; none beyond a stop text.
      drafted_by: per token, the sources that offered it, a bit each; 0 where the base drew it.
      scores: per token, where log-probabilities were asked for.
      steps: forward passes so far.
      drafts: steps so far that had a candidate.
      drafted: candidates verified so far, in all steps.
      finish: why the answer ends here: `stop` at an end-of-text token or a stop text, `length`, `cancelled` or
        `timeout`; None where it goes on.
      stop: the stop text that ended it.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    drafted_by: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    finish: Finish | None = None
    stop: str | None = None
