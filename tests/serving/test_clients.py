"""The real client of the OpenAI interface over a real socket, and many rounds of random requests."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time

import numpy as np
import openai
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.drafters.defaults import with_default
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.methods import DraftModel, PromptLookup
from jaxspec.serving.engine import Engine, Limits
from tests.helpers.methods import union
from tests.helpers.serving import idle
from tests.helpers.tiny import make_text_model
from tests.serving.test_engine import check_round, random_requests

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)


def alone(engine, seed, limit=20):
    """What `jaxspec decode` answers to HELLO."""
    settings = {"sampling": SamplingConfig(1.1), "seed": seed}
    return generate(autoregressive(engine.model), ["hello there"], limit, **settings)[0]


def test_a_chat(client, engine):
    settings = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 1.1}
    answer = client.chat.completions.create(**settings, n=3, seed=5, logprobs=True, top_logprobs=2)
    expected = [alone(engine, seed) for seed in (5, 6, 7)]
    assert [choice.message.content for choice in answer.choices] == [one.text for one in expected]
    assert answer.usage.completion_tokens == sum(one.new_tokens for one in expected)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    for choice, one in zip(answer.choices, expected, strict=True):
        assert len(choice.logprobs.content) == one.new_tokens
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in choice.logprobs.content)


def test_a_stream(client, engine):
    settings = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 1.1, "seed": 5}
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone(engine, 5).text and chunks[-1].usage.total_tokens > 0
    stop = text[4:6]
    stopped = client.chat.completions.create(**settings, stop=stop).choices[0]
    assert stopped.message.content == text[: text.index(stop)] and stopped.finish_reason == "stop"


def test_completions_models_and_errors(client):
    [choice] = client.completions.create(model="tiny", prompt="abc", max_tokens=3, echo=True, logprobs=1).choices
    assert choice.text.startswith("abc") and len(choice.logprobs.tokens) <= 6
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is 'tiny'"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature must be between") as error:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        (b'{"prompt": "\xff"}', 400, "not valid UTF-8"),
        (b'{"prompt": "a"}', 200, "choices"),
    ],
)
def test_curl_sends_raw_bodies(port, body, status, said):
    options = ["-s", "-w", "\n%{http_code}", "-H", "Authorization: Bearer secret", "--data-binary", "@-"]
    command = ["curl", *options, f"http://127.0.0.1:{port}/v1/completions"]
    answer, code = subprocess.run(command, input=body, capture_output=True, check=True).stdout.decode().rsplit("\n", 1)
    assert int(code) == status and said in answer and json.loads(answer)


@contextlib.contextmanager
def connection(port, body):
    """A socket that has sent a request."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(content)}"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # what is not read waits with the server
        sock.connect(("127.0.0.1", port))
        sock.sendall(head.encode() + b"\r\n\r\n" + content)
        yield sock


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_frees_the_slot(port, engine, stream):
    body = {"prompt": "abc", "max_tokens": 100, "n": 30, "stream": stream}
    with connection(port, body) as sock:
        if stream:
            sock.recv(1000)
        while not engine.running:
            time.sleep(0.001)
    asyncio.run(idle(engine))


def test_a_slow_reader_holds_up_nobody(port, engine, client):
    with connection(port, {"prompt": "abc", "max_tokens": 100, "n": 30, "stream": True}) as sock:
        answer = client.completions.create(model="tiny", prompt="abc", max_tokens=5)
        assert answer.usage.completion_tokens
        asyncio.run(idle(engine))
        text = b""
        while not text.endswith(b"0\r\n\r\n") and (new := sock.recv(2**20)):  # up to the last chunk
            text += new
    assert b"data: [DONE]" in text and text.count(b'"finish_reason": "') == 30


def test_64_requests_over_8_slots(drafter):
    with Engine(drafter.model, drafter, Limits(slots=8, queue=64, max_length=120, prompt_chunk=16)) as engine:
        rng = np.random.default_rng(8)
        asyncio.run(check_round(engine, list(random_requests(rng, 64)), rng))


def test_steps_of_measured_sizes_and_a_draft_model_that_rests():
    drafter = union([DraftModel(), PromptLookup()], make_text_model(num_layers=1), 4)
    drafter = with_default(drafter)
    with Engine(drafter.model, drafter, Limits(slots=2, queue=24, max_length=120, prompt_chunk=16)) as engine:
        engine.warm_up()
        rng = np.random.default_rng(9)
        asyncio.run(check_round(engine, list(random_requests(rng, 24)), rng))


def test_many_rounds(engine):
    """Nothing is lost and no slot leaks. The same requests come again, joined and cancelled at other moments."""

    known = [list(random_requests(np.random.default_rng(seed), 24)) for seed in range(4)]

    async def rounds(seconds=30):
        began = time.monotonic()
        for number in range(50):
            await check_round(engine, known[number % len(known)], np.random.default_rng(number))
            if time.monotonic() - began > seconds:
                break
        return number + 1

    assert asyncio.run(rounds()) > len(known)
