"""The console command: `jaxspec COMMAND`, or `python -m jaxspec COMMAND`."""

from __future__ import annotations

import importlib
import sys

from jaxspec.cli.program import run_main
from jaxspec.errors import UserError, suggest

COMMANDS = {
    "decode": "answer prompts with one method, optionally beside autoregressive decoding",
    "train": "train an adapter",
    "tune": "choose the fastest draft tree for this machine",
    "bench": "measure how much faster the methods are, and whether their output is the same",
    "serve": "answer many requests at once behind the OpenAI interface, with a page to try it",
    "datastore": "build a datastore of earlier answers, which rest drafts from",
    "evaluate": "measure how well an adapter drafts the base's own answers",
    "import": "make an adapter of a drafter that other software has trained",
    "export": "write a base, or an adapter, where other software can read it",
}
_MODULES = {"import": "import_drafter"}  # a keyword names no module


def main() -> None:
    """Run the command on the command line; errors are one line each."""
    run_main(run_command)


def run_command(args: list[str]) -> None:
    """Run the command that the first word names; where there is none, or it is --help, list them."""
    name, *rest = args or ["--help"]
    if name in ("-h", "--help"):
        print("usage: jaxspec COMMAND [OPTIONS]\n")
        for command, purpose in COMMANDS.items():
            print(f"  {command:10}{purpose}")
        print("\njaxspec COMMAND --help lists its options")
        return
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{suggest(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    sys.argv[0] = f"jaxspec {name}"  # for its --help
    importlib.import_module(module_of(name)).main(rest)


def module_of(command: str) -> str:
    """The module of a command, by its full name."""
    return f"jaxspec.cli.{_MODULES.get(command, command)}"
