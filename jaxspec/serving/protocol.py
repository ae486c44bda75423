"""Requests of the OpenAI interface: every field is checked, and errors name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.config import SamplingConfig
from jaxspec.errors import suggest
from jaxspec.serving.chat import Chat, content_text, parse_chat
from jaxspec.serving.fields import PENALTIES, ApiError, Fields, quoted, read_json, shown

_MOST_CHOICES = 128
_MOST_STOPS = 16
_COMMON = {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stream"}
_COMMON |= {"stream_options", "logprobs", "drafting", "sources", "min_tokens", "ignore_eos", "prediction"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "tools", "tool_choice"}
_COMPLETION = _COMMON | {"prompt", "echo"}
Prompt = str | list[int] | Chat


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for a completion or for a chat's next message.

    Attributes:
      chat: whether it belongs to a chat.
      model: name of the base; None takes the engine's.
      prompts: the prompts to answer: texts, token ids or a chat.
      max_tokens: tokens per answer; None: as many as there is room for.
      limit: name of the field with the former.
      min_tokens: tokens before which no answer ends.
      ignore_eos: go on behind end-of-text tokens.
      sampling: sampling settings.
      seed: sampling seed; None: any.
      stop: texts that end an answer.
      n: answers to each prompt; the i-th has the seed + i.
      stream: send the answer while it is generated.
      usage: end the stream with the numbers of tokens used.
      continuous_usage: send these numbers with every piece, too.
      logprobs: number of most probable tokens to return with their log-probabilities; None: none, not even the token's.
      echo: begin the answer with the prompt.
      prediction: what the answers are expected to say; None: nothing.
      drafting: whether to draft.
      sources: return the source of each token.
    """

    chat: bool
    model: str | None
    prompts: Sequence[Prompt]
    max_tokens: int | None
    limit: str
    min_tokens: int
    ignore_eos: bool
    sampling: SamplingConfig
    seed: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    usage: bool
    continuous_usage: bool
    logprobs: int | None
    echo: bool
    prediction: str | None
    drafting: bool
    sources: bool


def parse(body: bytes, chat: bool, best: int, penalties: bool = False) -> Asked:
    """Parse the body of a request.

    Args:
      body: JSON.
      chat: whether it belongs to a chat.
      best: largest number of most probable tokens that a client may ask for; -1: none, not even the token's.
      penalties: whether penalties are known.

    Raises:
      ApiError: the body is not JSON, or a field is unknown or makes no sense.
    """
    fields = Fields(read_json(body), (_CHAT if chat else _COMPLETION) | (PENALTIES if penalties else set()))
    max_tokens, limit = _max_tokens(fields, chat)
    usage, continuous_usage = _usage(fields)
    return Asked(
        chat=chat,
        model=fields.take("model", str, "a string"),
        prompts=[parse_chat(fields)] if chat else _prompts(fields),
        max_tokens=max_tokens,
        limit=limit,
        min_tokens=_min_tokens(fields, max_tokens, limit),
        ignore_eos=fields.flag("ignore_eos"),
        sampling=SamplingConfig(
            temperature=fields.number("temperature", 1.0, 0, 1e6),
            top_k=max(fields.integer("top_k", 0, -1), 0),  # -1 is off for users of other engines
            top_p=fields.number("top_p", 1.0, 1e-9, 1),
            min_p=fields.number("min_p", 0.0, 0, 1),
            repetition_penalty=fields.number("repetition_penalty", 1.0, 1e-6, 100),
            presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        ),
        seed=fields.integer("seed", None, -(2**63), 2**64 - 1),
        stop=_stop(fields),
        n=fields.integer("n", 1, 1, _MOST_CHOICES),
        stream=fields.flag("stream"),
        usage=usage,
        continuous_usage=continuous_usage,
        logprobs=_logprobs(fields, chat, best),
        echo=fields.flag("echo"),
        prediction=_prediction(fields),
        drafting=fields.flag("drafting", True),
        sources=fields.flag("sources"),
    )


def _logprobs(fields: Fields, chat: bool, best: int) -> int | None:
    """The number of most probable tokens to return."""
    name = "top_logprobs" if chat else "logprobs"
    count = fields.integer(name, 0 if chat else None, 0)
    if chat and not fields.flag("logprobs"):
        if count:
            raise ApiError(400, "top_logprobs needs logprobs to be true", name)
        count = None
    if count is not None and count > best:
        allowed = f"at most {best}" if best >= 0 else "not available"
        raise ApiError(400, f"{name} is {allowed} on this server, got {count}; see --limits.top-logprobs", name)
    return count


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop", (str, list), "a string or a list of strings", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in texts) or len(texts) > _MOST_STOPS:
        raise ApiError(400, f"stop must be at most {_MOST_STOPS} strings, none of them empty", "stop")
    return tuple(texts)


def _max_tokens(fields: Fields, chat: bool) -> tuple[int | None, str]:
    """The most tokens of an answer, and the name of the field that says so."""
    older = fields.integer("max_tokens", None if chat else 16, 0)
    newer = fields.integer("max_completion_tokens", None, 0)
    return (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")


def _min_tokens(fields: Fields, max_tokens: int | None, limit: str) -> int:
    least = fields.integer("min_tokens", 0, 0)
    if max_tokens is not None and least > max_tokens:
        raise ApiError(400, f"min_tokens must be at most {limit}, {max_tokens}, got {least}", "min_tokens")
    return least


def _usage(fields: Fields) -> tuple[bool, bool]:
    """Whether to tell the numbers of tokens at the end of a stream, and whether in every chunk, too."""
    options = fields.take("stream_options", dict, "an object")
    if options is None:
        return False, False
    if not fields.flag("stream"):
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the last one only pads what is sent
    for name in options.keys() - set(known):
        message = f"unknown field {quoted(name)} in stream_options{suggest(name, known)}"
        raise ApiError(400, message, f"stream_options.{name}", "unknown_parameter")
    usage, continuous, _ = wanted = [False if options.get(name) is None else options[name] for name in known]
    for name, value in zip(known, wanted, strict=True):
        if not isinstance(value, bool):
            raise ApiError(400, f"{name} must be true or false, got {shown(value)}", f"stream_options.{name}")
    if continuous and not usage:
        message = "continuous_usage_stats needs include_usage to be true"
        raise ApiError(400, message, "stream_options.continuous_usage_stats")
    return usage, continuous


def _prediction(fields: Fields) -> str | None:
    prediction = fields.take("prediction", dict, "an object with type and content")
    if prediction is None:
        return None
    if prediction.get("type") != "content" or prediction.keys() != {"type", "content"}:
        raise ApiError(400, 'prediction must be {"type": "content", "content": TEXT}, and no more', "prediction")
    return content_text(prediction["content"], "prediction.content")


def _prompts(fields: Fields) -> list[Prompt]:
    what = "a string, a list of strings, token ids, or a list of lists of token ids"
    prompt = fields.take("prompt", (str, list), what)
    if prompt is None or prompt == []:
        raise ApiError(400, "prompt is missing", "prompt")
    if isinstance(prompt, str) or _are_ids(prompt):
        return [prompt]
    if all(isinstance(one, str) or _are_ids(one) for one in prompt) and len(prompt) <= _MOST_CHOICES:
        return prompt
    raise ApiError(400, f"prompt must be {what}; lists of at most {_MOST_CHOICES}, none of them empty", "prompt")


def _are_ids(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(type(i) is int for i in x)
