"""Messages of a chat in the form that a chat template takes. What a template would leave out is refused by name.

A template is a program: whether it writes something can only be seen by running it. So it is run once more on the same
messages with a mark in the place of every text, and what has lost its mark was left out.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.serving.chat import Chat, Message
from jaxspec.serving.fields import ApiError, one_line, quoted
from jaxspec.weights.model import Model
from jaxspec.weights.templates import is_given, own_template, variables_of, with_variables

_LINKS = ("id", "tool_call_id", "type", "index")  # which call an answer is for; their order says it, too
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # which templates leave out of earlier turns
_MARK = re.compile(r"mark \d+ ends")


def encode_chat(model: Model, chat: Chat) -> list[int]:
    """Token ids of a chat up to where its next message begins.

    Raises:
      ApiError: the template refuses something or leaves something out; names the first such field.
    """
    writer = _Writer(model, chat)
    refusals = []
    for messages in _forms(writer.known(chat.messages), writer.takes_parts):
        try:
            writer.check(messages)
            return writer.ids(messages)
        except ApiError as error:
            refusals.append(error)
    raise next((error for error in refusals if error.param != "messages"), refusals[0])


def _forms(messages: Sequence[Message], parts: bool) -> Iterator[list[Message]]:
    """The messages as templates may want them: arguments of calls as objects or JSON, texts as such or as parts."""
    calls = (False, True) if any(message.get("tool_calls") for message in messages) else (False,)
    for in_parts, as_json in itertools.product((False, True) if parts else (False,), calls):
        formed = copy.deepcopy(list(messages))
        for message in formed:
            if in_parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            for call in message.get("tool_calls", ()) if as_json else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        yield formed


class _Writer:
    """Writes messages with the template of a model.

    Args:
      model: the base.
      chat: the chat, for its tools and variables.
    """

    def __init__(self, model: Model, chat: Chat):
        self._model, self._tools = model, list(chat.tools)
        self._own = own_template(model.tokenizer) or ""
        variables = dict(chat.variables)
        self._opens = variables.pop("add_generation_prompt", True)
        _check_variables(variables, self._opens, self._own, model)
        self._template = with_variables(self._own, variables) if self._own else None

    @property
    def takes_parts(self) -> bool:
        """Whether the template looks into parts of contents. Others would write their description."""
        return re.search(r"""['"]text['"]|\.text\b""", self._own) is not None

    def known(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of developers as the system's, where the template does not know developers."""
        renamed = {} if "developer" in self._own else {"developer": "system"}
        return [message | {"role": renamed.get(message["role"], message["role"])} for message in messages]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of messages. Raises ApiError as `text`."""
        self.text(messages, self._tools)
        return self._model.encode_messages(messages, self._template, **self._settings(self._tools))

    def text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """Text of messages. Raises ApiError with the template's reason where it refuses them."""
        if not self._template:
            return "\n\n".join(str(message["content"]) for message in messages)
        settings = {"chat_template": self._template, "tokenize": False} | self._settings(tools)
        try:
            return self._model.tokenizer.apply_chat_template(messages, **settings)
        except Exception as error:  # templates raise what they like, such as that roles must alternate
            reason = str(error).split("\n")[0]
            raise ApiError(400, f"the model's chat template refuses these messages: {reason}", "messages") from None

    def _settings(self, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"tools": list(tools) or None, "add_generation_prompt": self._opens}

    def check(self, messages: Sequence[Message]) -> None:
        """Raise ApiError for what the template would leave out, or write as somebody else's."""
        marks: dict[str, str] = {}
        marked = [_marked(message, f"messages[{i}]", marks) for i, message in enumerate(messages)]
        tools = [_marked_name(tool, i, marks) for i, tool in enumerate(self._tools)]
        text = self.text(marked, tools)
        written = set(_MARK.findall(text))
        for mark, path in marks.items():
            if mark not in written and not self._may_leave_out(path):
                raise _left_out(path, messages)
        self._check_roles(marked, tools, text)

    def _may_leave_out(self, path: str) -> bool:
        field = path.split(".")[-1]
        return field in _THOUGHTS and field in self._own

    def _check_roles(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str) -> None:
        """Refuse roles whose messages read as those of the user or the assistant."""
        seen = set()
        for i, message in enumerate(messages):
            role = message["role"]
            if role in ("user", "assistant") or (role, i == 0) in seen:
                continue
            seen.add((role, i == 0))
            others = []
            for other in ("user", "assistant"):
                changed = [*messages[:i], message | {"role": other}, *messages[i + 1 :]]
                try:
                    others.append(self.text(changed, tools))
                except ApiError:
                    others.append(None)
            alike = others[0] == others[1]  # a template without roles, which has its reasons
            if text in others and (role == "tool" or not alike):
                field = f"messages[{i}].role"
                raise ApiError(400, f"{field}: the model's chat template has no messages of the role {role}", field)


def _check_variables(variables: Mapping[str, Any], opens: Any, template: str, model: Model) -> None:
    """Raise ApiError for variables that the template does not have, or that are not free."""
    field = "chat_template_kwargs"
    if not isinstance(opens, bool):
        raise ApiError(400, f"{field}.add_generation_prompt must be true or false", field)
    for name in variables:
        if is_given(name, model.tokenizer):
            raise ApiError(400, f"{field}: {name} cannot be set; it follows from the request and the model", field)
        if name not in variables_of(template):
            raise ApiError(400, f"{field}: the model's chat template has no variable {quoted(name)}", field)


def _marked(value: Any, path: str, marks: dict[str, str]) -> Any:
    """A copy of a JSON value with a mark in the place of everything that is not empty, and where each mark stands."""
    if isinstance(value, dict):
        kept = {"role", *_LINKS}
        return {name: one if name in kept else _marked(one, f"{path}.{name}", marks) for name, one in value.items()}
    if isinstance(value, list):
        return [_marked(one, f"{path}[{i}]", marks) for i, one in enumerate(value)]
    if value == "":
        return value
    mark = f"mark {len(marks)} ends"
    marks[mark] = path
    return mark


def _marked_name(tool: dict[str, Any], index: int, marks: dict[str, str]) -> dict[str, Any]:
    function = tool["function"]
    return tool | {"function": function | {"name": _marked(function["name"], f"tools[{index}]", marks)}}


def _left_out(path: str, messages: Sequence[Message]) -> ApiError:
    """The error for a field that the template does not write."""
    if path.startswith("tools"):
        return ApiError(400, "tools: the model's chat template takes none; leave them out", "tools")
    message, _, rest = path.partition(".")
    name = re.split(r"[.\[]", rest)[0]
    role = messages[int(message.removeprefix("messages[").removesuffix("]"))]["role"]
    left = f"the model's chat template leaves it out of a message of the role {role}"
    return ApiError(400, f"{message}.{one_line(name, 60)}: {left}", f"{message}.{name}")
