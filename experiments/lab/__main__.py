"""The lab: python -m experiments.lab list | run | answers | page | pack | unpack | collect | merge."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.lab.bring_back import Collect, Merge, collect, merge
from experiments.lab.carry import Pack, Unpack, disk_errors, pack, unpack
from experiments.lab.claims import write_claims
from experiments.lab.entries import Entry, own_entry
from experiments.lab.jobs import all_jobs
from experiments.lab.lab import Lab
from experiments.lab.page import write_page
from experiments.lab.queue import Queue, choose, show
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.errors import check_at_least
from jaxspec.markdown import table


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where a lab keeps what it has.

    Attributes:
      results: folder with a JSON file per finished job.
      work: folder of answers, adapters, recordings and unfinished jobs.
      enter: methods of your own to add, as FILE.py:CLASS.
      learning_rate: of these, the middle one of those that are tried.
    """

    results: str = "experiments/results"
    work: str = "runs/lab"
    enter: tuple[str, ...] = ()
    learning_rate: float = 1e-3


@dataclasses.dataclass(frozen=True)
class List(Folders):
    """Show all jobs, in order: state, device, seconds taken or expected, and what they decide.

    Attributes:
      only: names, with wildcards; of a folder all of it. Default all.
    """

    only: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Run(Folders):
    """Work off the list, most valuable first. Several of these may run at the same time.

    Attributes:
      minutes: begin nothing that would not end within so many; 0: no limit.
      only: names, with wildcards; of a folder all of it. Default all.
      alone: run the jobs that measure time, and no others; leave the machine alone while it does.
      retry: try again what has failed.
    """

    minutes: float = 0.0
    only: tuple[str, ...] = ()
    alone: bool = False
    retry: bool = False


@dataclasses.dataclass(frozen=True)
class Answers(Folders):
    """Have the base answer all prompts, before several processes work off the list; they do it themselves otherwise."""


@dataclasses.dataclass(frozen=True)
class Page(Folders):
    """Write docs/leaderboard.md and docs/claims.md from the results.

    Attributes:
      docs: folder of the pages.
    """

    docs: str = "docs"


def main(args: list[str]) -> None:
    """Parse, and do what the first word says."""
    commands: dict[type, Callable[[Any], None]] = {
        **{List: list_jobs, Run: run, Answers: answers, Page: page},
        **{Pack: pack, Unpack: unpack, Collect: collect, Merge: merge},
    }
    options = parse(
        List | Run | Answers | Page | Pack | Unpack | Collect | Merge, args, prog="python -m experiments.lab"
    )
    commands[type(options)](options)


def list_jobs(options: List) -> None:
    """Print the table."""
    queue = _queue(options, options.only, None)
    rows = []
    for job in queue.chosen:
        state, device, seconds = queue.state(job), "", f"some {queue.usual(job):.0f}"
        if state == "done":
            row = queue.lab.row(job.name)
            device, seconds = row["device"], f"{row['seconds']:.0f}"
        rows.append([job.name, job.kind, state, device, seconds, job.decides])
    print("\n".join(table(["job", "kind", "state", "device", "seconds", "decides"], rows)))
    done = sum(row[2] == "done" for row in rows)
    print(f"\n{done} of {len(rows)} done")


def run(options: Run) -> None:
    """Work off the queue."""
    end = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    check_at_least(options, {"minutes": 0})
    enable_compilation_cache()
    if not options.alone:
        compile_quickly()
    queue = _queue(options, options.only, options.alone)
    with disk_errors(queue.lab.work, "make room, and run again: what is finished is kept"):
        queue.lab.check()
        if options.retry:
            for job in queue.chosen:
                queue.lab.failure(job).unlink(missing_ok=True)
        done = queue.run(end, show)
    states = Counter(queue.state(job) for job in queue.chosen)
    left = ", ".join(f"{count} {state}" for state, count in states.items() if state != "done")
    print(f"{done} jobs done" + (f"; left: {left}" if left else ", none left"))


def compile_quickly() -> None:
    """On a GPU, do without Triton's products, whose tuning in float32 takes minutes per program.

    What is timed (`--alone`) has XLA's own choice.
    """
    flag = "--xla_gpu_enable_triton_gemm"
    if importlib.util.find_spec("jax_plugins") and flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=false".strip()


def answers(options: Answers) -> None:
    """Make what is missing."""
    enable_compilation_cache()
    lab = _lab(options)
    lab.check()
    print(f"answers in {lab.work / 'answers'}")


def page(options: Page) -> None:
    """Write the pages."""
    lab, docs = _lab(options), Path(options.docs)
    for file in (write_page(lab, docs, _entries(options)), write_claims(lab, docs)):
        print(f"written to {file}")


def _entries(options: Folders) -> list[Entry]:
    return [own_entry(word, options.learning_rate) for word in options.enter]


def _lab(options: Folders) -> Lab:
    return Lab(Path(options.results), Path(options.work))


def _queue(options: Folders, only: tuple[str, ...], alone: bool | None) -> Queue:
    """The jobs that are asked for; of both kinds where `alone` is None."""
    jobs = all_jobs(_entries(options))
    has_accelerator = alone is None or jax.default_backend() != "cpu"
    chosen = choose(jobs, only, alone, has_accelerator)
    return Queue(_lab(options), jobs, chosen)


if __name__ == "__main__":
    run_main(main)
