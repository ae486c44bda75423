"""What the OpenAI interface refuses, and how: fields, bodies, paths, keys, full queues, slow requests."""

import asyncio
import dataclasses
import hmac
import json

import pytest

from jaxspec.serving.api import make_app
from jaxspec.serving.fields import one_line
from jaxspec.serving.request import Busy
from tests.helpers.serving import CHAT, HELLO, TEXT, call, events, get, idle, post

USAGES, USAGE_FIELD = {"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        (CHAT, {"messages": None}, "messages", "missing"),
        (CHAT, {"messages": "hello"}, "messages", "must be a list of messages, got"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "user, assistant or tool"),
        (CHAT, {"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content", "must be a string"),
        (CHAT, {"messages": ["x"]}, "messages[0]", "an object"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "long " * 30}]},
            "messages",
            "exceeds max-length, 120, of this",
        ),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (
            CHAT,
            {"logprobs": True, "top_logprobs": 6},
            "top_logprobs",
            "got 6; see --limits.top-logprobs",
        ),
        (CHAT, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (CHAT, {"temperature": "hot"}, "temperature", "must be a number"),
        (CHAT, {"temperature": -1}, "temperature", "between 0"),
        (CHAT, {"temperature": True}, "temperature", "must be a number"),
        (CHAT, {"temperature": float("nan")}, "temperature", "between 0"),
        (CHAT, {"temperature": 1e-9}, "temperature", "at least 1e-06"),
        (CHAT, {"top_p": 0}, "top_p", "between"),
        (CHAT, {"n": 0}, "n", "between 1 and"),
        (CHAT, {"n": 1.5}, "n", "a whole number"),
        (CHAT, {"seed": "x"}, "seed", "a whole number"),
        (CHAT, {"max_tokens": 119}, "max_tokens", "lower max_tokens to 107"),
        (CHAT, {"max_completion_tokens": 119}, "max_completion_tokens", "lower max_completion_tokens to 107"),
        (CHAT, {"min_tokens": 5}, "min_tokens", "at most max_tokens, 4"),
        (CHAT, {"min_tokens": -1}, "min_tokens", "between 0"),
        (CHAT, {"max_tokens": None, "min_tokens": 110}, "min_tokens", "room for 107"),
        (CHAT, {"ignore_eos": 1}, "ignore_eos", "true or false"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens", "between 0"),
        (CHAT, {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "names no variable"),
        (TEXT, {"chat_template_kwargs": {}}, "chat_template_kwargs", "unknown field"),
        (CHAT, {"stop": ["a", ""]}, "stop", "none of them empty"),
        (CHAT, {"stop": list("abcdefghijklmnopqrs")}, "stop", "at most 16"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field 'usage'"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": []}}, "stream_options.include_usage", "true or"),
        (CHAT, {"n": 37}, "n", "holds 36 at most"),
        (TEXT, {"prompt": ["a"] * 37}, "prompt", "holds 36 at most"),
        (CHAT, {"stream": True, "stream_options": USAGES}, USAGE_FIELD, "needs include_usage"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0]", "a function that has a name"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "none or auto"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "not supported"),
        (TEXT, {"tools": [{}]}, "tools", "not supported"),
        (CHAT, {"model": 5}, "model", "a string"),
        (TEXT, {"prompt": None}, "prompt", "missing"),
        (TEXT, {"prompt": ["a", 5]}, "prompt", "must be a string, a list"),
        (TEXT, {"prompt": [1, 999]}, "prompt", "outside the vocabulary"),
        (TEXT, {"prompt": " "}, "prompt", "empty"),
        (TEXT, {"suffix": "x"}, "suffix", "not supported"),
        (TEXT, {"logprobs": 9}, "logprobs", "at most 5"),
    ],
)
def test_bad_fields_are_named(app, path, change, param, message):
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    content = json.dumps(body | {"max_tokens": 4} | change)
    [response] = call(app, ("POST", path, {"content": content}))
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"]


