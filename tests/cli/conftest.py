"""What the commands are tried on."""

import json

import pytest

from jaxspec.cli import decode
from tests.helpers.cli import arguments, save_with_adapter, write_prompts
from tests.helpers.tiny import make_text_model


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A tiny model directory, an adapter for it, and a prompt file. Tests that change files do so to a copy."""
    folder = tmp_path_factory.mktemp("cli")
    save_with_adapter(folder, make_text_model(num_layers=1))
    write_prompts(folder / "prompts.jsonl", "one", "two, longer", "three")
    return folder


@pytest.fixture
def decode_rows(files, capsys):
    """Decodes with these options and --json; the objects."""

    def run(*options):
        decode.main(arguments(files, "--json", *options))
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def decode_text(files, capsys):
    """Decodes with these options; stdout and stderr."""

    def run(*options):
        decode.main(arguments(files, *options))
        return capsys.readouterr()

    return run


@pytest.fixture
def all_prompts(files):
    """The option that names the prompt file."""
    return ["--prompts", str(files / "prompts.jsonl")]
