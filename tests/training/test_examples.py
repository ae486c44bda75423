"""Prompts, answers and conversations from files: what is read, what is left out, what is refused."""

import dataclasses
import json
from collections import Counter

import pytest

from jaxspec.errors import UserError
from jaxspec.training.examples import (
    SHIPPED_PROMPTS,
    Example,
    check_files,
    read_examples,
    read_prompts,
    select_prompts,
    unseen_prompts,
)
from jaxspec.training.settings import DataConfig, TextSource
from tests.helpers.files import write_jsonl
from tests.helpers.tiny import make_text_model, make_tokenizer


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        file = tmp_path / "data.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), "utf-8")
        return str(file)

    return write


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "data.jsonl:2: not JSON"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "data.jsonl:2: the prompt in column 'prompt' is empty"),
        ('{"prompt": "\\ud800"}\n', "data.jsonl:1: not valid Unicode"),
        ('{"prompt": "a"}\n\n[1]\n', "data.jsonl:3: expected a JSON object"),
        ('{"question": "a"}\n', "data.jsonl:1: no column 'prompt', name one of those there are: question"),
        ('{"prompt": 5}\n', "data.jsonl:1: column 'prompt' must hold a text, got 5"),
        ("", "holds no prompts"),
        ('[{"prompt": "a"}, 3]', "data.jsonl:2: expected a JSON object"),
        ("[1,\n", "data.jsonl:2: not"),
        (b"\xff\xfe{", "data.jsonl:1: not valid UTF-16"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_prompts(str(tmp_path / "data.jsonl"))


def test_lines_end_at_line_feeds_alone_and_an_array_is_as_good(write):
    """ShareGPT and Alpaca are published as arrays."""
    file = write('{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "four"}\n')
    assert read_prompts(file) == ["one\u2028two\u0085three", "four"]
    assert read_prompts(write('\n[{"prompt": "one"},\n {"prompt": "two"}]\n')) == ["one", "two"]


def test_repeated_blank_and_long_prompts_are_left_out(model, write, capsys):
    file = write(*({"prompt": p} for p in ("a", "b", "a", " ", "c", "d", "e", "long " * 9)))
    data = DataConfig(prompts=file, held_out=2, answers=100, max_prompt_tokens=24)
    assert sorted(prompt.text for prompt in select_prompts(model, data)) == ["a", "b", "c", "d", "e"]
    assert capsys.readouterr().err == "left out, more than 24 tokens: 1 prompts\n"
    with pytest.raises(UserError, match=r"data.jsonl:4: the prompt in column 'prompt' is empty"):
        read_prompts(file)  # whoever decodes them gets one answer each
    with pytest.raises(UserError, match="5 prompts of at most 24 tokens are not enough to hold out 5"):
        select_prompts(model, DataConfig(prompts=file, held_out=5, max_prompt_tokens=24))


def test_the_shipped_prompts_are_many_and_distinct():
    prompts = read_prompts("")
    assert len(prompts) >= 200 and len(SHIPPED_PROMPTS.read_text().splitlines()) == len(set(prompts))


def test_instructions_come_with_their_answers(model, write):
    file = write({"instruction": "add 1 and 2", "output": "3"}, {"instruction": "say nothing", "output": ""})
    data = DataConfig(prompts=file, column="instruction", answer_column="output", held_out=0)
    assert read_examples(*data.text_sources)[0] == Example(("add 1 and 2",), "3")
    (chosen,) = select_prompts(model, data)  # an empty answer teaches nothing
    assert model.decode(chosen.prompt_tokens) == "[add 1 and 2]"
    assert chosen.answer_tokens == [*model.tokenizer.encode("3"), *model.eos]
    with pytest.raises(UserError, match="no column 'reply', name one of those there are: instruction, output"):
        read_examples(TextSource(prompts=file, column="instruction", answer_column="reply"))


def test_what_an_instruction_is_about_goes_below_it(write):
    file = write(*({"instruction": f"add {i}", "input": text} for i, text in enumerate(("1 and 2", "", " ", None))))
    data = DataConfig(prompts=file, column="instruction", context_column="input")
    assert [e.turns[0] for e in read_examples(*data.text_sources)] == ["add 0\n\n1 and 2", "add 1", "add 2", "add 3"]
    for row, message in (
        ({"instruction": "add"}, "data.jsonl:1: no column 'input', name one of those there are: instruction"),
        ({"instruction": "add", "input": 3}, "data.jsonl:1: column 'input' must hold a text, got 3"),
    ):
        with pytest.raises(UserError, match=message):
            read_examples(*dataclasses.replace(data, prompts=write(row)).text_sources)


def test_the_base_can_answer_conversations_itself(model, write):
    talk = [{"from": ("human", "gpt")[n % 2], "value": f"turn {n}"} for n in range(3)]
    data = DataConfig(prompts=write({"talk": talk}), column="talk", regenerate=True, held_out=0)
    assert read_examples(*data.text_sources) == [Example(("turn 0",)), Example(("turn 0", "turn 1", "turn 2"))]
    assert {s.answer_tokens for s in select_prompts(model, data)} == {None}
    with pytest.raises(UserError, match=r"data.answer-column 'said' gives answers: set one for '.*data.jsonl'"):
        read_examples(*dataclasses.replace(data, answer_column="said").text_sources)


def said(*turns, role="role", content="content"):
    """A conversation, from pairs of role and text."""
    return [{role: who, content: text} for who, text in turns]


@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_every_turn_of_the_assistant_is_an_answer(model, write, role, content):
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "farewell")]
    file = write({"messages": said(*turns, role=role, content=content)})
    data = DataConfig(prompts=file, column="messages", held_out=0)
    first = "be kind\n\nhi"
    assert read_examples(*data.text_sources) == [
        Example((first,), "hello"),
        Example((first, "hello", "bye"), "farewell"),
    ]
    texts = sorted(model.decode(chosen.prompt_tokens) for chosen in select_prompts(model, data))
    assert texts == sorted([f"[{first}]", f"[{first}][hello][bye]"])


