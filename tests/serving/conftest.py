"""One engine for all tests of a process: its programs take seconds to compile."""

import pytest

from jaxspec.methods import PPD, PromptLookup
from jaxspec.serving.api import make_app
from jaxspec.serving.engine import Engine
from tests.helpers.methods import union
from tests.helpers.serving import LIMITS, served
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="session")
def drafter():
    """A learnt source and one that looks things up, joined."""
    return union([PPD(), PromptLookup()], make_text_model(num_layers=1), 6)


@pytest.fixture(scope="session")
def engine(drafter):
    with Engine(drafter.model, drafter, LIMITS) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine):
    return make_app(engine, "tiny", max_body_bytes=10_000)


@pytest.fixture(scope="session")
def port(engine):
    """A server in a thread of this process, whose key is `secret`."""
    with served(make_app(engine, "tiny", api_key="secret")) as port:
        yield port
