"""Runs in processes of their own: several at once, killed ones, politely stopped ones."""

import collections
import json
import random
import shutil
import signal
import socket
import time

import numpy as np
import pytest
import safetensors.numpy

from tests.helpers.training import command, finish, prepare, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The undisturbed run."""
    finish(start(command(folder, "whole")))
    return folder / "whole"


def assert_same_run(run, whole, exactly=True):
    """The same adapter, losses and answers."""
    ours, theirs = (safetensors.numpy.load_file(path / "adapter.safetensors") for path in (run, whole))
    losses = [
        {row["step"]: row["loss"] for row in map(json.loads, (path / "log.jsonl").open()) if "loss" in row}
        for path in (run, whole)
    ]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 61))
    evaluations = [
        {row["step"]: row["top1"] for row in map(json.loads, (path / "log.jsonl").open()) if "held_out" in row}
        for path in (run, whole)
    ]
    assert evaluations[0].keys() == evaluations[1].keys() == {25, 50, 60}
    best = [json.loads((path / "best" / "adapter.json").read_text())["step"] for path in (run, whole)]
    assert not exactly or (evaluations[0] == evaluations[1] and best[0] == best[1])
    check = np.testing.assert_array_equal if exactly else lambda x, y: np.testing.assert_allclose(x, y, 2e-3, 2e-4)
    for name in theirs:
        check(ours[name], theirs[name])
    check([losses[0][s] for s in range(1, 61)], [losses[1][s] for s in range(1, 61)])
    answers = [
        sorted(line for file in path.with_name(f"{path.name}-answers").glob("*.jsonl") for line in file.open())
        for path in (run, whole)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 36  # none twice, none missing


def meeting():
    """Settings of two processes that meet at a port that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return ["--processes.coordinator", address, "--processes.count", "2", "--mesh.data", "1", "--mesh.fsdp", "2"]


def start_two(folder, output):
    """Both processes of a run."""
    processes = meeting()
    return [start(command(folder, output, *processes, "--processes.index", str(i))) for i in range(2)]


def test_two_processes_are_as_one(folder, whole):
    """Over the loopback, each with one device; the first one writes."""
    both = start_two(folder, "two")
    texts = [finish(process) for process in both]
    assert "adapter:" in texts[0] and "adapter:" not in texts[1]
    assert_same_run(folder / "two", whole, exactly=False)


def test_a_process_that_is_left_alone_says_so(folder):
    """One is killed while they train; the other neither waits nor shows a traceback, and both go on later."""
    both = start_two(folder, "lost")
    while not lines_written(folder / "lost")[1]:
        time.sleep(0.005)
        assert both[0].poll() is None
    both[1].kill()
    text = finish(both[0], code=2)
    assert "error: the processes lost each other" in text and "Traceback" not in text, text
    finish(start(command(folder, "lost", "--resume", "--mesh.data", "1")))


def test_sigterm_saves_and_ends_well(folder, whole):
    run = start(command(folder, "stopped"), JAX_ENABLE_COMPILATION_CACHE="false")  # so that it does not end too soon
    log = folder / "stopped" / "log.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) > 6):
        time.sleep(0.005)
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert "--resume goes on from there" in finish(run)
    assert time.monotonic() - began < 60
    steps = sum('"loss"' in line for line in log.read_text().splitlines())
    assert steps < 60 and str(steps) in {path.name for path in (folder / "stopped" / "checkpoints").iterdir()}
    finish(start(command(folder, "stopped", "--resume")))
    assert_same_run(folder / "stopped", whole)


def test_sigterm_while_answers_are_made(folder, whole):
    """There is nothing to save: what is there is on disk."""
    run = start(command(folder, "asked"))
    while not lines_written(folder / "asked")[0]:
        time.sleep(0.005)
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    finish(run)
    answers, updates = lines_written(folder / "asked")
    assert 0 < answers < 36 and not updates
    finish(start(command(folder, "asked", "--resume")))
    assert_same_run(folder / "asked", whole)


def test_sigterm_where_one_of_several_waits_for_another(folder):
    """While they make answers none can hear of the others' signals; later all save together."""
    both = start_two(folder, "left")
    while not lines_written(folder / "left")[0]:
        time.sleep(0.005)
        assert both[0].poll() is None
    for process in both:
        process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert all("--resume goes on from there" in finish(process) for process in both)
    assert time.monotonic() - began < 60


def lines_written(folder):
    """Answers, and rows of the log."""
    answers, log = folder.with_name(f"{folder.name}-answers").glob("*.jsonl"), folder / "log.jsonl"
    files = [*answers], [log] if log.exists() else []
    return tuple(sum(path.read_bytes().count(b"\n") for path in paths) for paths in files)


def kill(run, folder, rng):
    """By SIGKILL: when it has written a few answers or updates, or sometimes before. What it was at, if it was."""
    before = lines_written(folder)
    enough = sum(before) + rng.randint(1, 12)
    due = time.monotonic() + rng.choice([rng.uniform(4, 30), 600, 600])
    while run.poll() is None and time.monotonic() < due and sum(lines_written(folder)) < enough:
        time.sleep(0.005)
    if run.poll() is not None:
        return "ended"
    answers, updates = lines_written(folder)
    run.kill()
    return "training" if updates > before[1] else "answering" if before[0] < answers < 36 else "something else"


def test_twenty_kills(folder, whole):
    """At any moment: while answers are made, while it compiles, trains, saves or evaluates."""
    rng, met = random.Random(0), collections.Counter()
    for _ in range(60):
        if met.total() - met["ended"] >= 20 and min(met["answering"], met["training"]) >= 3:
            break
        run = start(command(folder, "killed", "--resume"))
        met[kill(run, folder / "killed", rng)] += 1
        text, _ = run.communicate()
        assert run.returncode in (0, -signal.SIGKILL), text
        if run.returncode == 0:  # through already: kill others like it
            assert_same_run(folder / "killed", whole)
            shutil.rmtree(folder / "killed")
            shutil.rmtree(folder / "killed-answers")
    assert met.total() - met["ended"] >= 20 and min(met["answering"], met["training"]) >= 3, met
    finish(start(command(folder, "killed", "--resume")))
    assert_same_run(folder / "killed", whole)
