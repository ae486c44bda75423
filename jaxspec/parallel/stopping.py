"""SIGTERM, the polite end of a preemptible machine, and Ctrl-C: the process keeps what is done before it ends."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import jax

from jaxspec.parallel.processes import any_process

_BEFORE = "stopped; continue with --resume"


class StopSignals:
    """Handles SIGTERM and SIGINT (Ctrl-C) from now on; called, it says whether one came to any of the processes.

    Until the first call, in the middle of a training, everything worth keeping is on disk, and a signal ends the
    process: SIGTERM with exit code 0, one of several processes abruptly, for JAX would wait for the others first;
    SIGINT by KeyboardInterrupt. So does a second SIGINT at any time.

    Attributes:
      interrupted: whether SIGINT came.
    """

    def __init__(self):
        self.interrupted = False
        self._asked, self._called = False, False
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._interrupt)

    def __call__(self) -> bool:
        self._called = True
        return any_process(self._asked)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if not self._called:
            print(_BEFORE, file=sys.stderr, flush=True)
            if jax.distributed.is_initialized():
                os._exit(0)
            sys.exit(0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        again, self._asked, self.interrupted = self.interrupted, True, True
        if not self._called:
            print(_BEFORE, file=sys.stderr, flush=True)
        if again or not self._called:
            raise KeyboardInterrupt
        print("stopping; Ctrl-C again ends the run without a checkpoint", file=sys.stderr, flush=True)
