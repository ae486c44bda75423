"""Named runs: one file in configs/ per paper, each with a dict `RUNS`."""

from __future__ import annotations

import argparse
import runpy

from jaxspec.errors import UserError, first_line, suggest
from jaxspec.files import shipped_folder
from jaxspec.training.run_config import RunConfig


def load_papers() -> dict[str, dict[str, RunConfig]]:
    """All runs, by paper (the name of its file) and by the run's name.

    Raises UserError for a file that cannot be read or has no `RUNS`.
    """
    papers = {}
    for path in sorted(shipped_folder("configs").glob("*.py")):
        try:
            papers[path.stem] = runpy.run_path(str(path))["RUNS"]
        except KeyError:
            raise UserError(f"{path}: no RUNS there; each file of configs/ holds a dict of that name") from None
        except (SyntaxError, ImportError, TypeError, NameError) as error:
            raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    return papers


def load_configs() -> dict[str, RunConfig]:
    """All runs by name. Raises UserError where two files have a run of the same name."""
    configs: dict[str, RunConfig] = {}
    for paper, runs in load_papers().items():
        if twice := [name for name in runs if name in configs]:
            raise UserError(f"configs/{paper}.py: another file has a run {twice[0]!r} too; rename one of them")
        configs |= runs
    return configs


def load_config(name: str) -> RunConfig:
    """The run of that name. Raises UserError, with a suggestion, for an unknown name."""
    configs = load_configs()
    if name not in configs:
        raise UserError(f"unknown config {name!r}{suggest(name, configs)}; configs, by paper:\n{list_configs()}")
    return configs[name]


def list_configs() -> str:
    """The names of all runs, a line per paper."""
    return "\n".join(f"  {paper}: {', '.join(runs)}" for paper, runs in load_papers().items())


def split_config_name(args: list[str]) -> tuple[str, list[str]]:
    """Split `--config NAME` off a command line: the name, and the other arguments. Raises UserError without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    options, rest = parser.parse_known_args(args)
    if not options.config:
        raise UserError(f"say what to train with --config NAME; configs, by paper:\n{list_configs()}")
    return options.config, rest
