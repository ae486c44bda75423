"""Limits of an engine, requests to it, and the pieces of its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxspec.config import SamplingConfig
from jaxspec.errors import UserError, check_at_least

Finish = Literal["stop", "length", "cancelled", "timeout"]


class Busy(UserError):
    """The queue is full; try again later."""


class Closed(UserError):
    """The engine takes no more requests."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of an engine, from which its memory is known at the start.

    Attributes:
      slots: requests decoded together.
      queue: requests that may wait.
      max_length: longest prompt and answer together, in tokens; 0: 2048, or the base's context where that is less.
      prompt_chunk: tokens of a prompt to read between two chunks of steps.
      steps_per_chunk: forward passes between two checks for finished requests.
      top_logprobs: largest number of most probable tokens whose log-probabilities a client may ask for; -1: none, not
        even that of the token itself.
      prefix_bytes: memory for readings of prompts, so that beginnings which further prompts share, such as the former
        turns of a chat, are not read again; 0: none are kept.
      seconds: time limit of a request, waiting included; 0: no limit.
    """

    slots: int = 8
    queue: int = 64
    max_length: int = 0
    prompt_chunk: int = 128
    steps_per_chunk: int = 4
    top_logprobs: int = 5
    prefix_bytes: int = 2**28
    seconds: float = 0.0

    def __post_init__(self) -> None:
        least = dict.fromkeys(("slots", "prompt_chunk", "steps_per_chunk"), 1)
        least |= dict.fromkeys(("queue", "max_length", "prefix_bytes", "seconds"), 0)
        check_at_least(self, least | {"top_logprobs": -1})


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to answer it. Two requests are never equal, whatever they ask for.

    Attributes:
      ids: token ids of the prompt.
      max_new_tokens: stop there, or at an end-of-text token.
      sampling: how tokens are drawn; greedy by default.
      seed: with sampling, decides the text.
      stop: texts that end the answer, and are cut off.
      drafting: whether to draft; the text is the same.
      logprobs: whether to return the log-probabilities of the answer's tokens.
      continues: whether the answer's text continues the prompt's, so that its leading space is kept.
      prediction: token ids of what the answer is expected to say, which lookups draft from.
      prompt_logprobs: whether to return those of the prompt's, as `AnswerStream.prompt_scores`.
      min_new_tokens: tokens before which neither an end-of-text token nor a stop text ends the answer.
      ignore_eos: go on behind end-of-text tokens.
    """

    ids: list[int]
    max_new_tokens: int = 128
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    stop: Sequence[str] = ()
    drafting: bool = True
    logprobs: bool = False
    prompt_logprobs: bool = False
    min_new_tokens: int = 0
    ignore_eos: bool = False
    continues: bool = False
    prediction: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """The base's log-probabilities at one position of a text, before temperature and filters.

    Attributes:
      logprob: log-probability of the token there.
      best: the most probable tokens there with their log-probabilities, the highest first.
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
      drafted_by: bit mask per token, of the sources that offered it, as in `DecodeState`; 0 where the base drew it.
      scores: log-probabilities per token, if the request asks for them.
      steps: forward passes so far.
      drafts: steps so far that had a candidate.
      drafted: candidates verified so far, in all steps.
      predicted: those of them that stand in the predicted text.
      finish: reason why the answer ends here: `stop` at an end-of-text token or a stop text, `length`, `cancelled` or
        `timeout`; None where it goes on.
      stop: the stop text that ended it.
      finite: whether the base's logits were finite; where not, the answer fails.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    drafted_by: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    predicted: int = 0
    finish: Finish | None = None
    stop: str | None = None
    finite: bool = True

    def followed_by(self, new: Piece) -> Piece:
        """This piece and the next one, joined."""
        return Piece(
            text=self.text + new.text,
            tokens=self.tokens + new.tokens,
            drafted_by=self.drafted_by + new.drafted_by,
            scores=self.scores + new.scores,
            steps=max(self.steps, new.steps),  # a piece that only says `cancelled` or `timeout` counts none
            drafts=max(self.drafts, new.drafts),
            drafted=max(self.drafted, new.drafted),
            predicted=max(self.predicted, new.predicted),
            finish=new.finish,
            stop=new.stop,
        )
