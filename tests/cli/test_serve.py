"""The program that serves: its options, and a real process from its start to SIGTERM."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn

from jaxspec.cli import serve
from jaxspec.cli.options import parse
from jaxspec.errors import UserError
from jaxspec.serving.server import Server
from tests.helpers.cli import named


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "-1"], "port must be at least 0"),
        (["--port", "70000"], "port must be at most 65535"),
        (["--grace", "-1"], "grace must be at least 0"),
        (["--grace", "nan"], "grace must be at least 0, got nan"),
        (["--limits.slots", "0"], "slots must be at least 1"),
        (["--limits.top-logprobs", "-2"], "top-logprobs must be at least -1"),
        (["--allow-origin", "localhost"], r"allow-origin must be \* or an origin .* got 'localhost'"),
        (["--allow-origin", "null"], "browsers send it for every file and every sandboxed frame"),
        (["--acept", "match"], "did you mean '--accept'"),
        (["--host", "no such host"], "cannot listen at no such host:8000 .* choose another --host or --port"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        serve.main(options)


def test_an_adapter_names_the_method(files):
    for options, methods in ((named(files), ["ppd"]), ([], ["hidden_transfer", "prompt_lookup"])):
        spec = parse(serve.ServeOptions, options).drafter()
        assert [each.method.name for each in spec.methods] == methods


def test_a_second_ctrl_c_does_not_wait_for_requests(capsys, monkeypatch):
    monkeypatch.setattr("os._exit", sys.exit)
    server = Server(uvicorn.Config(None, log_config=None), print)
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and "Ctrl-C again ends at once" in capsys.readouterr().err
    server.handle_exit(signal.SIGTERM, None)
    with pytest.raises(SystemExit) as exit:
        server.handle_exit(signal.SIGINT, None)
    assert exit.value.code == 130


@pytest.mark.parametrize(
    "text", ["http://a.example", "http://localhost:3000", "https://[::1]:8443", "app://main", "http://xn--e1a.example"]
)
def test_origins_of_pages(text):
    assert serve.is_origin(text)


@pytest.mark.parametrize(
    "text",
    [
        *("a.example", "javascript:alert(1)", "http://", "http://:80", "http://a.example/page", "http://a?b"),
        *("http://me@a.example", "https://*.a.example", "http://a b", "http://a,http://b", "http://a\nb"),
        *("http://a:99999", "http://a:x", "http://a:", "http://[::1", "http://[1.2]", "http://A", "http://é.example"),
        *("http://a:80", "https://a:443"),  # no browser sends the usual port
    ],
)
def test_what_no_browser_sends_as_an_origin(text):
    assert not serve.is_origin(text)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(serve, "_NEEDED", ("starlette", "no_such_package"))
    with pytest.raises(UserError, match=r"needs no_such_package; .* pip install -e '\.\[serve\]'"):
        serve.main([])


def test_a_taken_port_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(serve.ServeOptions, "load_model", None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="Address already in use"):
        serve.main(["--port", str(taken.getsockname()[1])])


def test_a_folder_answers_to_its_last_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    path = str(tmp_path / "mine")
    assert serve.names("", path) == ["mine", path] and serve.names("", ".") == ["mine", "."]
    assert serve.names("", "owner/name") == ["owner/name", "name"]
    assert serve.names("", "smollm2-135m") == ["smollm2-135m"]
    assert serve.names("given", path) == ["given"]


class Served:
    """A process that serves, from when it is ready; killed at the end where it has not ended by itself."""

    def __init__(self, files, *options):
        words = ["jaxspec", "serve", "--name", "tiny", "--method", "ppd", *named(files), *options]
        command = [sys.executable, "-m", *words]
        how = {"cwd": Path(serve.__file__).parents[2], "env": os.environ | {"HOME": str(files.parent / "home")}}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **how)
        self.log, self._ready = [], threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            if "ready after" in line:
                self._ready.set()
        self._ready.set()

    def __enter__(self):
        self._ready.wait()
        assert self.process.poll() is None, self.log
        self.url = re.search(r"ready after .*(http://\S+)", "".join(self.log))[1]
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def get(self, path):
        return urllib.request.urlopen(self.url + path).read().decode()

    def complete(self, **body):
        return urllib.request.urlopen(f"{self.url}/v1/completions", json.dumps(body).encode())

    def memory(self):
        """Bytes."""
        return float(re.search(r"^process_resident_memory_bytes (\S+)$", self.get("/metrics"), re.MULTILINE)[1])


@pytest.mark.slow
def test_from_the_start_to_sigterm(files):
    """Ready once warm; what runs when SIGTERM comes is finished, and the exit is clean."""
    with Served(files, "--port", "0", "--limits.slots", "2", "--limits.max-length", "200") as served:
        assert json.loads(served.get("/v1/models"))["data"][0]["id"] == "tiny"
        stream = served.complete(prompt="hello", max_tokens=150, temperature=1.0, n=6, stream=True)
        first = stream.readline()
        served.process.send_signal(signal.SIGTERM)
        events = [json.loads(line[6:]) for line in [first, *stream] if line.startswith(b"data: {")]
        assert served.process.wait(60) == 0
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(6))
    assert any("/v1/completions 200 prompt 5 new" in line for line in served.log)
    assert "Traceback" not in "".join(served.log)
    costs = files.parent / "home" / ".cache" / "jaxspec" / "costs.json"
    busy = any("costs of steps are not kept: of two alike" in line for line in served.log)
    assert costs.exists() or busy  # what steps cost, for later starts; on a busy machine some or nothing


def flood(url, count):
    """Status and Retry-After of so many requests over one connection."""
    connection, body = http.client.HTTPConnection(url.removeprefix("http://")), b'{"prompt": "a", "max_tokens": 90}'
    with contextlib.closing(connection):
        for _ in range(count):
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            response.read()
            yield response.status, response.headers["retry-after"]


@pytest.mark.slow
def test_a_kill_leaves_the_port_free_and_a_flood_the_memory_flat(files):
    small = ("--limits.slots", "1", "--limits.queue", "0", "--limits.max-length", "100")
    with Served(files, "--port", "0", *small) as killed:
        text = json.load(killed.complete(prompt="a", max_tokens=50, seed=3))["choices"][0]["text"]
        killed.complete(prompt="a", max_tokens=90, stream=True).readline()
        killed.process.send_signal(signal.SIGKILL)
        assert killed.process.wait(10) == -signal.SIGKILL
    with Served(files, "--port", killed.url.rpartition(":")[2], *small) as served:
        assert json.load(served.complete(prompt="a", max_tokens=50, seed=3))["choices"][0]["text"] == text
        taken = []
        for count in (200, 1050):
            with ThreadPoolExecutor(8) as pool:
                each = pool.map(list, [flood(served.url, count) for _ in range(8)])
                answers = [answer for of_one in each for answer in of_one]
            assert {*answers} == {(200, None), (429, "1")} and answers.count((429, "1")) > len(answers) / 2
            taken.append(served.memory())
        assert taken[1] < 1.02 * taken[0]
        assert json.load(served.complete(prompt="a", max_tokens=50, seed=3))["choices"][0]["text"] == text
    assert "Traceback" not in "".join(served.log)
