"""Chats as clients send them: messages, calls of tools, and variables of the template."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import suggest
from jaxspec.serving.fields import ApiError, Fields, quoted, shown
from jaxspec.weights.templates import is_variable, message_text

_PART = {"type", "text", "id", "index", "cache_control"}  # the last one is advice: prompts are kept in any case
Message = dict[str, Any]  # role, content as text, and whatever other fields the client has sent


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat to be continued.

    Attributes:
      messages: role, content and further fields of each message.
      tools: descriptions of functions, for templates that take them.
      variables: values of the template's variables.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_variables(self, values: Mapping[str, Any]) -> Chat:
        """The chat with these values wherever it has none of its own."""
        return dataclasses.replace(self, variables={**values, **self.variables})


def parse_chat(fields: Fields) -> Chat:
    """The chat of a request; tools that must not be called are not shown to the base."""
    tools = _tools(fields)
    choice = fields.take("tool_choice", (str, dict), "a string or an object", "auto")
    if choice not in ("none", "auto"):
        message = f"tool_choice must be none or auto here, got {shown(choice)}"
        raise ApiError(400, message, "tool_choice", "unsupported_parameter")
    return Chat(_messages(fields), tools if choice == "auto" else [], _template_variables(fields))


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools = fields.take("tools", list, "a list of tools", [])
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            what = "an object of type function with a function that has a name"
            raise ApiError(400, f"tools[{i}] must be {what}, got {shown(tool)}", f"tools[{i}]")
    return tools


def _template_variables(fields: Fields) -> dict[str, Any]:
    variables = fields.take("chat_template_kwargs", dict, "an object", {})
    for name in variables:
        if not is_variable(name):
            raise ApiError(400, f"{shown(name)} names no variable of a template", "chat_template_kwargs")
    return variables


def _messages(fields: Fields) -> list[Message]:
    messages = fields.take("messages", list, "a list of messages")
    if not messages:
        raise ApiError(400, "messages is missing or empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, name: str) -> Message:
    """A message with its content as one text; null and empty lists say nothing. Calls may stand in its place."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{name} must be an object with role and content, got {shown(message)}", name)
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        known = "system, developer, user, assistant or tool"
        raise ApiError(400, f"{name}.role must be {known}, got {shown(role)}", f"{name}.role")
    found = {field: value for field, value in message.items() if value is not None and value != []}
    if "tool_calls" in found:
        if role != "assistant":
            raise ApiError(400, f"{name}.tool_calls are the assistant's, not the {role}'s", f"{name}.tool_calls")
        found["tool_calls"] = _tool_calls(found["tool_calls"], f"{name}.tool_calls")
        found.setdefault("content", "")
    return found | {"content": content_text(found.get("content"), f"{name}.content")}


def content_text(content: Any, name: str) -> str:
    """The text of a message, which may come in parts."""
    if (text := message_text(content)) is None:
        raise ApiError(400, f"{name} must be a string, or parts of type text, got {shown(content)}", name)
    for i, part in enumerate(content if isinstance(content, list) else ()):
        for field in sorted(part.keys() - _PART):
            if part[field] not in (None, []):
                message = f"{name}[{i}] has an unknown field {quoted(field)}{suggest(field, _PART)}"
                raise ApiError(400, message, f"{name}[{i}].{field}", "unknown_parameter")
    return text


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Calls of functions, with arguments as objects, as most templates want them."""
    if not isinstance(calls, list):
        raise ApiError(400, f"{name} must be a list of calls, got {shown(calls)}", name)
    return [_tool_call(call, f"{name}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ApiError(400, f"{name} must be an object with a function that has a name, got {shown(call)}", name)
    arguments = function.get("arguments") or "{}"
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        field = f"{name}.function.arguments"
        raise ApiError(400, f"{field} must be a JSON object, got {shown(arguments)}", field)
    return call | {"function": function | {"arguments": arguments}}
