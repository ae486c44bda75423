"""SIGTERM and Ctrl-C, before and in the middle of a training."""

import os
import signal

import pytest

from jaxspec.parallel.stopping import StopSignals


@pytest.fixture
def signals():
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopSignals()
    for number, handler in kept.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


def test_before_the_training_there_is_nothing_to_save(signals, capsys):
    with pytest.raises(SystemExit) as exit:
        send(signal.SIGTERM)
    assert not exit.value.code
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert capsys.readouterr().err == "stopped; continue with --resume\n" * 2


def test_a_training_is_asked_to_stop(signals, capsys):
    assert not signals()
    send(signal.SIGTERM)
    assert signals() and not signals.interrupted and not capsys.readouterr().err


def test_a_second_ctrl_c_does_not_wait(signals, capsys):
    assert not signals()
    send(signal.SIGINT)
    assert signals() and signals.interrupted and "Ctrl-C again ends the run" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
