"""The OpenAI interface in this process: fields, streams, errors, limits, metrics."""

import asyncio
import dataclasses
import hmac
import itertools
import json
import time

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.config import SamplingConfig
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.serving.api import make_app
from jaxspec.serving.fields import ApiError, one_line
from jaxspec.serving.protocol import parse
from jaxspec.serving.request import Busy
from jaxspec.weights.spelling import Spelling, readable
from tests.helpers.model import log_probabilities
from tests.helpers.serving import call, idle, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LENGTH = {"max_model_len": 120}
HELLO = [{"role": "user", "content": "hello there"}]
USAGES, USAGE_FIELD = {"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"


@pytest.fixture(scope="module")
def app(engine):
    return make_app(engine, "tiny", max_body_bytes=10_000)


def get(app, path, **settings):
    [response] = call(app, ("GET", path, settings))
    return response


def events(response):
    """The objects of a stream, which must end as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def alone(engine, prompt, limit, sampling=SamplingConfig(), seed=0, chat=False):
    """What `jaxspec decode` answers."""
    plain = autoregressive(engine.model)
    return generate(plain, [prompt], limit, sampling=sampling, seed=seed, chat=chat)[0]


def test_what_there_is(app):
    assert get(app, "/health").status_code == 200
    [model] = get(app, "/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 120
    page = get(app, "/")
    assert page.headers["content-type"].startswith("text/html") and "//" not in page.text.replace("// ", "")


def test_a_model_by_each_of_its_names(engine):
    app = make_app(engine, "tiny", aliases=["models/tiny"])
    for name in ("tiny", "models/tiny"):
        assert get(app, f"/v1/models/{name}").json()["id"] == name
        assert post(app, TEXT, {"model": name, "prompt": "a", "max_tokens": 1}).json()["model"] == "tiny"
    error = get(app, "/v1/models/gpt-4")
    assert error.status_code == 404 and error.json()["error"]["code"] == "model_not_found"


def test_pages_of_allowed_origins_may_read_answers(engine):
    asked = {"headers": {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}}
    for origins, expected in (("http://a.example",), "http://a.example"), (("http://b.example",), None), ((), None):
        app = make_app(engine, "tiny", api_key="secret", origins=origins)
        [preflight] = call(app, ("OPTIONS", CHAT, asked))
        assert preflight.headers.get("access-control-allow-origin") == expected
        assert (preflight.status_code == 200) == (expected is not None)
        answer = get(app, "/v1/models", headers={"Origin": "http://a.example"})
        assert answer.headers.get("access-control-allow-origin") == expected


def test_tokens_of_texts_and_chats(app, engine):
    text = post(app, "/tokenize", {"model": "tiny", "prompt": "abc", "return_token_strs": True}).json()
    assert text == {"count": 3, "tokens": [*engine.model.encode("abc", False)], "token_strs": [*"abc"]} | LENGTH
    chat = post(app, "/tokenize", {"messages": HELLO}).json()
    assert chat["tokens"] == engine.model.encode("hello there") and chat["token_strs"] is None
    assert post(app, "/detokenize", {"tokens": text["tokens"]}).json() == {"prompt": "abc"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ):
        error = post(app, path, body)
        assert error.status_code in (400, 404) and error.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_change_nothing_are_accepted(app, path):
    """As clients send them whether they mean them or not."""
    neutral = {
        "functions": [],
        "function_call": "none",
        "tools": [],
        "tool_choice": "none",
        "min_tokens": 0,
        "ignore_eos": False,
        "use_beam_search": False,
        "priority": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1,
        "echo": False,
        "stop_token_ids": [],
        "prediction": None,
    }
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    assert post(app, path, body | {"max_tokens": 1} | neutral).status_code == 200


def test_penalties_need_a_server_that_has_them(app):
    refused = post(app, TEXT, {"prompt": "hello", "presence_penalty": 0.5})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["message"]) == (
        "presence_penalty",
        "presence_penalty is not supported here: the server must be started with --penalties",
    )


def test_penalties_are_taken_and_checked():
    body = {"prompt": "hello", "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 2}
    sampling = parse(json.dumps(body).encode(), False, 5, penalties=True).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, -0.5, 2.0)
    for name, value in (("repetition_penalty", 0), ("presence_penalty", 2.1), ("frequency_penalty", "much")):
        with pytest.raises(ApiError) as refused:
            parse(json.dumps({"prompt": "hello", name: value}).encode(), False, 5, penalties=True)
        assert refused.value.status == 400 and refused.value.param == name


@pytest.mark.parametrize("drafting", [True, False])
def test_an_answer_has_at_least_so_many_tokens(app, engine, drafting):
    """No end of text is drawn before; what is drawn in its place is the base's next choice."""
    eos = engine.model.eos[0]
    seed = next(s for s in range(50) if len(alone(engine, "abc", 30, SamplingConfig(1.3), s).tokens) < 12)
    body = {"prompt": "abc", "max_tokens": 30, "seed": seed, "temperature": 1.3, "drafting": drafting}
    short = alone(engine, "abc", 30, SamplingConfig(1.3), seed).tokens
    found = post(app, TEXT, body | {"min_tokens": 20, "logprobs": 0}).json()["choices"][0]
    tokens = found["logprobs"]["tokens"]
    assert len(tokens) >= 20 and "<end>" not in tokens[:20]
    names = [readable(Spelling(engine.model.tokenizer).bytes(i)) for i in short]
    assert tokens[: len(short) - 1] == names[:-1] and short[-1] == eos
    endless = post(app, TEXT, body | {"ignore_eos": True, "logprobs": 0}).json()["choices"][0]
    assert endless["logprobs"]["tokens"][: len(short)] == names and len(endless["logprobs"]["tokens"]) == 30
    assert endless["finish_reason"] == "length" and found["finish_reason"] in ("stop", "length")


def test_drafts_change_nothing_behind_an_end_of_text_that_is_ignored(app):
    """And neither before one that may not come yet."""
    for field in ({"ignore_eos": True}, {"min_tokens": 40}):
        for seed in range(4):
            body = {"prompt": "abc", "max_tokens": 60, "seed": seed, "temperature": 1.3} | field
            on, off = (post(app, TEXT, body | {"drafting": drafting}).json() for drafting in (True, False))
            assert on["choices"] == off["choices"]
            assert on["usage"]["completion_tokens"] >= 40


def test_usage_in_every_chunk(app):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(app, CHAT, {"messages": HELLO, "max_tokens": 12, "stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == counts[-2] > 0
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_each_response_tells_how_its_drafts_fared(engine):
    app = make_app(engine, "tiny", draft_metrics=True)
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = post(app, CHAT, body).json()
    told = answer["metrics"]["speculative_decoding"]
    histogram, usage = told["acceptance_histogram"], answer["usage"]
    assert len(histogram) == told["num_spec_tokens"] + 1 == engine.drafter.on_device.shape.depth + 1
    assert sum(histogram) == told["num_spec_steps"] <= usage["decoding_steps"]
    accepted = sum(depth * count for depth, count in enumerate(histogram))
    assert accepted == told["num_accepted_draft_tokens"] > 0
    assert accepted == usage["accepted_tokens"]
    assert told["num_draft_tokens"] == usage["drafted_tokens"]
    assert told["mean_acceptance_length"] == pytest.approx(1 + accepted / told["num_spec_steps"])
    assert told["draft_acceptance_rate"] == pytest.approx(accepted / told["num_draft_tokens"])
    chunks = events(post(app, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert [("metrics" in chunk, chunk["choices"] == []) for chunk in chunks] == [
        *[(False, False)] * (len(chunks) - 1),
        (True, True),
    ]
    assert "metrics" not in post(app, CHAT, body | {"n": 2}).json()
    assert "metrics" not in post(app, CHAT, body | {"drafting": False}).json()


@pytest.mark.parametrize("temperature", [0, 1.1])
def test_a_completion_is_what_decode_answers(app, engine, temperature):
    body = {"prompt": "hello", "max_tokens": 30, "temperature": temperature, "seed": 7}
    answer = post(app, TEXT, body).json()
    expected = alone(engine, "hello", 30, SamplingConfig(temperature), 7)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["text"] == expected.text and choice["logprobs"] is None
    assert choice["finish_reason"] == ("stop" if expected.tokens[-1] in engine.model.eos else "length")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, expected.new_tokens)
    assert usage["total_tokens"] == 5 + expected.new_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 <= usage["accepted_tokens"] < min(expected.new_tokens, usage["drafted_tokens"])
    off = post(app, TEXT, body | {"drafting": False}).json()
    assert off["choices"][0]["text"] == expected.text
    assert off["usage"]["accepted_tokens"] == off["usage"]["drafted_tokens"] == 0


@pytest.mark.parametrize("temperature", [0, 1.1])
def test_a_prediction_spares_steps_and_changes_nothing(app, temperature):
    body = {"messages": HELLO, "max_tokens": 30, "temperature": temperature, "seed": 7}
    plain = post(app, CHAT, body).json()
    nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert plain["usage"]["completion_tokens_details"] == nothing
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, parts):
        answer = post(app, CHAT, body | {"prediction": {"type": "content", "content": content}}).json()
        usage = answer["usage"]
        assert answer["choices"] == plain["choices"] and usage["decoding_steps"] < plain["usage"]["decoding_steps"]
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    wrong = post(app, CHAT, body | {"prediction": {"type": "content", "content": text[::-1]}}).json()
    assert wrong["choices"] == plain["choices"]
    again = post(app, CHAT, body).json()
    assert again["usage"]["completion_tokens_details"] == nothing  # the slot has forgotten


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "prediction must be an object with type and content, got"),
        ({"content": "text"}, "prediction must be {"),
        ({"type": "content", "content": "text", "strict": True}, "prediction must be {"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content must be a string, or parts of type"),
        ({"type": "content", "content": "a" * 200}, "prediction: it has 200 tokens, and texts have 120 at most here"),
    ],
)
def test_a_prediction_that_makes_no_sense_is_refused(app, prediction, message):
    answer = post(app, CHAT, {"messages": HELLO, "max_tokens": 1, "prediction": prediction})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(message)
    assert error["param"].startswith("prediction")


def test_a_chat_is_what_decode_answers(app, engine):
    answer = post(app, CHAT, {"messages": HELLO, "max_completion_tokens": 20, "temperature": 0}).json()
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == alone(engine, "hello there", 20, chat=True).text
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " there"}]}]
    same = post(app, CHAT, {"messages": parts, "max_completion_tokens": 20, "temperature": 0}).json()
    assert same["choices"] == answer["choices"]


