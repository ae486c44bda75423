"""The OpenAI interface in this process: fields, streams, metrics."""

import asyncio
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
from jaxspec.serving.fields import ApiError
from jaxspec.serving.protocol import parse
from jaxspec.weights.spelling import Spelling, readable
from tests.helpers.model import log_probabilities
from tests.helpers.serving import CHAT, HELLO, TEXT, call, events, get, idle, post

LENGTH = {"max_model_len": 120}


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