GOOD = [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    ("turns", "examples"),
    [
        ([("assistant", "hello"), *GOOD], 1),
        ([*GOOD, ("assistant", "more"), ("user", "c"), ("assistant", "d")], 1),
        ([*GOOD, ("tool", "4"), ("assistant", "d")], 1),
        ([("user", "alone")], 0),
    ],
)
def test_conversations_count_up_to_the_first_turn_out_of_place(write, turns, examples):
    assert read_examples(TextSource(prompts=write({"prompt": said(*turns)}))) == [Example(("a",), "b")] * examples


def test_contents_may_come_in_parts(write):
    """As OpenAI's are, in some rows or in all; developers are the system."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [("developer", parts), ("user", "c"), ("assistant", parts)]
    file = write({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert read_examples(TextSource(file, column="messages")) == [Example(("ab\n\nc",), "ab")]


@pytest.mark.parametrize("message", ["hello", {"role": ["user"], "content": "a"}, {"role": "user", "content": None}])
def test_a_message_without_role_and_content_is_refused(write, message):
    with pytest.raises(UserError, match=r"data.jsonl:1: expected a message with a role and a content of text, found"):
        read_examples(TextSource(prompts=write({"prompt": [message]})))


def test_what_begins_alike_is_on_one_side_of_the_split(model, write):
    """Turns of one conversation, and several answers to one question."""
    roles = ("user", "assistant") * 3
    talks = [said(*((role, f"{n} of {i}") for n, role in enumerate(roles))) for i in range(4)]
    data = DataConfig(prompts=write(*({"prompt": talk} for talk in talks)), held_out=2, max_prompt_tokens=99)
    talks = [model.decode(s.prompt_tokens)[6] for s in select_prompts(model, data)]
    assert len(talks) == 2 + 9 and talks[0] == talks[1] not in talks[2:]
    file = write(*({"prompt": f"q{i % 3}", "answer": f"{i}"} for i in range(9)))
    chosen = select_prompts(model, DataConfig(prompts=file, answer_column="answer", held_out=1))
    assert len(chosen) == 1 + 6 and chosen[0].text not in {s.text for s in chosen[1:]}


def test_prompts_with_and_without_answers_do_not_mix(model, write):
    file = write({"prompt": "a"}, {"prompt": said(*GOOD)})
    with pytest.raises(UserError, match="some rows have a conversation or an answer and some a prompt alone"):
        select_prompts(model, DataConfig(prompts=file, held_out=0))


def test_where_an_answer_begins_and_ends(model, write):
    """Behind the template or, without one, a blank line; at the tokenizer's end of text if it is one of the base's."""
    data = DataConfig(prompts=write({"prompt": "a", "answer": "b"}), answer_column="answer", held_out=0)
    own = model.tokenizer.eos_token_id
    for eos, end in (((3, own), [own]), ((3, 4), [3]), ((), [])):
        (chosen,) = select_prompts(dataclasses.replace(model, eos=eos), data)
        assert chosen.answer_tokens == [*model.tokenizer.encode("b"), *end]
    (chosen,) = select_prompts(model, dataclasses.replace(data, chat=False))
    assert model.decode(chosen.prompt_tokens) == "a\n\n"


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_ends_as_its_template_ends_turns(chat, write):
    """Though the tokenizer ends texts with another token."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"
    turn, own = tokenizer.convert_tokens_to_ids(["<turn>", "<end>"])
    model = dataclasses.replace(make_text_model(), tokenizer=tokenizer, eos=(own, turn))
    data = DataConfig(prompts=write({"prompt": "a", "answer": "b"}), answer_column="answer", held_out=0, chat=chat)
    (chosen,) = select_prompts(model, data)
    assert chosen.answer_tokens == [*tokenizer.encode("b"), turn if chat else own]


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, which has two configs; messages as the real one's."""

    def load_dataset(name, config=None, *, split):
        configs = {"main": {"train": ["a", "b"], "test": ["c"]}, "socratic": {"train": ["d"]}}
        if name != "owner/name":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub or cannot be accessed.")
        if config is None:
            some = f"Please pick one among the available configs: {list(configs)}"
            raise ValueError(f"Config name is missing.\n{some}\nExample of usage:\n\t`load_dataset('{name}', 'main')`")
        if split not in configs[config]:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(configs[config])}.')
        return [{"prompt": text} for text in configs[config][split]]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)


