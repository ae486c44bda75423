"""Chats in the form that templates take; what a template leaves out is refused by name."""

import copy

import pytest

from jaxspec.serving.chat import Chat, parse_chat
from jaxspec.serving.fields import ApiError, Fields
from jaxspec.serving.messages import encode_chat
from jaxspec.weights.model import Model
from tests.helpers.tiny import make_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "東京", "n": 2}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HISTORY = [
    {"role": "user", "content": "where"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "there"},
]


def each(said, before=""):
    """A template that writes every message `m` so."""
    return before + "{% for m in messages %}" + said + "{% endfor %}"


# Generic headers, as of ChatML: every role, but neither calls nor tools.
PLAIN = each("<{{ m['role'] }}>{{ m['content'] }}") + "{% if add_generation_prompt %}<assistant>{% endif %}"
# Calls and tools, with arguments as objects and answers in the user's place, as Qwen's.
CALLS = each(
    "{% if m.role == 'tool' %}<user><answer>{{ m.content }}{% else %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endif %}",
    before="{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}",
)
# Arguments as JSON, as DeepSeek's.
JSON_CALLS = CALLS.replace("c.function.arguments | tojson", "c.function.arguments + ''")
PARTS = each("<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}")
# One system message, at the start; every other turn is the assistant's.
TWO_ROLES = each(
    "{% if m.role == 'user' %}U:{% elif m.role == 'system' and loop.first %}S:{% else %}A:{% endif %}{{ m.content }}"
)
FIRST = "{{ messages[0].content }}"
STRICT = each("{% if m.role == 'system' %}{{ raise_exception('no such role') }}{% endif %}{{ m.content }}")


def written(template, body):
    """The text of a request's chat."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    model = Model("tiny", None, {}, "", tokenizer=tokenizer)
    known = {"messages", "tools", "tool_choice", "chat_template_kwargs"}
    return tokenizer.decode(encode_chat(model, parse_chat(Fields(copy.deepcopy(body), known))))


@pytest.mark.parametrize("template", [CALLS, JSON_CALLS])
def test_calls_and_their_answers(template):
    """Null content is none; arguments come as the template wants them, an object or JSON."""
    text = written(template, {"messages": HISTORY, "tools": [TOOL]})
    assert '"name": "look"' in text
    assert text.endswith('<user>where<assistant><call>look {"at": "東京", "n": 2}<user><answer>there')


def test_parts_are_joined_or_passed_on():
    advice = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a"} | advice, {"type": "text", "text": "b", "annotations": [], "index": 1}]
    for template in (PLAIN, PARTS):
        assert written(template, {"messages": [{"role": "user", "content": parts}]}).startswith("<user>ab")


def test_developer_is_system_where_the_template_does_not_know_it():
    body = {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x"}]}
    assert written(TWO_ROLES, body) == "S:be briefU:x"
    assert written(PLAIN.replace("<{{", "{# developer #}<{{"), body).startswith("<developer>be brief")


def test_fields_that_say_nothing_are_left_out():
    """As the openai package writes an answer back."""
    answer = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    messages = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "c"}]
    assert written(PLAIN, {"messages": messages}) == "<user>a<assistant>b<user>c<assistant>"


def test_thoughts_may_be_left_out_of_earlier_turns_by_templates_that_know_them():
    turns = [HISTORY[0], {"role": "assistant", "content": "b", "reasoning_content": "hm"}, HISTORY[0]]
    thoughts = "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    assert written(each(thoughts + "<{{ m.role }}>{{ m.content }}"), {"messages": turns}).startswith(
        "<user>where<assis"
    )
    with pytest.raises(ApiError) as refused:
        written(PLAIN, {"messages": turns})
    assert refused.value.param == "messages[1].reasoning_content"


def test_variables_of_the_template():
    template = PLAIN + "{% if loud %}!{% endif %}"
    body = {"messages": HISTORY[:1]}
    assert written(template, body | {"chat_template_kwargs": {"loud": True}}) == "<user>where<assistant>!"
    assert written(template, body | {"chat_template_kwargs": {"add_generation_prompt": False}}) == "<user>where"


def test_tools_that_must_not_be_called_are_not_shown():
    assert "look" not in written(PLAIN, {"messages": HISTORY[:1], "tools": [TOOL], "tool_choice": "none"})


@pytest.mark.parametrize(
    ("template", "messages", "param", "said"),
    [
        (PLAIN, HISTORY, "messages[1].tool_calls", "leaves it out of a message of the role assistant"),
        (PLAIN, [{"role": "user", "content": "a", "name": "Ann"}], "messages[0].name", "leaves it out"),
        (PLAIN, [{"role": "user", "content": "a", "bogus": 1}], "messages[0].bogus", "leaves it out"),
        (CALLS, [HISTORY[0], HISTORY[1] | {"bogus": {"a": True}}], "messages[1].bogus", "leaves it out"),
        (JSON_CALLS, [HISTORY[0], HISTORY[1] | {"bogus": 1}], "messages[1].bogus", "leaves it out"),
        (FIRST, HISTORY[:1] * 2, "messages[1].content", "leaves it out"),
        (TWO_ROLES, [{"role": "system", "content": "a"}] * 2, "messages[1].role", "no messages of the role system"),
        (TWO_ROLES, [HISTORY[0], HISTORY[2]], "messages[1].role", "no messages of the role tool"),
        (STRICT, [{"role": "system", "content": "a"}], "messages", "refuses these messages: no such role"),
        (None, [HISTORY[0], HISTORY[2]], "messages[1].role", "no messages of the role tool"),
    ],
)
def test_what_a_template_cannot_express_is_refused(template, messages, param, said):
    with pytest.raises(ApiError) as refused:
        written(template, {"messages": messages})
    assert refused.value.param == param and said in refused.value.message and refused.value.status == 400


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": [TOOL]}, "tools", "takes none"),
        ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs", "no variable 'thinking'"),
        ({"chat_template_kwargs": {"message": 1}}, "chat_template_kwargs", "no variable 'message'"),  # of a loop
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages cannot be set"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs", "eos_token cannot be set"),
        ({"chat_template_kwargs": {"add_generation_prompt": 0}}, "chat_template_kwargs", "true or false"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content[0].x",
            "unknown field",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "assist"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
    ],
)
def test_fields_of_chats_are_checked(change, param, said):
    with pytest.raises(ApiError) as refused:
        written(PLAIN, {"messages": HISTORY[:1]} | change)
    assert refused.value.param == param and said in refused.value.message


def test_an_unknown_field_of_a_part_has_a_hint():
    part = {"type": "text", "text": "a", "cache_controll": {"type": "ephemeral"}}
    with pytest.raises(ApiError) as refused:
        written(PLAIN, {"messages": [{"role": "user", "content": [part]}]})
    assert refused.value.code == "unknown_parameter"
    assert refused.value.message.endswith("unknown field 'cache_controll' (did you mean 'cache_control'?)")


def test_chats_of_variables_of_their_own():
    chat = Chat([], variables={"a": 1}).with_variables({"a": 2, "b": 3})
    assert chat.variables == {"a": 1, "b": 3}
