"""What clients have sent, sent again; `make clients` runs the clients themselves."""

import json

import pytest

from jaxspec.methods import PPD, PromptLookup
from jaxspec.serving.api import make_app
from jaxspec.serving.engine import Engine, Limits
from tests.clients.certain import certain_texts
from tests.clients.recorder import Exchange
from tests.clients.requests import stored
from tests.helpers.methods import union
from tests.helpers.serving import post
from tests.helpers.tiny import make_chat_model

LIMITS = Limits(slots=2, queue=8, max_length=400, prompt_chunk=64)  # descriptions of tools are long
MODEL = make_chat_model(num_layers=1, max_positions=400)


@pytest.fixture(scope="module")
def app():
    with Engine(MODEL, union([PPD(), PromptLookup()], MODEL, 6), LIMITS) as engine:
        yield make_app(engine, "tiny")


@pytest.mark.parametrize(("client", "path", "body"), list(stored()))
def test_what_clients_send_is_answered_as_decoding_alone_does(client, path, body, app):
    response = post(app, path, body)
    assert response.status_code == 200, response.text
    expected = certain_texts(path, json.dumps(body).encode(), MODEL, LIMITS.max_length)
    texts = Exchange("POST", path, answer=response.content).texts
    assert all(isinstance(text, str) for text in texts) and expected in (None, texts)
