"""Progress of long work: a bar on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType

import tqdm

_SECONDS_BETWEEN_LINES = 15.0


def say(text: str) -> None:
    """Print a line on stderr without disturbing a bar."""
    tqdm.tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """A bar with rate and time left; a line every few seconds where stderr is no terminal.

    The rate of the lines is that of the later half of what is done, and never of the first report, which compiling
    delays.

    Args:
      label: what is going on.
      total: units of work.
      unit: name of one unit.
      done: units finished before, by an earlier run.
    """

    def __init__(self, label: str, total: int, unit: str, done: int = 0):
        self._label, self.total, self._unit, self._first, self._done = label, total, unit, done, done
        self._began = self._last = time.monotonic()
        self._skipped = 0.0  # seconds
        self._marks: deque[tuple[float, int]] = deque()  # times and units finished by then, from the middle on
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=total, initial=done, unit=unit, desc=label, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` units are finished in all, with a short note on how it goes."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        self._marks.append((now - self._skipped, done))
        while len(self._marks) > 2 and 2 * self._marks[1][1] <= self._first + done:
            self._marks.popleft()
        if self._bar is None and (now - self._last > _SECONDS_BETWEEN_LINES or done >= self.total):
            self._last = now
            line = f"{self._label}: {done}/{self.total} {self._unit}{self._speed(done)}"
            print(f"{line}  {note}".rstrip(), file=sys.stderr, flush=True)

    def _speed(self, done: int) -> str:
        """The rate and the time left, nothing after the first report; at the end what all took."""
        if done >= self.total:
            seconds = time.monotonic() - self._began
            return f" in {seconds:.0f} s" if seconds < 120 else f" in {seconds / 60:.1f} min"
        (since, before), (now, _) = self._marks[0], self._marks[-1]
        if done <= before:
            return ""
        rate = (done - before) / max(now - since, 1e-9)
        return f", {rate:.2f}/s, {(self.total - done) / rate / 60:.1f} min left"

    def skip(self, seconds: float) -> None:
        """Leave out the last seconds, in which nothing was done that will be done again, such as compiling."""
        self._skipped += seconds
        if self._bar is not None:
            self._bar.unpause()
