"""The queue: which job is next, how long it will take, and one process's turn at working off the list."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from experiments.lab import checks, scoring, timings, training
from experiments.lab.jobs import Job
from experiments.lab.lab import Lab
from jaxspec.errors import UserError, first_line, suggest
from jaxspec.files import read_json
from jaxspec.machine import device_name, make_room_for_programs
from jaxspec.versions import code_version

State = Literal["done", "failed", "running", "waiting", "ready"]
KINDS: Mapping[str, Callable[[Lab, Job], dict[str, Any]]] = {
    "rates": training.try_rates,
    "train": training.train,
    "variant": training.train_variant,
    "offers": scoring.record_offers,
    "score": scoring.score,
    "live": scoring.decode_live,
    "equality": lambda lab, job: checks.check_equality(**job.settings),
    "race": lambda lab, job: checks.race_unions(**job.settings),
    "steps": lambda lab, job: timings.time_steps(**job.settings),
    "drafter": lambda lab, job: timings.time_drafter(**job.settings),
    "program": lambda lab, job: timings.dump_program(**job.settings, folder=str(lab.folder(job) / "programs")),
}
ARTIFACTS: Mapping[str, Callable[[Lab, Job], Path]] = {  # what other jobs read beside the result
    "train": lambda lab, job: lab.folder(job) / "adapter" / "adapter.json",
    "offers": lambda lab, job: scoring.recording_file(lab, job, job.settings["recording"]),
}
# Seconds on two cores of a server, until one of the kind is known on this device
_USUAL = {
    **{"rates": 2400, "train": 3600, "variant": 3600, "offers": 240, "score": 90, "live": 180},
    **{"equality": 120, "steps": 240, "drafter": 240, "program": 240, "race": 300},
}
_TRAINED = ("rates", "train", "variant")
_PAUSE = 1.0  # seconds between two looks at what other processes have finished


@dataclasses.dataclass
class Queue:
    """The jobs of a lab, as one process works on them.

    Attributes:
      lab: folders and results.
      jobs: in order.
      chosen: those that this process may run.
    """

    lab: Lab
    jobs: Sequence[Job]
    chosen: Sequence[Job]

    def state(self, job: Job) -> State:
        """Where a job stands. One whose adapter or recording is lost is not done as long as others need that."""
        if self.is_finished(job):
            return "done"
        if self.lab.failure(job).exists():
            return "failed"
        if self.lab.is_running(job):
            return "running"
        ready = all(self.state(self._by_name[name]) == "done" for name in job.needs)
        return "ready" if ready else "waiting"

    @functools.cached_property
    def _by_name(self) -> dict[str, Job]:
        return {job.name: job for job in self.jobs}

    def is_finished(self, job: Job) -> bool:
        """Whether its result is there, and what others still need of it."""
        return self.lab.is_done(job) and not self._is_missed(job)

    def _is_missed(self, job: Job) -> bool:
        """Whether what a job has made is gone, and one that is chosen needs it."""
        made = ARTIFACTS.get(job.kind)
        if made is None or made(self.lab, job).exists():
            return False
        return any(job.name in other.needs and not self.lab.is_done(other) for other in self.chosen)

    def usual(self, job: Job) -> float:
        """Seconds that it takes by what is known without timing anything."""
        known = self.seconds(job)
        return _USUAL[job.kind] if known is None else known

    def seconds(self, job: Job) -> float | None:
        """What such a job took on this device; None where none is known."""
        found = {}
        for other in self.jobs:
            file = self.lab.file(other.name)
            if other.kind == job.kind and file.exists():
                row = read_json(file)
                if row.get("device") == device_name():
                    found[other] = row["seconds"]
        alike = [s for other, s in found.items() if other.entry == job.entry and other.settings == job.settings]
        return max(alike or found.values(), default=None)

    def expected(self, job: Job) -> float:
        """Seconds that it will presumably take; a training is timed for it where none is known."""
        if self.seconds(job) is None and job.kind in _TRAINED:
            return training.seconds_of_updates(self.lab, job)
        return self.usual(job)

    def run(self, minutes: float, say: Callable[[str], None]) -> int:
        """Work off the chosen jobs. Returns how many were finished.

        Args:
          minutes: begin nothing that would not end within so many; 0: no limit.
          say: is told what happens.
        """
        end = time.monotonic() + 60 * minutes if minutes else math.inf
        done, left_out = 0, set()
        while True:
            states = {job: self.state(job) for job in self.chosen if job not in left_out}
            ready = [job for job, state in states.items() if state == "ready"]
            if not ready and not self._others_work(states):
                return done
            for job in ready:
                with self.lab.claimed(job) as free:
                    if not free or self.is_finished(job):
                        continue
                    if self._fits(job, end, say):
                        done += self._attempt(job, say)
                        break
                    left_out.add(job)
            else:
                time.sleep(_PAUSE)

    def _fits(self, job: Job, end: float, say: Callable[[str], None]) -> bool:
        if end == math.inf or (takes := self.expected(job)) <= end - time.monotonic():
            return True
        say(f"{job.name}: not begun, it takes some {takes:.0f} s")
        return False

    def _others_work(self, states: Mapping[Job, State]) -> bool:
        """Whether other processes run jobs that chosen ones wait for."""
        running = {job.name for job in self.jobs if self.state(job) == "running"}
        return any(state == "waiting" and self._depends(job, running) for job, state in states.items())

    def _depends(self, job: Job, names: set[str]) -> bool:
        return any(need in names or self._depends(self._by_name[need], names) for need in job.needs)

    def _attempt(self, job: Job, say: Callable[[str], None]) -> bool:
        """Run a job that this process has claimed. Returns whether it was finished."""
        say(f"{job.name}: begins ({job.decides})")
        began = time.monotonic()
        try:
            found = KINDS[job.kind](self.lab, job)
        except OSError:  # a full disk, which fails every other job too
            raise
        except Exception as error:  # one job that fails must not end the others
            self._note_failure(job, error, say)
            return False
        measured, seconds = found.pop("measured", {}), round(time.monotonic() - began, 1)
        row = {"result": found, "measured": measured, "seconds": seconds, "device": device_name()}
        self.lab.write(job, row | {"jax": jax.__version__, "code": code_version()})
        say(f"{job.name}: done in {seconds:.0f} s")
        make_room_for_programs()
        return True

    def _note_failure(self, job: Job, error: Exception, say: Callable[[str], None]) -> None:
        file = self.lab.failure(job)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(traceback.format_exc())
        say(f"{job.name}: failed ({first_line(error)}); {file} has more, and run --retry tries again")


def choose(jobs: Sequence[Job], patterns: Sequence[str], alone: bool | None, accelerator: bool) -> list[Job]:
    """The jobs that a process may run.

    Args:
      jobs: all of them.
      patterns: names with wildcards; a name without any also stands for what is below it; none: all.
      alone: those that measure time, or the others; None: both.
      accelerator: whether there is one.

    Raises:
      UserError: a pattern that no job matches.
    """
    found = {job.name for job in jobs if not patterns}
    for pattern in patterns:
        names = [job.name for job in jobs if fnmatch.fnmatch(job.name, pattern) or job.name.startswith(f"{pattern}/")]
        if not names:
            known = {part for job in jobs for part in (job.name, job.folder)}
            raise UserError(f"no job matches {pattern!r}{suggest(pattern, known)}; list shows them all")
        found |= set(names)
    chosen = [job for job in jobs if job.name in found]
    return [job for job in chosen if alone in (None, job.alone) and (accelerator or not job.accelerator)]


def show(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
