"""Prompts, answers and conversations from files: what is read, what is left out, what is refused."""

import json

import pytest

from jaxspec.config import DataConfig
from jaxspec.errors import UserError
from jaxspec.training.examples import SHIPPED_PROMPTS, Example, read_examples, read_prompts, select_prompts
from tests.tiny import make_text_model


@pytest.fixture(scope="module")
def model():
    return make_text_model()


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), "utf-8")
        return str(file)

    return write


def test_bad_files_name_file_and_line(write, tmp_path):
    cases = [
        (['{"prompt": "a"}\nnot json\n'], "data.jsonl:2: not JSON"),
        (['{"prompt": "a"}\n\n[1]\n'], "data.jsonl:3: expected a JSON object"),
        ([{"question": "a"}], "data.jsonl:1: no text in column 'prompt'; columns: question"),
        ([], "holds no prompts"),
    ]
    for rows, message in cases:
        with pytest.raises(UserError, match=message):
            read_prompts(write(*rows))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match=r"bytes.jsonl"):
        read_prompts(str(tmp_path / "bytes.jsonl"))


def test_line_separators_inside_strings_do_not_end_a_line(write):
    file = write('{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "four"}\n')
    assert read_prompts(file) == ["one\u2028two\u0085three", "four"]


def test_repeated_blank_and_long_prompts_are_left_out(model, write):
    file = write(*({"prompt": p} for p in ("a", "b", "a", " ", "c", "d", "e", "long " * 9)))
    data = DataConfig(prompts=file, held_out=2, answers=100, max_prompt_tokens=24)
    assert sorted(prompt.text for prompt in select_prompts(model, data)) == ["a", "b", "c", "d", "e"]
    assert len(read_prompts(file)) == 8  # whoever decodes them gets one answer each
    with pytest.raises(UserError, match="5 prompts of at most 24 tokens are not enough to hold out 5"):
        select_prompts(model, DataConfig(prompts=file, held_out=5, max_prompt_tokens=24))


def test_the_shipped_prompts_are_many_and_distinct():
    prompts = read_prompts("")
    assert len(prompts) >= 200 and len(SHIPPED_PROMPTS.read_text().splitlines()) == len(set(prompts))


def test_instructions_come_with_their_answers(model, write):
    file = write({"instruction": "add 1 and 2", "output": "3"}, {"instruction": "say nothing", "output": ""})
    data = DataConfig(prompts=file, column="instruction", answer_column="output", held_out=0)
    assert read_examples(data)[0] == Example(("add 1 and 2",), "3")
    (chosen,) = select_prompts(model, data)  # an empty answer teaches nothing
    assert model.decode(chosen.prompt_tokens) == "[add 1 and 2]"
    assert chosen.answer_tokens == [*model.tokenizer.encode("3"), *model.eos]
    with pytest.raises(UserError, match="no text in column 'reply'; columns: instruction, output"):
        read_examples(DataConfig(prompts=file, column="instruction", answer_column="reply"))


def test_every_turn_of_the_assistant_is_an_answer(model, write):
    chat = [("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "farewell")]
    for role, content in (("role", "content"), ("from", "value")):
        file = write({"messages": [{role: who, content: text} for who, text in chat]})
        data = DataConfig(prompts=file, column="messages", held_out=0)
        first = "be kind\n\nhi"
        assert read_examples(data) == [Example((first,), "hello"), Example((first, "hello", "bye"), "farewell")]
        texts = sorted(model.decode(chosen.prompt_tokens) for chosen in select_prompts(model, data))
        assert texts == sorted([f"[{first}]", f"[{first}][hello][bye]"])


def test_conversations_that_cannot_be_read_are_refused(write):
    said = lambda role, text: {"role": role, "content": text}  # noqa: E731
    cases = [
        ([said("assistant", "hello")], "must alternate, the user's first; found assistant"),
        ([said("user", "a"), said("user", "b")], "must alternate, the user's first; found user"),
        ([said("robot", "a")], 'found {"role": "robot", "content": "a"}'),
        (["hello"], 'expected a message with a role .* and a content, found "hello"'),
    ]
    for messages, message in cases:
        with pytest.raises(UserError, match=message):
            read_examples(DataConfig(prompts=write({"prompt": messages})))
