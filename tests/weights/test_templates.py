"""Chat templates by name."""

import dataclasses

import pytest
from jinja2.exceptions import TemplateError

from jaxspec.errors import UserError
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.templates import TEMPLATES, chosen_template, turn_end, variables_of
from tests.helpers.tiny import make_text_model, make_tokenizer

TALK = [
    {"role": "user", "content": "What's {1}?"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "Sure?"},
]
CHATML = (
    "<|im_start|>user\nWhat's {1}?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama2-short", "<s>[INST] What's {1}? [/INST] One. </s><s>[INST] Sure? [/INST]"),
        ("vicuna-short", "<s>USER: What's {1}? ASSISTANT: One.</s>USER: Sure? ASSISTANT:"),
        ("falcon", "User: What's {1}?\nAssistant: One.\nUser: Sure?\nAssistant:"),
        ("internlm", "<s><|User|>:What's {1}?<eoh>\n<|Bot|>:One.<eoa>\n<|User|>:Sure?<eoh>\n<|Bot|>:"),
        ("internlm-20b", "<s><|User|>:What's {1}?\n<|Bot|>:One.<eoa>\n<|User|>:Sure?\n<|Bot|>:"),
        ("chatglm3", "[gMASK]sop<|user|>\n What's {1}?<|assistant|>\n One.<|user|>\n Sure?<|assistant|>"),
        ("internlm2", f"<s>{CHATML}"),
        ("qwen", f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{CHATML}"),
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama2", "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nSure? [/INST]"),
        ("llama2-short", "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nSure? [/INST]"),
        ("vicuna", "<s>Be kind. USER: Sure? ASSISTANT:"),
        ("vicuna-short", "<s>Be kind. USER: Sure? ASSISTANT:"),
        ("chatglm3", "[gMASK]sop<|system|>\n Be kind.<|user|>\n Sure?"),
        ("internlm2", "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"),
        ("qwen", "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"),
    ],
)
def test_a_system_message_is_in_its_place(name, text):
    """In place of the template's own."""
    tokenizer, messages = make_tokenizer(), [{"role": "system", "content": "Be kind."}, TALK[2]]
    assert tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False) == text


@pytest.mark.parametrize(
    ("name", "role"),
    [("falcon", "system"), ("internlm", "system"), ("internlm-20b", "system"), ("vicuna", "tool"), ("falcon", "tool")],
)
def test_a_message_without_a_place_is_refused(name, role):
    """It would be written as the assistant's."""
    messages = [{"role": role, "content": "Be kind."}, TALK[2]]
    with pytest.raises(TemplateError, match=f"no place for a message of role {role}"):
        make_tokenizer().apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False)
    with pytest.raises(TemplateError, match="role system"):
        late = [TALK[2], {"role": "system", "content": "Be kind."}]
        make_tokenizer().apply_chat_template(late, chat_template=TEMPLATES[name], tokenize=False)


def test_variables_of_the_tokenizers_own_are_set():
    """As Qwen3's template reads them. In front of another setting the first one wins, and text stays as it is."""
    model = make_text_model()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "\n{{ messages[0].content }}{% if thinking is defined and not thinking %}!{% endif %}{{ effort or '' }}"
    )
    model = dataclasses.replace(model, tokenizer=tokenizer)

    def written(template=""):
        return model.decode(model.encode("Hi", template=template))

    assert [written(), written("thinking=true"), written("thinking=false")] == ["\nHi", "\nHi", "\nHi!"]
    assert written("thinking=false,effort=it's {% low %}") == "\nHi!it's {% low %}"
    tokenizer.chat_template = chosen_template("thinking=false", tokenizer)
    assert [written(), written("thinking=true")] == ["\nHi!", "\nHi"]
    with pytest.raises(UserError, match="write NAME=VALUE"):
        written("thinking=false,")
    with pytest.raises(UserError, match=r"has no variable 'thinkin' \(did you mean 'thinking'\?\)"):
        written("thinkin=false")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template of its own"):
        chosen_template("thinking=false", tokenizer)


@pytest.mark.parametrize("variable", ["messages=1", "add_generation_prompt=false", "tools=1", "eos_token=x"])
def test_variables_that_are_not_free_are_refused(variable):
    """Everybody gives them others, so that they would be ignored."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages }}{{ tools }}{{ eos_token }}{% if add_generation_prompt %}{% endif %}"
    with pytest.raises(UserError, match=f"template '{variable}': .* cannot be set"):
        chosen_template(variable, tokenizer)


def test_variables_are_those_that_come_from_outside():
    """Not those of loops and of its own, nor filters; one with a default is set in the template, too."""
    template = (
        "{% if not day is defined %}{% set day = 1 %}{% endif %}{% set own = namespace(x=1) %}{{ day + bonus }}"
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert variables_of(template) == {"day", "bonus", "messages"}
    assert variables_of("{% if %}") == set()


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<a>{{ m.content }}<end>\n{% endfor %}", "<end>"),
        (TEMPLATES["llama2"], "</s>"),  # behind a space
        (TEMPLATES["vicuna"], "</s>"),
        ("{% for m in messages %}{{ '<a>' if loop.index0 % 2 else '<u>' }} {{ m.content }}{% endfor %}", "<u>"),
        ("{% for m in messages %}{{ m.content }}</s>>{% endfor %}", "</s>>"),  # the longest token that begins there
        (TEMPLATES["falcon"], None),  # plain text
        ("{% for m in messages %}{{ m.content }}<plain>{% endfor %}", None),  # a token that is not special
        ("{{ messages[0].content }}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_end_of_a_turn_is_the_token_behind_an_answer(template, end):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<u>", "</s>", "</s>>"]})
    tokenizer.add_tokens(["<plain>"])
    assert turn_end(tokenizer, template) == (end and tokenizer.convert_tokens_to_ids(end))


def test_a_base_takes_one(tmp_path):
    save_model(make_text_model(), tmp_path / "base")
    plain, named = (load_model(str(tmp_path / "base"), template=name) for name in ("", "falcon"))
    assert plain.decode(plain.encode("Hi")) == "[Hi]"
    assert named.decode(named.encode("Hi")) == "User: Hi\nAssistant:"
    with pytest.raises(UserError, match="did you mean 'vicuna'"):
        load_model(str(tmp_path / "base"), template="vicunna")
