"""The program that serves: its options, and a real process from its start to SIGTERM."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from jaxspec.cli import serve
from jaxspec.errors import UserError
from tests.helpers.cli import named


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "-1"], "port must be at least 0"),
        (["--port", "70000"], "port must be at most 65535"),
        (["--grace", "-1"], "grace must be at least 0"),
        (["--limits.slots", "0"], "slots must be at least 1"),
        (["--limits.top-logprobs", "-2"], "top-logprobs must be at least -1"),
        (["--acept", "match"], "did you mean '--accept'"),
        (["--host", "no such host"], "cannot listen at no such host:8000 .* choose another --host or --port"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        serve.main(options)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(serve, "_NEEDED", ("starlette", "no_such_package"))
    with pytest.raises(UserError, match=r"needs no_such_package; install with: pip install 'jaxspec\[serve\]'"):
        serve.main([])


def test_a_taken_port_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.delattr(serve, "load_model")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="Address already in use"):
        serve.main(["--port", str(taken.getsockname()[1])])


@pytest.mark.slow
def test_from_the_start_to_sigterm(files):
    """Ready once warm; what runs when SIGTERM comes is finished, and the exit is clean."""
    options = ["--limits.slots", "2", "--limits.max-length", "200", "--method", "ppd", *named(files)]
    command = [sys.executable, "serve.py", "--port", "0", "--name", "tiny", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(serve.__file__).parents[2])
    log = []
    for line in process.stderr:
        log.append(line)
        if "ready after" in line:
            break
    assert process.poll() is None, log
    url = re.search(r"http://\S+", log[-1])[0]
    assert json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"] == "tiny"
    body = {"prompt": "hello", "max_tokens": 150, "temperature": 1.0, "n": 6, "stream": True}
    stream = urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode())
    first = stream.readline()
    process.send_signal(signal.SIGTERM)
    reader = threading.Thread(target=lambda: log.extend(process.stderr))
    reader.start()
    events = [json.loads(line[6:]) for line in [first, *stream] if line.startswith(b"data: {")]
    assert process.wait(60) == 0
    reader.join()
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(6))
    assert any("/v1/completions 200 prompt 5 new" in line for line in log)
    assert "Traceback" not in "".join(log)