def test_a_chat_sets_variables_of_the_template(app, engine, monkeypatch):
    """As clients of vLLM turn thinking off."""
    monkeypatch.setattr(
        engine.model.tokenizer, "chat_template", "{{ messages[0].content }}{{ '' if think else '...' }}"
    )
    body = {"messages": HELLO, "max_tokens": 1, "temperature": 0}
    counts = [
        post(app, CHAT, body | {"chat_template_kwargs": variables}).json()["usage"]["prompt_tokens"]
        for variables in ({}, {"think": False}, {"think": True})
    ]
    assert counts == [14, 14, 11]


def test_several_choices_have_seeds_in_a_row(app, engine):
    body = {"prompt": ["one", [116, 119, 111]], "max_tokens": 12, "n": 3, "seed": 40, "temperature": 1.1}
    answer = post(app, TEXT, body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    expected = itertools.product(["one", [116, 119, 111]], range(40, 43))
    texts = [alone(engine, prompt, 12, SamplingConfig(1.1), seed).text for prompt, seed in expected]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == 6


def test_a_stream_adds_up(app):
    body = {"messages": HELLO, "max_tokens": 30, "seed": 3, "n": 2, "temperature": 1.1}
    whole = post(app, CHAT, body).json()
    chunks = events(post(app, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert len({chunk["id"] for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for expected in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in own) == expected["message"]["content"]
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == expected["finish_reason"]
    assert len(chunks) > 8


def test_parts_tell_where_the_text_came_from(app):
    body = {"messages": HELLO, "max_tokens": 60, "sources": True, "temperature": 0}
    [choice] = post(app, CHAT, body).json()["choices"]
    assert "".join(part["text"] for part in choice["parts"]) == choice["message"]["content"]
    chunks = events(post(app, CHAT, body | {"stream": True}))
    assert [part for chunk in chunks for part in chunk["choices"][0].get("parts", [])] == choice["parts"]
    assert choice["parts"][0] == {"text": choice["parts"][0]["text"], "kind": "base", "methods": []}
    kinds = {(part["kind"], *part["methods"]) for part in choice["parts"]}
    allowed = {("base",), ("learnt", "ppd"), ("lookup", "prompt_lookup"), ("learnt", "ppd", "prompt_lookup")}
    assert {("base",)} < kinds <= allowed


def test_logprobs_of_a_completion_with_its_prompt(app, engine):
    body = {"prompt": "hello", "max_tokens": 10, "logprobs": 2, "echo": True, "temperature": 0}
    [choice] = post(app, TEXT, body).json()["choices"]
    expected = alone(engine, "hello", 10)
    told, ids = choice["logprobs"], [*engine.model.encode("hello", chat=False), *expected.tokens]
    own = log_probabilities(engine.model, ids)[np.arange(len(ids) - 1), ids[1:]]
    assert choice["text"] == "hello" + expected.text
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    np.testing.assert_allclose(told["token_logprobs"][1:], own, atol=1e-4)
    assert told["tokens"] == [readable(Spelling(engine.model.tokenizer).bytes(i)) for i in ids]
    assert told["text_offset"][:6] == list(range(6))
    streamed = events(post(app, TEXT, body | {"stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    same = {name: [x for part in parts for x in part[name]] for name in told}
    assert all(same[name] == told[name] for name in ("tokens", "text_offset"))
    # Another number of rows may have been there, which rounds differently.
    np.testing.assert_allclose(same["token_logprobs"][1:], told["token_logprobs"][1:], atol=1e-4)
    for one, other in zip(same["top_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    scored = post(app, TEXT, body | {"max_tokens": 0}).json()["choices"][0]
    assert scored["text"] == "hello" and scored["logprobs"]["tokens"] == list("hello")
    np.testing.assert_allclose(scored["logprobs"]["token_logprobs"][1:], own[:4], atol=1e-4)


def test_logprobs_of_a_chat(app, engine):
    body = {"messages": HELLO, "max_tokens": 8, "logprobs": True, "top_logprobs": 3, "seed": 1}
    [choice] = post(app, CHAT, body).json()["choices"]
    ids = engine.model.encode("hello there")
    tokens = alone(engine, "hello there", 8, SamplingConfig(1.0), 1, chat=True).tokens
    expected = log_probabilities(engine.model, ids + tokens)[len(ids) - 1 :]
    told = choice["logprobs"]["content"]
    np.testing.assert_allclose([each["logprob"] for each in told], expected[np.arange(len(tokens)), tokens], atol=1e-4)
    best = [[one["logprob"] for one in each["top_logprobs"]] for each in told]
    np.testing.assert_allclose(best, np.sort(expected, axis=-1)[:, :-4:-1], atol=1e-4)
    shown = [bytes(each["bytes"]) for each in told]
    assert [each["token"] for each in told] == [readable(own) for own in shown]
    assert b"".join(shown).decode(errors="replace").removesuffix("<end>") == choice["message"]["content"]


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


def measured(app):
    """Every sample of /metrics, by its name and the labels beside the model's."""
    samples = {}
    for family in text_string_to_metric_families(get(app, "/metrics").text):
        for sample in family.samples:
            assert sample.name.startswith("process_") or sample.labels["model_name"] == "tiny"
            rest = [value for name, value in sample.labels.items() if name != "model_name"]
            samples[":".join([sample.name, *rest])] = sample.value
    return samples


def test_tokens_that_were_not_read_again_are_told(app, engine):
    before = measured(app)
    body = {"prompt": "two chunks of sixteen, and a rest", "max_tokens": 3, "temperature": 0}
    usages = [post(app, TEXT, body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 32]
    asyncio.run(idle(engine))
    grown = {name: value - before[name] for name, value in measured(app).items() if "prefix_cache" in name}
    assert grown["vllm:prefix_cache_queries_total"] == 2 * len(body["prompt"])
    assert grown["vllm:prefix_cache_hits_total"] == 32


def test_prefill_takes_until_the_first_token_is_known(app, engine, monkeypatch):
    """Devices work on after the call that reads a prompt."""
    before, progress = measured(app), engine._slots.progress

    def slow():
        time.sleep(0.2)
        return progress()

    monkeypatch.setattr(engine._slots, "progress", slow)
    assert post(app, TEXT, {"prompt": "abc", "max_tokens": 1}).status_code == 200
    asyncio.run(idle(engine))
    name = "vllm:request_prefill_time_seconds_sum"
    assert measured(app)[name] - before.get(name, 0) >= 0.2


def test_metrics_agree_with_the_answers(app, engine):
    before = measured(app)
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "n": 2}
    usages = [post(app, CHAT, body | {"max_tokens": count}).json()["usage"] for count in (40, 25)]
    asyncio.run(idle(engine))
    after = measured(app)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    accepted = sum(usage["accepted_tokens"] for usage in usages)
    assert grown["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    per_position = [v for n, v in grown.items() if n.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    assert sum(per_position) == accepted
    drafts = grown["vllm:spec_decode_num_drafts_total"]
    assert 0 < drafts <= sum(usage["decoding_steps"] for usage in usages)
    drafted = sum(usage["drafted_tokens"] for usage in usages)
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == drafted > max(drafts, accepted)
    ended = [v for n, v in grown.items() if n.startswith("vllm:request_success_total")]
    assert sum(ended) == grown["vllm:e2e_request_latency_seconds_count"] == 4
    assert grown["vllm:time_to_first_token_seconds_count"] == grown["vllm:request_decode_time_seconds_count"] == 4
    between = grown["vllm:inter_token_latency_seconds_count"]
    assert 0 < between < grown["vllm:generation_tokens_total"]
    assert after["process_resident_memory_bytes"] > 1e7
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
