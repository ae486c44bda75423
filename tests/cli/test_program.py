"""How a program ends when something goes wrong."""

import logging
import sys
import time
from types import SimpleNamespace

import jax
import pytest

from jaxspec.cli import program
from jaxspec.cli.program import mention_compilation, run_main
from jaxspec.errors import UserError


def raises(error):
    """A program that does so."""

    def main(args):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("too small"), 2, "error: too small\n"),
        (ValueError("UNKNOWN: Gloo AllGather failed: closed\nmore"), 2, "error: the processes lost each other; see"),
        (ValueError("shapes (2,) and (3,)"), 1, "Traceback"),
    ],
)
def test_one_of_several_processes_ends_at_once(capsys, monkeypatch, error, code, said):
    """Or the others, who wait for it, and it for them, would only end minutes later."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as exit:
        run_main(raises(error))
    err = capsys.readouterr().err
    assert exit.value.code == code and err.startswith(said) and str(error).split("\n")[0] in err


def test_what_should_not_happen_is_raised():
    with pytest.raises(ValueError, match="Gloo"):
        run_main(raises(ValueError("UNKNOWN: Gloo AllGather failed: closed")))


def test_ctrl_c_ends_with_130(capsys):
    with pytest.raises(SystemExit) as exit:
        run_main(raises(KeyboardInterrupt()))
    assert exit.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_a_slow_compilation_is_mentioned_once(capsys, monkeypatch):
    """Of two slow programs after a fast one."""
    listeners = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    monkeypatch.setattr(program, "_PATIENCE", 0.05)
    mention_compilation.__wrapped__()
    for seconds in (0.0, 0.2, 0.2):
        listeners[0](program._LOWERED, 0.1)
        listeners[0](program._LOWERED, 0.1)  # of a program that is not compiled
        time.sleep(seconds)
        listeners[0](program._COMPILED, seconds)
        assert bool(seconds) or not capsys.readouterr().err
    time.sleep(0.1)
    assert capsys.readouterr().err.count("compiling, which can take minutes") == 1


def test_jax_has_the_events_of_a_compilation():
    seen = set()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.add(event))
    jax.jit(lambda x: x + 17.25)(1.0)
    assert {program._LOWERED, program._COMPILED} <= seen


def test_errors_that_are_raised_too_are_not_logged(caplog, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    run_main(print)
    for text in ("Task exception was never retrieved", "anything else"):
        logging.getLogger("asyncio").error(text)
    assert caplog.messages == ["anything else"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Event loop is closed", False), ("no space [os_error_code='28']", False), ("anything else", True)],
)
def test_errors_that_follow_from_another_are_not_shown(monkeypatch, text, shown):
    """Of Orbax's writer on a full disk, which has raised the first one."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "__unraisablehook__", found.append)
    run_main(print)
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert bool(found) == shown
