"""The console command, as `jaxspec`, as `python -m jaxspec`, and the two scripts beside the package."""

import subprocess
import sys

import pytest

from jaxspec.cli.main import COMMANDS, run_command
from jaxspec.errors import UserError


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_the_commands_with_a_line_each(capsys, words):
    run_command(words)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)


def test_an_unknown_command_is_suggested():
    with pytest.raises(UserError, match=r"unknown command 'tain' \(did you mean 'train'\?\); commands: decode, train,"):
        run_command(["tain"])


def test_a_command_is_called_by_its_name(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxspec"])
    with pytest.raises(SystemExit) as exit:
        run_command(["decode", "--help"])
    out = capsys.readouterr().out
    assert not exit.value.code and out.startswith("usage: jaxspec decode") and "--max-new-tokens" in out


def test_the_programs_start():
    """In a real process, where an import that only works under pytest would show."""
    code = "import train, decode; decode.main(['--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-new-tokens" in result.stdout


def test_the_package_is_a_program():
    command = [sys.executable, "-m", "jaxspec"]
    result = subprocess.run([*command, "tain"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: unknown command 'tain' (did you mean 'train'?)")
    help_of_tune = subprocess.run([*command, "tune", "--help"], capture_output=True, text=True, check=True)
    assert help_of_tune.stdout.startswith("usage: jaxspec tune ")
