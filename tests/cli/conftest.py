"""What the entry points are tried on."""

import pytest

import decode
import train
import tune
from tests.helpers.cli import save_with_adapter
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model directory, an adapter for it, and a prompt file."""
    folder = tmp_path_factory.mktemp("cli")
    save_with_adapter(folder, make_text_model())
    (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two, longer"}\n{"prompt": "three"}\n')
    return folder


@pytest.fixture(autouse=True)
def no_cache_on_disk(monkeypatch):
    monkeypatch.setattr(decode, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(tune, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(train, "enable_compilation_cache", lambda: None)
