"""Start and end of a command: precision, the compilation cache on disk, errors in one line."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from jaxspec.errors import UserError, first_line
from jaxspec.files import user_cache
from jaxspec.parallel.chips import GPU_MEMORY
from jaxspec.parallel.processes import is_leader
from jaxspec.progress import say

# Parts of the messages of errors that are raised when another process has ended
_LOST = ("Gloo", "coordination service", "Connection", "heartbeat", "UNAVAILABLE", "DEADLINE_EXCEEDED")

# Events of JAX: a program goes to XLA, and comes back
_LOWERED, _COMPILED = (f"/jax/core/compile/{name}_duration" for name in ("jaxpr_to_mlir_module", "backend_compile"))
_PATIENCE = 3.0  # seconds of one compilation before it is mentioned

# Log messages of Orbax, and of asyncio on its behalf, about errors that they also raise
_RAISED_TOO = (
    "_SignalingThread.run() raised",
    "Handler Commit operations",
    "Save Finalize thread",
    "exception was never retrieved",  # of further arrays, once the first one's error has ended the writing
    "unhandled exception during asyncio.run() shutdown",
)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Run an entry point: expected errors become one line on stderr and exit code 2; Ctrl-C exits with 130.

    Expected are user errors, unusable files, too little memory and, among several processes, the end of another.
    """
    # GPUs and TPUs multiply float32 in fewer bits by default; other dtypes are not affected
    _set_default("default_matmul_precision", "highest")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY))  # by default JAX reserves three quarters
    _say_errors_once()
    try:
        main(sys.argv[1:])
        gc.freeze()  # or Python would look through millions of objects again before it ends
    except BrokenPipeError:  # the reader of our output has gone away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _exit(130)
    except Exception as error:
        line = _explained(error)
        if line is None and not jax.distributed.is_initialized():
            raise
        print(f"error: {line}" if line else traceback.format_exc(), file=sys.stderr)
        _exit(2 if line else 1)


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk, so that the second start is fast. JAX's own environment variables override it."""
    _set_default("compilation_cache_dir", str(user_cache("xla")))
    _set_default("persistent_cache_min_compile_time_secs", 0.5)


@functools.cache
def mention_compilation() -> None:
    """Say on stderr, once, that XLA compiles: as soon as one program has taken a few seconds."""
    timer: threading.Timer | None = None
    said = False

    def mention() -> None:
        nonlocal said
        said = True
        if is_leader():
            say("compiling, which can take minutes at the first start and little at later ones")

    def follow(event: str, seconds: float, **_: Any) -> None:
        nonlocal timer
        if timer and event in (_LOWERED, _COMPILED):
            timer.cancel()
        if event == _LOWERED and not said:
            timer = threading.Timer(_PATIENCE, mention)
            timer.daemon = True
            timer.start()

    jax.monitoring.register_event_duration_secs_listener(follow)


def _set_default(name: str, value: Any) -> None:
    """Set an option of JAX that its environment variable does not set."""
    if f"JAX_{name.upper()}" not in os.environ:
        jax.config.update(f"jax_{name}", value)


def _say_errors_once() -> None:
    """Suppress messages that libraries print about an error that they also raise."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    sys.unraisablehook = _show_unraised


def _is_news(record: logging.LogRecord) -> bool:
    return not any(phrase in record.getMessage() for phrase in _RAISED_TOO)


def _show_unraised(unraised: Any) -> None:
    """As Python does, except for further errors of Orbax's writer, whose first one has closed its event loop."""
    text = str(unraised.exc_value)
    if text != "Event loop is closed" and "os_error_code=" not in text:
        sys.__unraisablehook__(unraised)


def _explained(error: Exception) -> str | None:
    """An error in one line; None for an unexpected one."""
    text = first_line(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        remedies = "smaller batches (--train.microbatch 1 in training), --weights int8, shorter texts"
        return f"out of memory; {remedies} or more devices help ({text})"
    if jax.distributed.is_initialized() and any(word in str(error) for word in _LOST):
        return f"the processes lost each other; see what the others say, and continue with --resume ({text})"
    if isinstance(error, OSError):  # a full disk, somebody else's folder, a name that is too long
        return text if error.filename is None else f"{error.filename}: {error.strerror}"
    return None


def _exit(code: int) -> NoReturn:
    """Exit; one of several processes exits at once, or it would wait for those that wait for it."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