def test_what_clients_send_is_told_in_one_short_line(app, caplog):
    """It may be long, or hold line breaks and codes of terminals, which would forge lines of the log."""
    caplog.set_level("INFO", "jaxspec.serving")
    name = "a\r\n\u2028\x1b[2J" + 5000 * "b"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a", name: 1}]}]
    ends = (
        ({"messages": HELLO, name: 1}, "bbb...'"),
        ({"messages": [HELLO[0] | {name: 1}]}, "leaves it out of a message of the role user"),
        ({"messages": parts}, "bbb...'"),
        ({"messages": HELLO, "model": name}, "does not exist; there is 'tiny'"),
    )
    for body, end in ends:
        error = post(app, CHAT, body).json()["error"]
        assert error["message"].isprintable() and error["param"].isprintable() and len(error["param"]) <= 200
        assert len(error["message"]) < 200 and error["message"].endswith(end)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == len(ends) and all(line.isprintable() for line in logged)


def test_texts_in_one_line_are_cut_behind_their_escapes():
    assert one_line("a\nb") == "a\\nb" and one_line(30 * "\u2028", 20) == "\\u2028\\u2028\\u202..."
    assert one_line("ab" * 10, 20) == "ab" * 10


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"prompt": "\xff"}', 400, "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
        (b"[" * 9000, 400, "JSON"),
        (b'{"prompt": "' + b"a" * 1_000_000 + b'"}', 413, "more than 10000 bytes"),
        (b'{"prompt": "a", "model": "gpt"}', 404, "there is 'tiny'"),
    ],
)
def test_bad_bodies_are_refused(app, content, status, message):
    [response] = call(app, ("POST", TEXT, {"content": content}))
    assert response.status_code == status and message in response.json()["error"]["message"]


def test_unknown_paths_and_methods(app, caplog):
    caplog.set_level("INFO", "jaxspec.serving")
    assert get(app, "/v1/nothing").json()["error"]["type"] == "not_found_error"
    refused = get(app, TEXT)
    assert refused.status_code == 405 and "POST" in refused.headers["allow"]
    assert caplog.messages == [
        "/v1/nothing 404 no such path: /v1/nothing",
        "/v1/completions 405 GET is not for /v1/completions",
    ]


def test_a_prompt_of_a_megabyte_is_refused_by_its_length(engine):
    body = {"prompt": "a" * 1_000_000, "max_tokens": 1}
    response = post(make_app(engine, "tiny"), TEXT, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt") and "exceeds max-length" in error["message"]


def test_the_key_guards_what_answers(engine, monkeypatch):
    app, compared, compare = make_app(engine, "tiny", api_key="geheim-ü"), [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both))
    body = {"prompt": "a", "max_tokens": 1}
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "geheim-ü".encode()}):
        response = post(app, TEXT, body, headers=header)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert post(app, TEXT, body, headers={"authorization": "Bearer geheim-ü".encode()}).status_code == 200
    assert [get(app, path).status_code for path in ("/", "/health", "/metrics", "/v1/models")] == [200, 200, 200, 401]
    assert compared == [(given.encode(), "geheim-ü".encode()) for given in ("wrong", "geheim-ü")]  # in constant time


def test_a_full_queue_asks_to_come_back(app, engine, monkeypatch):
    monkeypatch.setattr(engine, "limits", dataclasses.replace(engine.limits, queue=1))
    requests = [("POST", TEXT, {"json": {"prompt": "hello", "max_tokens": 20, "seed": i}}) for i in range(16)]
    responses = call(app, *requests)
    refused = [response for response in responses if response.status_code == 429]
    assert refused and len(refused) < 16
    assert {response.status_code for response in responses} == {200, 429}
    assert all(int(r.headers["retry-after"]) > 0 and r.json()["error"]["type"] == "rate_limit_error" for r in refused)


def test_what_is_refused_midway_leaves_nothing_behind(app, engine, monkeypatch):
    submit, queued = engine.submit, []

    def submit_two(*arguments, **settings):
        if len(queued) == 2:
            raise Busy("no room")
        queued.append(submit(*arguments, **settings))
        return queued[-1]

    monkeypatch.setattr(engine, "submit", submit_two)
    assert post(app, TEXT, {"prompt": "hello", "max_tokens": 100, "n": 3}).status_code == 429
    assert [answer.cancelled for answer in queued] == [True, True]
    asyncio.run(idle(engine))


def test_a_request_that_takes_too_long(app, engine, monkeypatch):
    monkeypatch.setattr(engine, "limits", dataclasses.replace(engine.limits, seconds=1e-6))
    response = post(app, TEXT, {"prompt": "hello"})
    assert response.status_code == 504 and "longer than" in response.json()["error"]["message"]
    [error] = events(post(app, TEXT, {"prompt": "hello", "stream": True}))
    assert error["error"]["code"] == "timeout"
