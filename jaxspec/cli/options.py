"""What the entry points share: parsing options, reporting errors on one line, warming up JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import jax
import tyro

from jaxspec.errors import UserError, first_line, suggest

T = TypeVar("T")

# Of what is raised when another process has gone, by whatever carries the messages
_LOST = ("Gloo", "coordination service", "Connection", "heartbeat", "UNAVAILABLE", "DEADLINE_EXCEEDED")


# What Orbax, and asyncio for it, log of an error that it raises as well, with a traceback wherever it comes through
_RAISED_TOO = (
    "_SignalingThread.run() raised",
    "Handler Commit operations",
    "Save Finalize thread",
    "exception was never retrieved",  # of a further array, when the first one's error has ended the writing
    "unhandled exception during asyncio.run() shutdown",
)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(phrase in record.getMessage() for phrase in _RAISED_TOO)


def _show_unraised(unraised: Any) -> None:
    """As Python does, but for further errors of Orbax's writer, whose first one has closed its event loop."""
    text = str(unraised.exc_value)
    if text != "Event loop is closed" and "os_error_code=" not in text:
        sys.__unraisablehook__(unraised)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Run an entry point: what is known to go wrong becomes one line on stderr and exit code 2; Ctrl-C exits with 130.

    That is user errors, unusable files, too little memory, and among several processes the end of another.
    """
    # float32 is to be float32 on GPUs and TPUs too, which multiply it in fewer bits otherwise; others are as they are
    if "JAX_DEFAULT_MATMUL_PRECISION" not in os.environ:
        jax.config.update("jax_default_matmul_precision", "highest")
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    sys.unraisablehook = _show_unraised
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # the reader of our output went away
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


def _explained(error: Exception) -> str | None:
    """An error in one line; None for what should not happen."""
    text = first_line(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory; smaller batches (--train.microbatch 1 in training) or more devices help ({text})"
    if jax.distributed.is_initialized() and any(word in str(error) for word in _LOST):
        return f"the processes lost each other; see what the others say, --resume goes on ({text})"
    if isinstance(error, OSError):  # a full disk, a folder of somebody else's, a name that is too long
        return text if error.filename is None else f"{error.filename}: {error.strerror}"
    return None


def _exit(code: int) -> NoReturn:
    """End; where there are several processes at once, or this one would wait for those that wait for it."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parse(kind: type[T], args: Sequence[str], default: T | None = None, prog: str | None = None) -> T:
    """Options from the command line.

    Args:
      kind: dataclass whose fields are the options; a union of several makes a command of each.
      args: the command line.
      default: values of options not given.
      prog: name of the program, for --help.

    Raises:
      UserError: an option that does not exist, or a value that does not fit it.
    """
    extra = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(kind, args=list(args), prog=prog, return_unknown_args=True, **extra)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise UserError(_first_paragraph(errors.getvalue())) from None
    if unknown:
        word = unknown[0]
        options = [f"--{name}" for name in _option_names(parsed)]
        raise UserError(f"unknown option {word!r}{suggest(word, options)}; --help lists them all")
    return parsed


def _first_paragraph(box: str) -> str:
    """The sentence inside a drawn box: what stands between its title and the next ruled line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()[1:]]
    said = ["" if set(line) == {"-"} else line for line in lines]  # where a terminal knows nothing but ASCII
    return " ".join(itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, said)))


def _option_names(settings: object, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a dataclass, nested ones included."""
    names, hints = [], get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        given = [note.name for note in get_args(hints[field.name]) if getattr(note, "name", None)]
        name = prefix + (given or [field.name.replace("_", "-")])[0]
        value = getattr(settings, field.name)
        names += _option_names(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return names


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk, so that the second start is fast. JAX's own environment variables override it."""
    settings = {
        "compilation_cache_dir": str(Path.home() / ".cache" / "jaxspec" / "xla"),
        "persistent_cache_min_compile_time_secs": 0.5,
    }
    for name, value in settings.items():
        if f"JAX_{name.upper()}" not in os.environ:
            jax.config.update(f"jax_{name}", value)
