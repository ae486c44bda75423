"""Runs in processes of their own: several at once, killed ones, politely stopped ones."""

import collections
import random
import shutil
import signal
import socket
import time

import numpy as np
import pytest

from tests.helpers.training import assert_same_run, command, evaluated, finish, losses, prepare, start

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
    assert losses(folder / "whole").keys() == set(range(1, 61)) and evaluated(folder / "whole").keys() == {25, 50, 60}
    assert len(answers(folder / "whole")) == 36
    return folder / "whole"


def answers(run):
    """Lines of its cache."""
    return sorted(line for file in run.with_name(f"{run.name}-answers").glob("*.jsonl") for line in file.open())


def lines_written(run):
    """Answers, and rows of the log."""
    log = run / "log.jsonl"
    return len(answers(run)), log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for(condition, process):
    while not condition():
        time.sleep(0.005)
        assert process.poll() is None


def start_two(folder, output, *more, **config):
    """Both processes of a run, which meet at a port that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    meeting = ["--processes.coordinator", address, "--processes.count", "2", "--mesh.data", "1", "--mesh.fsdp", "2"]
    return [start(command(folder, output, *meeting, *more, "--processes.index", str(i), **config)) for i in range(2)]


def assert_same(run, whole, **tolerance):
    """Answers too: none twice, none missing."""
    assert_same_run(run, whole, **tolerance)
    assert answers(run) == answers(whole)


def test_two_processes_are_as_one(folder, whole):
    """Over the loopback, each with one device; the first one writes."""
    texts = [finish(process) for process in start_two(folder, "two")]
    assert "adapter:" in texts[0] and "adapter:" not in texts[1]
    assert_same(folder / "two", whole, rtol=2e-3, atol=2e-4)


@pytest.mark.exhaustive
def test_two_processes_learn_to_draft_the_same_tokens(folder):
    """Of a method that learns the most frequent ones alone, on a projection of its own."""
    settings = ["--method.vocabulary", "64", "--draft-vocabulary", "64", "--method.own-head"]
    settings += ["--method.reads", "0", "1", "--train.steps", "6", "--train.eval-every", "0"]
    finish(start(command(folder, "eagle", *settings, config="eagle_smollm2")))
    for process in start_two(folder, "two-eagle", *settings, config="eagle_smollm2"):
        finish(process)
    one, two = (list(losses(folder / name).values()) for name in ("eagle", "two-eagle"))
    np.testing.assert_allclose(two, one, rtol=2e-3)


def test_a_process_that_is_left_alone_says_so(folder):
    """One is killed while they train; the other neither waits nor shows a traceback, and both resume later."""
    both = start_two(folder, "lost")
    wait_for(lambda: lines_written(folder / "lost")[1], both[0])
    both[1].kill()
    text = finish(both[0], code=2)
    assert "error: the processes lost each other" in text and "Traceback" not in text, text
    finish(start(command(folder, "lost", "--resume", "--mesh.data", "1")))


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)]
)
def test_a_signal_saves_and_ends_well(folder, whole, sent, code):
    name = sent.name
    run = start(command(folder, name), JAX_ENABLE_COMPILATION_CACHE="false")  # so that it does not end too soon
    wait_for(lambda: lines_written(folder / name)[1] > 6, run)
    run.send_signal(sent)
    began = time.monotonic()
    assert "continue with --resume" in finish(run, code=code)
    assert time.monotonic() - began < 60
    steps = len(losses(folder / name))
    assert steps < 60 and str(steps) in {path.name for path in (folder / name / "checkpoints").iterdir()}
    finish(start(command(folder, name, "--resume")))
    assert_same(folder / name, whole)


@pytest.mark.exhaustive
def test_sigterm_while_answers_are_made(folder, whole):
    """There is nothing to save: what is there is on disk."""
    run = start(command(folder, "asked"))
    wait_for(lambda: lines_written(folder / "asked")[0], run)
    run.send_signal(signal.SIGTERM)
    finish(run)
    made, updates = lines_written(folder / "asked")
    assert 0 < made < 36 and not updates
    finish(start(command(folder, "asked", "--resume")))
    assert_same(folder / "asked", whole)


def test_sigterm_where_one_of_several_waits_for_another(folder):
    """While they make answers none can hear of the others' signals; later all save together."""
    both = start_two(folder, "left")
    wait_for(lambda: lines_written(folder / "left")[0], both[0])
    for process in both:
        process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert all("continue with --resume" in finish(process) for process in both)
    assert time.monotonic() - began < 60


def kill(run, folder, rng):
    """By SIGKILL: when it has written a few answers or updates, or sometimes before. What it was at, if it was."""
    before = lines_written(folder)
    enough = sum(before) + rng.randint(1, 12)
    due = time.monotonic() + rng.choice([rng.uniform(4, 30), 600, 600])
    while run.poll() is None and time.monotonic() < due and sum(lines_written(folder)) < enough:
        time.sleep(0.005)
    if run.poll() is not None:
        return "ended"
    made, updates = lines_written(folder)
    run.kill()
    return "training" if updates > before[1] else "answering" if before[0] < made < 36 else "something else"


def test_six_kills(folder, whole):
    """At any moment: while answers are made, while it compiles, trains, saves or evaluates."""
    rng, met, killed = random.Random(0), collections.Counter(), folder / "killed"
    for _ in range(60):
        if met.total() - met["ended"] >= 6 and min(met["answering"], met["training"]) >= 2:
            break
        run = start(command(folder, "killed", "--resume"))
        met[kill(run, killed, rng)] += 1
        text, _ = run.communicate()
        assert run.returncode in (0, -signal.SIGKILL), text
        if run.returncode == 0:  # through already: kill others like it
            assert_same(killed, whole)
            shutil.rmtree(killed)
            shutil.rmtree(folder / "killed-answers")
    assert met.total() - met["ended"] >= 6 and min(met["answering"], met["training"]) >= 2, met
    finish(start(command(folder, "killed", "--resume")))
    assert_same(killed, whole)
