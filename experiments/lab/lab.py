"""What jobs work with: the base, the terms, the results so far, and a folder for what they make."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from experiments.lab.jobs import Job
from experiments.lab.terms import DTYPE, Data, Terms, check_terms, describe_terms, write_prompts
from jaxspec.errors import UserError
from jaxspec.files import read_json, writable, write_atomically
from jaxspec.weights.load import Model, load_model


class Lab:
    """A queue's folders.

    Args:
      results: a JSON file per finished job; what is worth keeping.
      work: prompts, answers, adapters, recordings, and what unfinished jobs resume from.
      terms: that all jobs have in common.

    Raises:
      UserError: a folder cannot be written.
    """

    def __init__(self, results: Path, work: Path, terms: Terms = Terms()):
        self.results, self.work, self.terms = writable(results), writable(work), terms

    @functools.cached_property
    def model(self) -> Model:
        """The base."""
        return load_model(self.terms.model, DTYPE)

    @functools.cached_property
    def data(self) -> Data:
        """Where the text comes from; the prompts are written into the work folder."""
        return write_prompts(self.terms, self.work)

    def check(self) -> None:
        """Raise UserError where the results are of other terms, another base or other answers."""
        check_terms(self.results, describe_terms(self.terms, self.model, self.data))

    def folder(self, job: Job) -> Path:
        """What the jobs about one adapter make."""
        folder = self.work / job.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # Results

    def file(self, name: str) -> Path:
        """Of a job's result."""
        return self.results / f"{name}.json"

    def is_done(self, job: Job) -> bool:
        """Whether it has a result. Raises UserError for a result of other settings."""
        file = self.file(job.name)
        if not file.exists():
            return False
        held, identity = read_json(file, ["job", "result"])["job"], plain(identity_of(job))
        if held != identity:
            changed = [name for name in {**held, **identity} if held.get(name) != identity.get(name)]
            words = "; ".join(f"{name} {held.get(name)}, not {identity.get(name)}" for name in changed)
            raise UserError(f"{file} is of another job ({words}); remove it, or give another --results")
        return True

    def result(self, name: str) -> dict[str, Any]:
        """What a finished job found."""
        return read_json(self.file(name), ["result"])["result"]

    def write(self, job: Job, row: dict[str, Any]) -> None:
        """Keep what a job found."""
        file = self.file(job.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps({"job": identity_of(job)} | row, indent=1) + "\n").encode())

    # Running

    @contextlib.contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Whether this process may run a job: no other one does as long as this lasts."""
        path = self.work / "locks" / f"{job.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def is_running(self, job: Job) -> bool:
        """Whether some process works on it."""
        path = self.work / "locks" / f"{job.name}.lock"
        if not path.exists():
            return False
        with self.claimed(job) as free:
            return not free

    def failure(self, job: Job) -> Path:
        """A file with the error that ended a job, where there is one."""
        return self.work / "failed" / f"{job.name}.txt"


def identity_of(job: Job) -> dict[str, Any]:
    """What a result is of: settings, never code."""
    found: dict[str, Any] = {"kind": job.kind, "seed": job.seed, "settings": dict(job.settings)}
    if job.entry:
        found |= {"method": job.entry.settings, "learning_rate": job.entry.rate, "recipe": dict(job.entry.recipe)}
        found |= {"source": job.entry.source} if job.entry.source else {}
    return found


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))
