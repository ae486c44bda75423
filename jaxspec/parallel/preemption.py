"""SIGTERM, the polite end of a preemptible machine: what is done is kept, and the process ends well."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

import jax

from jaxspec.parallel.processes import any_process


def on_sigterm() -> Callable[[], bool]:
    """Handle the signal from now on.

    Until the returned function is first called, which is in the middle of a training, there is nothing to lose that
    is not on disk, and the signal ends the process with exit code 0; one of several at once, for JAX would wait for
    the others first. Afterwards the function says whether the signal came, to any of the processes.
    """
    asked, called = False, False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if not called:
            print("stopped; continue with --resume", file=sys.stderr, flush=True)
            if jax.distributed.is_initialized():
                os._exit(0)
            sys.exit(0)

    def stopping() -> bool:
        nonlocal called
        called = True
        return any_process(asked)

    signal.signal(signal.SIGTERM, handle)
    return stopping
