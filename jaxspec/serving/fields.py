"""Fields of a request's JSON, checked as they are taken, and the errors that name them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import suggest

PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Fields that are not supported are accepted with the values that change nothing.
_NEUTRAL = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "priority": (0,),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
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

    def __post_init__(self) -> None:
        """What clients have sent may be long, or hold line breaks, which must not reach the log."""
        self.message = one_line(self.message)
        self.param = self.param and one_line(self.param, 200)

    def body(self) -> dict[str, Any]:
        """The JSON object of an error."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """The fields of a JSON object, checked as they are taken.

    Args:
      body: the object.
      known: names of the allowed fields.
    """

    def __init__(self, body: dict[str, Any], known: set[str]):
        self._body = {name: value for name, value in body.items() if value is not None}
        for name, value in self._body.items():
            if name in known | _IGNORED:
                continue
            if name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    remedy = ": the server must be started with --penalties" if name in PENALTIES else ""
                    raise ApiError(400, f"{name} is not supported here{remedy}", name, "unsupported_parameter")
            else:
                raise ApiError(400, f"unknown field {quoted(name)}{suggest(name, known)}", name, "unknown_parameter")

    def take(self, name: str, kind: type | tuple[type, ...], what: str, default: Any = None) -> Any:
        """The value of a field of some type, named `what` in errors."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(400, f"{name} must be {what}, got {shown(value)}", name)
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
            raise ApiError(400, f"{name} must be between {least} and {most}, got {shown(value)}", name)
        return value


def read_json(body: bytes) -> dict[str, Any]:
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
        raise ApiError(400, f"the body must be a JSON object, got {shown(found)}")
    return found


def one_line(text: str, most: int = 1000) -> str:
    """A text in one line of characters that can be seen, cut where it is then long."""
    seen = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return seen if len(seen) <= most else f"{seen[: most - 3]}..."


def quoted(name: str) -> str:
    """A name that a client has sent for a message, cut where it is long: what is wrong with it stands behind it."""
    return f"'{one_line(name, 60)}'"


def shown(value: Any) -> str:
    """A JSON value for a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
