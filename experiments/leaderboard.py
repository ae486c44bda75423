"""The leaderboard: python -m experiments.leaderboard answers | enter METHOD | report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from experiments.entries import find_entry
from experiments.leaderboard_page import write_page
from experiments.prompts import prompts_digest
from experiments.rows import Terms, data_of, enter
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.errors import UserError
from jaxspec.files import alone_in, writable
from jaxspec.training.data import prepare_answers
from jaxspec.training.examples import select_prompts
from jaxspec.weights.load import Model, load_model

_ROWS = "leaderboard"  # folder of the rows, beside the page
_DTYPE = "float32"  # on accelerators, too: rounding is to decide nothing


@dataclasses.dataclass(frozen=True)
class Answers:
    """Have the base answer all prompts, to train on and to score on; other commands make what is missing.

    Attributes:
      output: folder of prompts and answers.
    """

    output: str = "runs/leaderboard"


@dataclasses.dataclass(frozen=True)
class Enter:
    """Train a method under the leaderboard's terms, score it, write its row and the page. Resumes where it stopped.

    Attributes:
      entry: a method, a config of one for the default model, or FILE.py:CLASS.
      name: of the row; default the method's.
      learning_rate: the middle one of three to try; default the config's, 0.001 without one.
      multiple: how many times the usual updates.
      time: also measure what a step takes; leave the machine alone while it does.
      output: folder of prompts, answers and trainings.
      docs: folder of leaderboard.md and of the rows.
    """

    entry: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENTRY")]
    name: str = ""
    learning_rate: float | None = None
    multiple: float = 1.0
    time: bool = False
    output: str = "runs/leaderboard"
    docs: str = "docs"


@dataclasses.dataclass(frozen=True)
class Report:
    """Write the page from the rows.

    Attributes:
      docs: folder of leaderboard.md and of the rows.
    """

    docs: str = "docs"


def main(args: list[str]) -> None:
    """Parse, and do what the first word says."""
    options = parse(Answers | Enter | Report, args, prog="python -m experiments.leaderboard")
    {Answers: answers, Enter: enter_one, Report: report}[type(options)](options)


def answers(options: Answers) -> None:
    """Make what is not there yet."""
    enable_compilation_cache()
    terms = Terms()
    make_answers(terms, load_model(terms.model, _DTYPE), writable(Path(options.output)))
    print(f"prompts {prompts_digest()}, answers in {options.output}")


def make_answers(terms: Terms, model: Model, output: Path) -> None:
    """All answers that an entry may need."""
    for data in data_of(terms, output):
        prepare_answers(model, data, select_prompts(model, data))


def enter_one(options: Enter) -> None:
    """Enter, and write the page."""
    entry, terms = find_entry(options.entry, options.learning_rate), Terms().times(options.multiple)
    if options.name:
        entry = dataclasses.replace(entry, name=options.name)
    if Path(entry.name).name != entry.name:
        raise UserError(f"--name {entry.name!r}: give the name of a file, without folders")
    docs, output = Path(options.docs), writable(Path(options.output))
    rows = writable(docs / _ROWS)
    with alone_in(writable(output / entry.name)):
        enable_compilation_cache()
        enter(entry, terms, load_model(terms.model, _DTYPE), output, rows, options.time)
    print(f"written to {rows / entry.name}.json and {write_page(rows, docs)}")


def report(options: Report) -> None:
    """Write the page."""
    docs = Path(options.docs)
    print(f"written to {write_page(docs / _ROWS, writable(docs))}")


if __name__ == "__main__":
    run_main(main)
