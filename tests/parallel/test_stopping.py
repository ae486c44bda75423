"""SIGTERM and Ctrl-C, before and in the middle of a training."""

import signal

import pytest

from jaxspec.parallel.stopping import StopSignals


@pytest.fixture
def signals():
    with StopSignals() as signals:
        yield signals


def test_before_the_training_there_is_nothing_to_save(signals, capsys):
    with pytest.raises(SystemExit) as exit:
        signal.raise_signal(signal.SIGTERM)
    assert not exit.value.code
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == "stopped; continue with --resume\ncontinue with --resume\n"


def test_a_training_is_asked_to_stop(signals, capsys):
    assert not signals.came()
    signal.raise_signal(signal.SIGTERM)
    assert signals.came() and not signals.interrupted and not capsys.readouterr().err


def test_a_second_ctrl_c_does_not_wait(signals, capsys):
    assert not signals.came()
    signal.raise_signal(signal.SIGINT)
    assert signals.came() and signals.interrupted and "Ctrl-C again ends the run" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_given_back_and_ignored_interrupts_stay_ignored():
    """As those of a shell's background job."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            assert not signals.came()
            signal.raise_signal(signal.SIGINT)
            assert not signals.came()
        signal.signal(signal.SIGINT, former)
        with StopSignals():
            assert signal.getsignal(signal.SIGINT) is not former
        assert signal.getsignal(signal.SIGINT) is former
    finally:
        signal.signal(signal.SIGINT, former)
