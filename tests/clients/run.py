"""Run clients against a server with a tiny model: python -m tests.clients.run [NAME ...].

Every client gets an environment of its own. Each of its answers that is certain, greedy or of a given seed, must be the
text that decoding alone writes. What was sent is stored, in short, for the tests of every day.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxspec.methods import PPD, PromptLookup
from jaxspec.serving.api import make_app
from jaxspec.serving.engine import Engine, Limits
from tests.clients.catalogue import CLIENTS, Client, Setting
from tests.clients.certain import certain_texts
from tests.clients.recorder import Recorder
from tests.clients.requests import store
from tests.helpers.methods import union
from tests.helpers.serving import served
from tests.helpers.tiny import make_chat_model

ENVIRONMENTS = Path(".venv/clients")
MAX_LENGTH = 512  # of prompt and answer, in tokens
SECONDS = 600  # that a command may take


def main() -> None:
    """Run the clients that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CLIENTS)}; all unless some are named")
    names = parser.parse_args().names or list(CLIENTS)
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"there is no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    failed = [name for name in names if not _passes(name, CLIENTS[name])]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _passes(name: str, client: Client) -> bool:
    """Run a client's commands, check its answers, and say how it went."""
    python = _environment(name, client.packages)
    with _server() as (engine, url, recorder), tempfile.TemporaryDirectory() as work:
        setting = Setting(url, python, Path(work) / "tokenizer", Path(work) / "files")
        setting.work.mkdir()
        engine.model.tokenizer.save_pretrained(setting.tokenizer)
        commands = client.commands(setting)
        good = all([_runs(command, setting) for command in commands])
        answers = [one for one in recorder.exchanges if one.status == 200 and one.path.endswith("completions")]
        expected = [certain_texts(one.path, one.body, engine.model, MAX_LENGTH) for one in answers]
    same = [one.texts == texts for one, texts in zip(answers, expected, strict=True) if texts is not None]
    refused = [one for one in recorder.exchanges if one.status >= 400]
    for one in refused:
        print(f"{name}: {one.method} {one.path} {one.status} {one.answer.decode()[:200]}")
    ran = f"{len(commands)} commands {'ran' if good else 'FAILED'}, {len(answers)} answers, {len(refused)} refusals"
    version = _version(python, client.packages[0])
    print(f"{name} {version}: {ran}; of {len(same)} certain answers {sum(same)} as decoding alone")
    if good:
        store(name, answers)
    return good and bool(same) and all(same)


def _version(python: Path, package: str) -> str:
    """The version of an installed package."""
    told = f"from importlib.metadata import version; print(version({package.split('[')[0]!r}))"
    return subprocess.run([str(python), "-c", told], capture_output=True, text=True, check=True).stdout.strip()


def _environment(name: str, packages: Sequence[str]) -> Path:
    """The Python of a client's environment, which is made if it is not there."""
    folder = (ENVIRONMENTS / name).absolute()
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"{name}: installing {', '.join(packages)}")
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--retries", "3", *packages], check=True)
        (folder / "made").touch()
    return python


@contextmanager
def _server() -> Iterator[tuple[Engine, str, Recorder]]:
    """A server in a thread of this process: its engine, its address and what it was asked."""
    drafter = union([PPD(), PromptLookup()], make_chat_model(num_layers=1, max_positions=MAX_LENGTH), 6)
    limits = Limits(slots=4, queue=64, max_length=MAX_LENGTH, prompt_chunk=64)
    with Engine(drafter.model, drafter, limits) as engine:
        recorder = Recorder(make_app(engine, "tiny"))
        with served(recorder) as port:
            yield engine, f"http://127.0.0.1:{port}", recorder


def _runs(command: Sequence[str], setting: Setting) -> bool:
    """Whether a command ends well; shows the end of its output."""
    keys = {"OPENAI_BASE_URL": f"{setting.url}/v1", "OPENAI_API_BASE": f"{setting.url}/v1", "OPENAI_API_KEY": "none"}
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    own = {"LLM_USER_PATH": str(setting.work)}
    told = subprocess.run(
        command, cwd=setting.work, env=kept | keys | own, capture_output=True, text=True, timeout=SECONDS
    )
    shown = told.stdout if told.returncode == 0 else told.stdout + told.stderr
    print(f"$ {Path(command[0]).name} {' '.join(command[1:3])} ...", *shown.strip().splitlines()[-12:], sep="\n    ")
    return told.returncode == 0


if __name__ == "__main__":
    main()
