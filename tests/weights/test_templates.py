"""Chat templates by name."""

import pytest

from jaxspec.errors import UserError
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.templates import TEMPLATES
from tests.helpers.tiny import make_text_model, make_tokenizer

TALK = [
    {"role": "user", "content": "What's {1}?"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "Sure?"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama2-short", "<s>[INST] What's {1}? [/INST] One. </s><s>[INST] Sure? [/INST]"),
        ("vicuna-short", "<s>USER: What's {1}? ASSISTANT: One.</s>USER: Sure? ASSISTANT:"),
        ("falcon", "User: What's {1}?\nAssistant: One.\nUser: Sure?\nAssistant:"),
    ],
)
def test_templates_write_what_the_bases_were_trained_on(name, text):
    """BiTA's Table 6; turns follow each other as the bases were trained."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    assert tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == text


@pytest.mark.parametrize("name", ["llama2", "vicuna"])
def test_the_system_message_comes_once(name):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert text.count("helpful") == (2 if name == "llama2" else 1) and text.startswith("<s>")
    short = tokenizer.apply_chat_template(TALK[2:], tokenize=False, chat_template=TEMPLATES[f"{name}-short"])
    assert text.endswith(short.removeprefix("<s>") if name == "vicuna" else short)


def test_a_base_takes_one(tmp_path):
    save_model(make_text_model(), tmp_path / "base")
    plain, named = (load_model(str(tmp_path / "base"), template=name) for name in ("", "falcon"))
    assert plain.decode(plain.encode("Hi")) == "[Hi]"
    assert named.decode(named.encode("Hi")) == "User: Hi\nAssistant:"
    with pytest.raises(UserError, match="did you mean 'vicuna'"):
        load_model(str(tmp_path / "base"), template="vicunna")
