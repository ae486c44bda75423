"""Named runs: configs/<name>.py, each with one `CONFIG`."""

from __future__ import annotations

import runpy
from pathlib import Path

from jaxspec.errors import UserError, suggest
from jaxspec.training.run_config import RunConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs"


def config_names() -> list[str]:
    """Names of all runs in configs/."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def load_config(name: str) -> RunConfig:
    """The run of that name. Raises UserError for an unknown one, with a suggestion."""
    if name not in config_names():
        raise UserError(f"unknown config {name!r}{suggest(name, config_names())}; configs: {', '.join(config_names())}")
    return runpy.run_path(str(FOLDER / f"{name}.py"))["CONFIG"]


def split_config_name(args: list[str]) -> tuple[str, list[str]]:
    """Take `--config NAME` out of a command line: the name, and the remaining arguments.

    Raises:
      UserError: it is not there.
    """
    for at, word in enumerate(args):
        if word.startswith("--config="):
            return word.removeprefix("--config="), args[:at] + args[at + 1 :]
        if word == "--config" and at + 1 < len(args):
            return args[at + 1], args[:at] + args[at + 2 :]
    raise UserError(f"say what to train with --config NAME; configs: {', '.join(config_names())}")
