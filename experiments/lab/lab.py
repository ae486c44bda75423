"""What jobs work with: the base, the terms, the results so far, and a folder for what they make."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from experiments.lab.jobs import Job
from experiments.lab.terms import DTYPE, Data, Terms, check_terms, describe_terms, digest, write_prompts
from jaxspec.errors import UserError, differences
from jaxspec.files import locked, read_json, writable, write_atomically, write_json
from jaxspec.weights.load import load_model
from jaxspec.weights.model import Model

# What an unfinished job of a kind leaves in its folder, to resume from; of another job it is removed
LEFT_BEHIND = {"rates": ("rates.json", "rate-*"), "train": ("adapter",), "variant": ("adapter",)}


class Lab:
    """A queue's folders.

    Args:
      results: a JSON file per finished job; what is worth keeping.
      work: prompts, answers, adapters, recordings, and what unfinished jobs resume from.
      terms: that all jobs have in common.

    Raises:
      UserError: a folder cannot be written, or the results have other terms.
    """

    def __init__(self, results: Path, work: Path, terms: Terms = Terms()):
        self.results, self.work, self.terms = writable(results), writable(work), terms
        check_terms(self.results, terms.stored())

    @functools.cached_property
    def model(self) -> Model:
        """The base."""
        return load_model(self.terms.model, DTYPE)

    @functools.cached_property
    def data(self) -> Data:
        """Where the text comes from; the prompts are written into the work folder."""
        with locked(self.work / ".prompts.lock"):
            return write_prompts(self.terms, self.work)

    def check(self) -> None:
        """Raise UserError where the results have another base or other answers, which are made where missing."""
        terms = describe_terms(self.terms, self.model, self.data)
        check_terms(self.results, terms)
        with locked(self.results / ".lock"):
            if not (self.results / "terms.json").exists():
                write_json(self.results / "terms.json", terms)

    def folder(self, job: Job) -> Path:
        """Of what the jobs about one adapter make."""
        return self.work / job.folder

    # Results

    def file(self, name: str) -> Path:
        """Of a job's result."""
        return self.results / f"{name}.json"

    def row(self, name: str) -> dict[str, Any]:
        """The content of a result's file: `job`, `result`, `seconds`, `device` and more; do not change it."""
        return self._read(name)[0]

    def _read(self, name: str) -> tuple[dict[str, Any], str]:
        """A row and the digest of its result."""
        file = self.file(name)
        status = file.stat() if file.exists() else None
        return _read_row(file, status and (status.st_mtime_ns, status.st_size, status.st_ino))

    def is_done(self, job: Job) -> bool:
        """Whether it has a result, made from the results that the jobs it needs have now.

        Raises:
          UserError: a result of other settings, or a damaged one.
        """
        if not self.file(job.name).exists():
            return False
        row, identity = self.row(job.name), plain(identity_of(job))
        if changed := differences(row["job"], identity):
            raise UserError(
                f"{self.file(job.name)} is of another job ({'; '.join(changed)}); remove it, or give another --results"
            )
        made_from = row.get("needs", {})
        return all(self._read(need)[1] == made_from[need] for need in made_from if self.file(need).exists())

    def result(self, name: str) -> dict[str, Any]:
        """What a finished job found."""
        return self.row(name)["result"]

    def write(self, job: Job, row: dict[str, Any]) -> None:
        """Keep what a job found, and what it was made from."""
        file = self.file(job.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        needs = {need: self._read(need)[1] for need in job.needs}
        row = {"job": identity_of(job)} | row | {"needs": needs}
        write_atomically(file, (json.dumps(row, indent=1) + "\n").encode())

    # Running

    @contextlib.contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Whether this process may run a job: no other one does as long as this lasts.

        Raises:
          UserError: the file system has no locks.
        """
        path = self.results / ".locks" / f"{job.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        except OSError as error:
            raise UserError(f"{path}: cannot be locked ({error.strerror}); give --results on another disk") from None
        try:
            yield True
        finally:
            lock.release()

    def is_running(self, job: Job) -> bool:
        """Whether some process works on it."""
        if not (self.results / ".locks" / f"{job.name}.lock").exists():
            return False
        with self.claimed(job) as free:
            return not free

    def prepare(self, job: Job) -> None:
        """Remove what an unfinished job of the same name but of other settings or terms has left behind."""
        if job.kind not in LEFT_BEHIND:
            return
        file = self.folder(job) / f".{job.kind}.json"
        identity = plain({"job": identity_of(job), "terms": self.terms.stored()})
        if file.exists() and read_json(file) == identity:
            return
        self.forget(job)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, identity)

    def forget(self, job: Job) -> None:
        """Remove what an unfinished job resumes from."""
        for pattern in LEFT_BEHIND.get(job.kind, ()):
            for path in self.folder(job).glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def failure(self, job: Job) -> Path:
        """A file with the error that ended a job, where there is one."""
        return self.work / "failed" / f"{job.name}.txt"


@functools.lru_cache(maxsize=4096)
def _read_row(file: Path, version: tuple[int, int, int] | None) -> tuple[dict[str, Any], str]:
    """Read a result's file, once per version of it: the queue looks at all of them again and again."""
    try:
        row = read_json(file, ["job", "result", "seconds", "device"])
    except UserError as error:
        raise UserError(f"{error}; remove the file, and run does the job again") from None
    return row, digest(row["result"])


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