def test_data_sets_on_the_hub_have_configs_and_splits(hub):
    assert read_prompts("owner/name:main") == ["a", "b"] and read_prompts("owner/name:socratic") == ["d"]
    assert read_examples(TextSource(prompts="owner/name:main", split="test")) == [Example(("c",))]


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ("owner/name", "train", r"Config name is missing. Please pick one .* configs: \['main', 'socratic'\]\)$"),
        ("owner/name:socratic", "test", r"with split 'test' \(Unknown split \"test\". Should be one of \['train'\]"),
        (
            "owner/nome",
            "train",
            r"'owner/nome': no such file, and could not be loaded from the hub .*'owner/nome' doesn't exist",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_said_on_one_line(hub, source, split, message):
    with pytest.raises(UserError, match=message):
        read_examples(TextSource(prompts=source, split=split))


def test_prompts_that_an_adapter_was_trained_on_are_left_out(model, write):
    questions = [f"question {i}" for i in range(30)]
    source = write(*({"prompt": question} for question in questions))
    data = {"held_out": 5, "held_out_seed": 3, "max_prompt_tokens": 100, "chat": True}
    held_out = [prompt.text for prompt in select_prompts(model, DataConfig(source, answers=9, **data))[:5]]
    assert unseen_prompts(model, data | {"prompts": "data.jsonl"}, source) == held_out
    assert unseen_prompts(model, data | {"prompts": "other.jsonl"}, source) == questions
    twice = {"prompts": "data.jsonl", "templates": ["llama2-short", "falcon"], "held_out": 10, "mixture": []}
    assert unseen_prompts(model, data | twice, source) == held_out
    rows = [{"say": questions[i % 9], "about": f"{i % 2}", "answer": f"{i}" * (i > 2)} for i in range(30)]
    source = write(*rows)  # repeated, and some without an answer
    data |= {"column": "say", "answer_column": "answer", "context_column": "about"}
    held_out = [prompt.text for prompt in select_prompts(model, DataConfig(source, answers=9, **data))[:5]]
    assert unseen_prompts(model, data | {"prompts": "data.jsonl"}, source, "say") == list(dict.fromkeys(held_out))


@pytest.fixture
def mixed(tmp_path):
    """Three parts of 40 questions, two parts of 6, which are soon used up, and nothing of others."""

    def source(name, count, weight, **changes):
        file = write_jsonl(tmp_path / f"{name}.jsonl", ({"q": f"{name} {i}"} for i in range(count)))
        return TextSource(file, column="q", weight=weight, **changes)

    sources = (source("many", 40, 3.0), source("few", 6, 2.0), source("none", 9, 0.0))
    return DataConfig(mixture=sources, held_out=5, answers=10, max_prompt_tokens=900)


def shares(selected):
    return Counter(prompt.text.split()[0] for prompt in selected)


def test_a_mixture_has_the_same_shares_on_both_sides_of_the_split(model, mixed, capsys):
    chosen = select_prompts(model, dataclasses.replace(mixed, answers=5))
    assert shares(chosen[:5]) == shares(chosen[5:]) == {"many": 3, "few": 2}
    assert capsys.readouterr().err.startswith("mixture: 3 from '") and len({s.text for s in chosen}) == 10
    assert select_prompts(model, dataclasses.replace(mixed, answers=7))[:10] == chosen
    assert select_prompts(model, dataclasses.replace(mixed, answers=5, held_out_seed=1)) != chosen


def test_a_source_that_is_used_up_is_neither_repeated_nor_replaced(model, mixed):
    chosen = select_prompts(model, dataclasses.replace(mixed, answers=20))[5:]
    assert shares(chosen) == {"many": 12, "few": 4}
    with pytest.raises(UserError, match="18 prompts of at most 900 tokens are not enough to hold out 20"):
        select_prompts(model, dataclasses.replace(mixed, held_out=20))


def test_what_several_sources_ask_is_asked_once(model, mixed):
    again = dataclasses.replace(mixed.mixture[0], weight=1.0)
    chosen = select_prompts(model, dataclasses.replace(mixed, mixture=(*mixed.mixture[:2], again), answers=60))
    assert len({s.text for s in chosen}) == len(chosen)


def test_of_different_answers_to_one_prompt_the_first_source_has_its_own(model, tmp_path):
    def source(answer):
        file = write_jsonl(tmp_path / f"{answer}.jsonl", [{"q": "x", "a": answer}])
        return TextSource(file, column="q", answer_column="a")

    [chosen] = select_prompts(model, DataConfig(mixture=(source("1"), source("2")), held_out=0, answers=2))
    assert chosen.answer_tokens[:-1] == model.tokenizer.encode("1", add_special_tokens=False)


def test_a_missing_file_of_a_mixture_is_named_with_what_to_do(mixed):
    lost = dataclasses.replace(mixed.mixture[1], prompts="lost.jsonl")
    with pytest.raises(UserError, match=r"lost.jsonl: no such file.*--data.mixture.1.weight 0"):
        check_files(dataclasses.replace(mixed, mixture=(mixed.mixture[0], lost)))
    check_files(dataclasses.replace(mixed, mixture=(mixed.mixture[0], dataclasses.replace(lost, weight=0.0))))


def test_every_question_of_a_mixture_is_asked_under_every_template(model, mixed):
    chosen = select_prompts(model, dataclasses.replace(mixed, templates=("vicuna-short", "falcon"), held_out=4))
    prompts = {model.decode(s.prompt_tokens) for s in chosen}
    assert len(prompts) == 14 and shares(chosen[:4]) == {"many": 2, "few": 2}
    for text in {s.text for s in chosen}:
        assert {f"<s>USER: {text} ASSISTANT:", f"User: {text}\nAssistant:"} <= prompts
    plain = select_prompts(model, dataclasses.replace(mixed, templates=("vicuna", "falcon"), chat=False))
    assert model.decode(plain[0].prompt_tokens) == plain[0].text


def test_given_answers_follow_a_template_directly(model, write):
    file = write({"prompt": "a", "answer": "b"})
    data = DataConfig(file, answer_column="answer", held_out=0, templates=("falcon",))
    bare = dataclasses.replace(model, tokenizer=make_tokenizer())
    bare.tokenizer.chat_template = None
    (chosen,) = select_prompts(bare, data)
    assert model.decode(chosen.prompt_tokens) == "User: a\nAssistant:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": "said"}, r"few.jsonl:1: no column 'said', name one"),
        ({"answer_column": "a"}, r"few.jsonl:1: no column 'a', name one"),
        ({"prompts": "nowhere.jsonl"}, r"^prompts 'nowhere.jsonl': no such file$"),
        ({"split": "test"}, r"data.split 'test': .*few.jsonl is a file"),
    ],
)
def test_what_a_source_lacks_is_said_with_its_name(hub, model, mixed, change, message):
    many, few, _ = mixed.mixture
    with pytest.raises(UserError, match=message) as refused:
        select_prompts(model, dataclasses.replace(mixed, mixture=(many, dataclasses.replace(few, **change))))
    assert "\n" not in str(refused.value)


def test_one_source_takes_the_place_of_a_mixture(model, mixed, write):
    data = dataclasses.replace(mixed, prompts=write({"prompt": "a"}), held_out=0)
    assert [s.text for s in select_prompts(model, data)] == ["a"]


def test_prompts_of_a_mixture_cannot_be_told_from_those_held_out(model, mixed, write):
    trained_on = {"prompts": "", "mixture": [{"prompts": "many.jsonl"}, {"prompts": "owner/name"}]}
    with pytest.raises(UserError, match=r"many.jsonl: the adapter was trained on a mixture that has it"):
        unseen_prompts(model, trained_on, mixed.mixture[0].prompts, "q")
    assert unseen_prompts(model, trained_on, write({"prompt": "a"})) == ["a"]
    assert len(unseen_prompts(model, trained_on, "")) >= 200
