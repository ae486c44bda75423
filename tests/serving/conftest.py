"""One engine for all tests of a process: its programs take seconds to compile."""

import threading
import time

import pytest
import uvicorn

from jaxspec.methods import PPD, PromptLookup
from jaxspec.serving.api import make_app
from jaxspec.serving.engine import Engine
from tests.helpers.methods import union
from tests.helpers.serving import LIMITS
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="session")
def drafter():
    """A learnt source and one that looks things up, joined."""
    return union([PPD(), PromptLookup()], make_text_model(num_layers=1), 6)


@pytest.fixture(scope="session")
def engine(drafter):
    with Engine(drafter.model, drafter, LIMITS) as engine:
        yield engine


@pytest.fixture(scope="session")
def port(engine):
    """A server in a thread of this process, whose key is `secret`."""
    config = uvicorn.Config(make_app(engine, "tiny", api_key="secret"), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()
