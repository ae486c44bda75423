"""SIGTERM, the polite end of a preemptible machine: what is done is kept, and the process ends well."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

import jax


def on_sigterm() -> Callable[[], bool]:
    """Handle the signal from now on.

    Until the returned function is first called, which is in the middle of a training, there is nothing to lose that
    is not on disk, and the signal ends the process with exit code 0. Afterwards it says whether the signal came: to
    several processes it says so at the same call.
    """
    asked, calls = False, 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if not calls:
            print("stopped; --resume goes on from there", file=sys.stderr)
            sys.exit(0)

    def stopping() -> bool:
        nonlocal calls
        calls += 1
        if jax.process_count() > 1:  # JAX has its own handler then, and agrees on a step
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(calls)
        return asked

    if jax.process_count() == 1:
        signal.signal(signal.SIGTERM, handle)
    return stopping
