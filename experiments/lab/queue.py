"""The queue: which job is next, how long it will take, and one process's turn at working off the list."""

from __future__ import annotations

import dataclasses
import errno
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

from experiments.lab import checks, ranks, scoring, timings, training
from experiments.lab.jobs import Job
from experiments.lab.lab import Lab
from jaxspec.errors import UserError, first_line, suggest
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
    "ranks": ranks.keep_ranks,
    "trees": ranks.count_trees,
    "sizes": ranks.decode_trees,
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
    **{"ranks": 150, "trees": 60, "sizes": 240},
    **{"equality": 120, "steps": 240, "drafter": 240, "program": 240, "race": 300},
}
_TRAINED = ("rates", "train", "variant")
_TIMING = 120.0  # seconds that must be left to time a training
_PAUSE = 1.0  # seconds between two looks at what other processes have finished
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


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

    @functools.cached_property
    def _by_name(self) -> dict[str, Job]:
        return {job.name: job for job in self.jobs}

    def state(self, job: Job) -> State:
        """Where a job stands. One whose adapter or recording is lost is not done as long as others need that."""
        state = self._own_state(job)
        return "running" if state in ("ready", "failed") and self.lab.is_running(job) else state

    def _own_state(self, job: Job) -> State:
        """Likewise, whoever may be running it."""
        if self.is_finished(job):
            return "done"
        if self.lab.failure(job).exists():
            return "failed"
        return "ready" if all(self.is_finished(self._by_name[name]) for name in job.needs) else "waiting"

    def is_finished(self, job: Job) -> bool:
        """Whether its result is there, and what others still need of it."""
        return self.lab.is_done(job) and not self._is_missed(job)

    def _is_missed(self, job: Job) -> bool:
        """Whether what a job has made is gone, and one that is chosen needs it."""
        made = ARTIFACTS.get(job.kind)
        if made is None or made(self.lab, job).exists():
            return False
        return any(job.name in other.needs and not self.is_finished(other) for other in self.chosen)

    # How long jobs take

    def usual(self, job: Job) -> float:
        """Seconds that it takes by what is known without timing anything."""
        known = self.seconds(job)
        return _USUAL[job.kind] if known is None else known

    def seconds(self, job: Job) -> float | None:
        """What such a job took on this device: the same of the same entry, of another one, or of the kind."""
        known = [other for other in self.jobs if other.kind == job.kind and self.lab.file(other.name).exists()]
        rows = {other: self.lab.row(other.name) for other in known}
        here = {other: row["seconds"] for other, row in rows.items() if row["device"] == device_name()}
        alike = {other: seconds for other, seconds in here.items() if other.settings == job.settings}
        same = {other: seconds for other, seconds in alike.items() if other.entry == job.entry}
        return max((same or alike or here).values(), default=None)

    def _fits(self, job: Job, end: float, say: Callable[[str], None]) -> bool:
        """Whether a job would end in time; a training of which none is known here is timed, if time is left for it."""
        left = end - time.monotonic()
        if left == math.inf:
            return True
        if self.seconds(job) is None and job.kind in _TRAINED and left > _TIMING:
            takes = training.seconds_of_updates(self.lab, job)
        else:
            takes = self.usual(job)
        if takes <= end - time.monotonic():
            return True
        say(f"{job.name}: not begun, it takes some {takes:.0f} s")
        return False

    # Working

    def run(self, end: float, say: Callable[[str], None]) -> int:
        """Work off the chosen jobs. Returns how many were finished.

        While others run jobs that chosen ones wait for, this waits, too.

        Args:
          end: begin nothing that would not end by then, in seconds of `time.monotonic`; math.inf: no limit.
          say: is told what happens.
        """
        done, left_out, looked = 0, set(), 0
        while True:
            states = {job: self._own_state(job) for job in self.chosen if job not in left_out}
            ready = [job for job, state in states.items() if state == "ready"]
            began = False
            for job in ready:
                with self.lab.claimed(job) as free:
                    if not free or self.is_finished(job):
                        continue
                    began = self._fits(job, end, say)
                    if began:
                        done += self._attempt(job, say)
                        break
                    left_out.add(job)
            looked = 0 if began else looked + 1
            waits = any(state == "waiting" and self._is_coming(job) for job, state in states.items())
            # one look may have met another process that only looked, too
            if time.monotonic() >= end or (not began and looked > 1 and not waits):
                return done
            if not began:
                time.sleep(_PAUSE)

    def _is_coming(self, job: Job) -> bool:
        """Whether another process runs what a job waits for."""
        needs = [self._by_name[name] for name in job.needs]
        return any(self.lab.is_running(need) or self._is_coming(need) for need in needs if not self.is_finished(need))

    def _attempt(self, job: Job, say: Callable[[str], None]) -> bool:
        """Run a job that this process has claimed. Returns whether it was finished."""
        say(f"{job.name}: begins ({job.decides})")
        began = time.monotonic()
        try:
            self.lab.prepare(job)
            found = KINDS[job.kind](self.lab, job)
        except Exception as error:  # one job that fails must not end the others, but for want of room all would
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise
            self._note_failure(job, error, say)
            return False
        measured = found.pop("measured", {})
        # of a training that was resumed, no less than its updates took
        seconds = round(max(time.monotonic() - began, measured.get("training_seconds", 0)), 1)
        row = {"result": found, "measured": measured, "seconds": seconds, "device": device_name()}
        self.lab.write(job, row | {"jax": jax.__version__, "code": code_version()})
        if job.kind in _TRAINED:
            training.tidy(self.lab, job)
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
    runs = [job for job in chosen if alone in (None, job.alone) and (accelerator or not job.accelerator)]
    if chosen and not runs:
        timed, large = sum(job.alone != alone for job in chosen), sum(job.accelerator for job in chosen)
        other = "is there only for --alone" if not alone else "is there only without --alone"
        raise UserError(f"none of the {len(chosen)} jobs can run here: {timed} {other}, {large} need an accelerator")
    return runs


def show(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
