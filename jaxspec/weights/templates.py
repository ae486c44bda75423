"""Chat templates by name, for bases whose tokenizer comes without one, or to train on another (BiTA, Table 6)."""

from __future__ import annotations

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


def _template(before: str, user: str, assistant: str) -> str:
    """Jinja for turns of the user, the first one with `before` inside, and of the assistant."""
    said = "{{ message.content }}"
    before = "{% if loop.first %}" + before + "{% endif %}"
    return (
        "{% for message in messages %}{% if message.role == 'user' %}"
        + user.replace("BEFORE", before).replace("SAID", said)
        + "{% else %}"
        + assistant.replace("SAID", said)
        + "{% endif %}{% endfor %}"
    )


def _llama2(before: str) -> str:
    return _template(before, "<s>[INST] BEFORESAID [/INST]", " SAID </s>")


def _vicuna(before: str) -> str:
    return _template(f"<s>{before}", "BEFOREUSER: SAID ASSISTANT:", " SAID</s>")


TEMPLATES = {
    "llama2": _llama2(f"<<SYS>>\n{_LLAMA2_SYSTEM}\n<</SYS>>\n\n"),
    "llama2-short": _llama2(""),
    "vicuna": _vicuna(_VICUNA_SYSTEM),
    "vicuna-short": _vicuna(""),
    "falcon": _template("", "User: SAID\nAssistant:", " SAID\n"),
}


def check_template(name: str) -> None:
    """Raise UserError for a name that no template has."""
    if name not in TEMPLATES:
        raise UserError(f"unknown template {name!r}{suggest(name, TEMPLATES)}; templates: {', '.join(TEMPLATES)}")
