"""SIGTERM, the polite end of a preemptible machine, and Ctrl-C: the process keeps what is done before it ends."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import jax

from jaxspec.parallel.processes import any_process
from jaxspec.progress import say


class StopSignals:
    """Context that handles SIGTERM and SIGINT (Ctrl-C), the latter where the process does not ignore it.

    Until `came` is first called, in the middle of a training, everything worth keeping is on disk, and a signal ends
    the process: SIGTERM with exit code 0, one of several processes abruptly, for JAX would wait for the others first;
    SIGINT by KeyboardInterrupt. So does a second SIGINT at any time.

    Attributes:
      interrupted: whether SIGINT came.
    """

    def __init__(self):
        self.interrupted = False
        self._asked, self._training = False, False

    def __enter__(self) -> StopSignals:
        handlers = {signal.SIGTERM: self._terminate, signal.SIGINT: self._interrupt}
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
            del handlers[signal.SIGINT]
        self._former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def came(self) -> bool:
        """Whether a signal came to any of the processes."""
        self._training = True
        return any_process(self._asked)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if not self._training:
            say("stopped; continue with --resume")
            if jax.distributed.is_initialized():
                os._exit(0)
            sys.exit(0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        again, self._asked, self.interrupted = self.interrupted, True, True
        if again or not self._training:
            say("continue with --resume")
            raise KeyboardInterrupt
        say("stopping after this update; Ctrl-C again ends the run at once, at its last checkpoint")
