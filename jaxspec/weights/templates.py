"""Chat templates: by name, for bases whose tokenizer comes without one or to train on another (BiTA, Table 6), or the
tokenizer's own with variables set, as in `enable_thinking=false`.
"""

from __future__ import annotations

import functools
import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from jaxspec.errors import UserError, suggest

_LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe. "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information."
)
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
)


def _template(before: str, user: str, assistant: str, system: str = "") -> str:
    """Jinja for turns of the user, the first one with `before` inside, and of the assistant.

    Behind a system message `system` stands in place of `before`; where it is empty, there must be no such message.
    """
    said, told = "{{ message.content }}", system.replace("TOLD", "{{ messages[0].content }}")
    behind_system = "{% elif loop.index0 == 1 and messages[0].role == 'system' %}" + told
    before = "{% if loop.first %}" + before + behind_system + "{% endif %}"
    misplaced = "{{ raise_exception('this template has no place for a message of role ' ~ message.role) }}"
    return (
        "{% for message in messages %}{% if message.role == 'user' %}"
        + user.replace("BEFORE", before).replace("SAID", said)
        + "{% elif message.role == 'assistant' %}"
        + assistant.replace("SAID", said)
        + ("{% elif message.role != 'system' or not loop.first %}" if system else "{% else %}")
        + misplaced
        + "{% endif %}{% endfor %}"
    )


def _chatglm3() -> str:
    """Jinja for turns behind their role, whoever speaks; a message begins on a line of its own."""
    turn = "<|{{ message.role }}|>{{ '\\n ' }}{{ message.content }}"
    asked = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    return "[gMASK]sop{% for message in messages %}" + turn + "{% endfor %}" + asked


def _chatml(before: str) -> str:
    """Jinja for turns between <|im_start|> and <|im_end|>, whoever speaks; `before` is in front of all."""
    turn = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    asked = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return before + "{% for message in messages %}" + turn + "{% endfor %}" + asked


_LLAMA2 = ("<s>[INST] BEFORESAID [/INST]", " SAID </s>", "<<SYS>>\nTOLD\n<</SYS>>\n\n")
_VICUNA = ("BEFOREUSER: SAID ASSISTANT:", " SAID</s>", "<s>TOLD ")
TEMPLATES = {
    "llama2": _template(_LLAMA2[2].replace("TOLD", _LLAMA2_SYSTEM), *_LLAMA2),
    "llama2-short": _template("", *_LLAMA2),
    "vicuna": _template(f"<s>{_VICUNA_SYSTEM}", *_VICUNA),
    "vicuna-short": _template("<s>", *_VICUNA),
    "falcon": _template("", "User: SAID\nAssistant:", " SAID\n"),
    # of tokenizers that were published with code of their own, where that writes the prompt
    "internlm": _template("<s>", "BEFORE<|User|>:SAID<eoh>\n<|Bot|>:", "SAID<eoa>\n"),
    "internlm-20b": _template("<s>", "BEFORE<|User|>:SAID\n<|Bot|>:", "SAID<eoa>\n"),
    "internlm2": _chatml("<s>"),
    "chatglm3": _chatglm3(),
    "qwen": _chatml(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    ),
}

_GIVEN = ("messages", "tools", "documents", "raise_exception", "strftime_now")
_MARKED_ANSWER = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def check_template(template: str) -> None:
    """Raise UserError for neither the name of a template nor variables of one, `NAME=VALUE` with commas between."""
    if "=" in template:
        _variables(template)
    elif template not in TEMPLATES:
        raise UserError(
            f"unknown template {template!r}{suggest(template, TEMPLATES)}; templates: {', '.join(TEMPLATES)}; or "
            "variables of the tokenizer's own, as in enable_thinking=false"
        )


def chosen_template(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Jinja of a template by name, or of the tokenizer's own with variables set.

    Raises UserError where it has none of its own, or such variables are not there or not free.
    """
    check_template(template)
    if template in TEMPLATES:
        return TEMPLATES[template]
    if not (own := own_template(tokenizer)):
        raise UserError(f"template {template!r}: the tokenizer has no chat template of its own to set variables in")
    free = variables_of(own)
    for name in (variables := _variables(template)):
        if name == "add_generation_prompt" or is_given(name, tokenizer):
            raise UserError(f"template {template!r}: {name} cannot be set; it follows from the messages and the model")
        if name not in free:
            raise UserError(f"template {template!r}: the tokenizer's own has no variable {name!r}{suggest(name, free)}")
    return with_variables(own, variables)


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """A Jinja template in which variables have values, plain ones as in JSON, wherever nobody gives them others."""
    for name, value in variables.items():  # the line break is one that transformers has Jinja drop
        template = f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n{template}"
    return template


@functools.lru_cache(maxsize=64)
def variables_of(template: str) -> frozenset[str]:
    """Names of the variables that a Jinja template reads from outside; none where it cannot be parsed."""
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    try:  # transformers has a tag of its own, which marks answers
        return frozenset(meta.find_undeclared_variables(environment.parse(_MARKED_ANSWER.sub("", template))))
    except TemplateError:
        return frozenset()


def is_variable(name: str) -> bool:
    """Whether a template can have a variable of that name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def is_given(name: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a template's variable follows from the messages and the tokenizer, so that nobody can set it."""
    return name in _GIVEN or name in tokenizer.special_tokens_map


def message_text(content: Any) -> str | None:
    """The text of a message's content, which may come in parts of type text; None for anything else."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return None
    parts = [part.get("text") for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None


def own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Jinja of the tokenizer's chat template, of several the default one; None where it has none."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


@functools.lru_cache(maxsize=16)
def turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    """The token that a chat template writes behind what the assistant said; None where that is plain text.

    A base that has learned the template writes it there, whatever else ends a text. In templates without an end of
    turns it is the special token that begins the user's next one.
    """
    said = "ANSWER"
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(("one", said, "two"))]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # templates raise what they like; one that refuses a plain conversation tells nothing here
        return None
    behind = text.partition(said)[2].lstrip()
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [token for token in special if token and behind.startswith(token)]
    return special[max(found, key=len)] if found else None


def _variables(text: str) -> dict[str, Any]:
    """Values are those of JSON, and what is none is text."""
    found = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (is_variable(name) and equals and value):
            raise UserError(f"template {text!r}: write NAME=VALUE, several with commas between")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
