"""Requests of the OpenAI interface: every field is checked, and errors name it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config import SamplingConfig
from jaxspec.errors import suggest
from jaxspec.weights.templates import is_variable

Prompt = str | list[int] | list[dict[str, str]]  # text, ids, or the messages of a chat

_MOST_CHOICES = 128
_MOST_STOPS = 16
_COMMON = {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stream"}
_COMMON |= {"stream_options", "logprobs", "drafting", "sources", "prediction"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
_COMPLETION = _COMMON | {"prompt", "echo"}
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Fields that are not supported are accepted with the values that change nothing.
_NEUTRAL = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """An error for the client.

    Attributes:
      status: HTTP status.
      message: what was wrong, and what to do.
      param: the field.
      code: an identifier for programs.
      headers: headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """The JSON object of an error."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for a completion or for a chat's next message.

    Attributes:
      chat: whether it belongs to a chat.
      model: name of the base; None takes the engine's.
      prompts: the prompts to answer.
      variables: values of the chat template's variables.
      max_tokens: tokens per answer; None: as many as there is room for.
      sampling: sampling settings.
      seed: sampling seed; None: any.
      stop: texts that end an answer.
      n: answers to each prompt; the i-th has the seed + i.
      stream: send the answer while it is generated.
      usage: end the stream with the numbers of tokens used.
      logprobs: number of most probable tokens to return with their log-probabilities; None: none, not even the token's.
      echo: begin the answer with the prompt.
      prediction: what the answers are expected to say; None: nothing.
      drafting: whether to draft.
      sources: return the source of each token.
    """

    chat: bool
    model: str | None
    prompts: Sequence[Prompt]
    variables: Mapping[str, Any]
    max_tokens: int | None
    sampling: SamplingConfig
    seed: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    usage: bool
    logprobs: int | None
    echo: bool
    prediction: str | None
    drafting: bool
    sources: bool


def parse(body: bytes, chat: bool, best: int) -> Asked:
    """Parse the body of a request.

    Args:
      body: JSON.
      chat: whether it belongs to a chat.
      best: largest number of most probable tokens that a client may ask for; -1: none, not even the token's.

    Raises:
      ApiError: the body is not JSON, or a field is unknown or makes no sense.
    """
    fields = Fields(_read_json(body), _CHAT if chat else _COMPLETION)
    max_tokens = fields.integer("max_tokens", None if chat else 16, 0)
    return Asked(
        chat=chat,
        model=fields.take("model", str, "a string"),
        prompts=[_messages(fields)] if chat else _prompts(fields),
        variables=_template_variables(fields),
        max_tokens=fields.integer("max_completion_tokens", max_tokens, 0),
        sampling=SamplingConfig(
            temperature=fields.number("temperature", 1.0, 0, 1e6),
            top_k=max(fields.integer("top_k", 0, -1), 0),  # -1 is off for users of other engines
            top_p=fields.number("top_p", 1.0, 1e-9, 1),
            min_p=fields.number("min_p", 0.0, 0, 1),
        ),
        seed=fields.integer("seed", None, -(2**63), 2**64 - 1),
        stop=_stop(fields),
        n=fields.integer("n", 1, 1, _MOST_CHOICES),
        stream=fields.flag("stream"),
        usage=_usage(fields),
        logprobs=_logprobs(fields, chat, best),
        echo=fields.flag("echo"),
        prediction=_prediction(fields),
        drafting=fields.flag("drafting", True),
        sources=fields.flag("sources"),
    )


class Fields:
    """The fields of a JSON object, checked as they are taken.

    Args:
      body: the object.
      known: names of the allowed fields.
    """

    def __init__(self, body: dict[str, Any], known: set[str]):
        self._body = {name: value for name, value in body.items() if value is not None}
        for name, value in self._body.items():
            if name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise ApiError(400, f"{name} is not supported here", name, "unsupported_parameter")
            elif name not in known | _IGNORED:
                raise ApiError(400, f"unknown field {name!r}{suggest(name, known)}", name, "unknown_parameter")

    def take(self, name: str, kind: type | tuple[type, ...], what: str, default: Any = None) -> Any:
        """The value of a field of some type, named `what` in errors."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(400, f"{name} must be {what}, got {_shown(value)}", name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return self.take(name, bool, "true or false", default)

    def integer(self, name: str, default: int | None, least: int, most: int = 2**31 - 1) -> int | None:
        """A whole number within bounds."""
        return self._within(name, self.take(name, int, "a whole number", default), least, most)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number within bounds."""
        value = self._within(name, self.take(name, (int, float), "a number", default), least, most)
        if name == "temperature" and 0 < value < 1e-6:
            raise ApiError(400, f"temperature must be 0 (greedy) or at least 1e-06, got {value}", name)
        return float(value)

    def _within(self, name: str, value: Any, least: float, most: float) -> Any:
        if value is not None and not least <= value <= most:
            raise ApiError(400, f"{name} must be between {least} and {most}, got {_shown(value)}", name)
        return value


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body.decode())
        json.dumps(found, ensure_ascii=False).encode()  # JSON can write half pairs, which no text holds
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds text that is not valid Unicode") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON ({error})") from None
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        raise ApiError(400, "the body is not JSON that can be read") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_shown(found)}")
    return found


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
        raise ApiError(400, f"{name} is {allowed} on this server, got {count}; see --top-logprobs", name)
    return count


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop", (str, list), "a string or a list of strings", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in texts) or len(texts) > _MOST_STOPS:
        raise ApiError(400, f"stop must be at most {_MOST_STOPS} strings, none of them empty", "stop")
    return tuple(texts)


def _usage(fields: Fields) -> bool:
    options = fields.take("stream_options", dict, "an object")
    if options is None:
        return False
    if not fields.flag("stream"):
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")
    known = {"include_usage", "include_obfuscation"}  # the latter only pads what is sent
    for name in options.keys() - known:
        message = f"unknown field {name!r} in stream_options{suggest(name, known)}"
        raise ApiError(400, message, f"stream_options.{name}", "unknown_parameter")
    wanted = options.get("include_usage") or False
    if not isinstance(wanted, bool):
        raise ApiError(400, f"include_usage must be true or false, got {_shown(wanted)}", "stream_options")
    return wanted


def _prediction(fields: Fields) -> str | None:
    prediction = fields.take("prediction", dict, "an object with type and content")
    if prediction is None:
        return None
    if prediction.get("type") != "content" or prediction.keys() != {"type", "content"}:
        raise ApiError(400, 'prediction must be {"type": "content", "content": TEXT}, and no more', "prediction")
    return _text(prediction["content"], "prediction.content")


def _template_variables(fields: Fields) -> dict[str, Any]:
    variables = fields.take("chat_template_kwargs", dict, "an object", {})
    for name in variables:
        if not is_variable(name):
            raise ApiError(400, f"{_shown(name)} names no variable of a template", "chat_template_kwargs")
    return variables


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


def _messages(fields: Fields) -> list[dict[str, str]]:
    messages = fields.take("messages", list, "a list of messages")
    if not messages:
        raise ApiError(400, "messages is missing or empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, name: str) -> dict[str, str]:
    """A message's role and text; a text may come in parts."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{name} must be an object with role and content, got {_shown(message)}", name)
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        known = "system, user or assistant"
        raise ApiError(400, f"{name}.role must be {known}, got {_shown(role)}", f"{name}.role")
    return {"role": "system" if role == "developer" else role, "content": _text(content, f"{name}.content")}


def _text(content: Any, name: str) -> str:
    """A text, which may come in parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise ApiError(400, f"{name} must be a string, or parts of type text", name)
    return content


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
