"""Which code runs: Python, JAX and Flax, some pairs of which fail deep inside an import, and this package's own."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__version__ = "0.2.0"
# Packages that decide what decoding gives.
DECODING = ("decoding", "drafters", "generation", "methods", "model", "trees", "weights")
OLDEST_PYTHON = (3, 11)
TRIED = {"jax": ("0.10.2", "0.13"), "flax": ("0.12.8", "0.13")}
_ADVICE = 'pip install "jax>={},<{}" "flax>={},<{}"'.format(*TRIED["jax"], *TRIED["flax"])


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def check_versions() -> None:
    """Raise ImportError for a Python, JAX or Flax that was not tried; where nobody catches it, one line is shown."""
    line = _what_was_not_tried()
    if line:
        error, show = ImportError(line), sys.excepthook
        sys.excepthook = lambda kind, raised, trace: (
            print(f"error: {line}", file=sys.stderr) if raised is error else show(kind, raised, trace)
        )
        raise error


def _what_was_not_tried() -> str:
    if sys.version_info < OLDEST_PYTHON:
        oldest, found = ".".join(map(str, OLDEST_PYTHON)), platform.python_version()
        return f"jaxspec needs Python {oldest} or newer, and this is {found}; make an environment with a newer one"
    for package, (lowest, beyond) in TRIED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"jaxspec needs {package}>={lowest},<{beyond}, and none is installed: {_ADVICE}"
        if not _parts(lowest) <= _parts(found) < _parts(beyond):
            return f"jaxspec was tried with {package}>={lowest},<{beyond}, and {found} is installed: {_ADVICE}"
    return ""


@functools.cache
def code_version() -> str:
    """The commit that last changed the code that decodes, with a digest of changes since; the version without git.

    What another version has measured is not taken for the same benchmark's.
    """
    return _commit_of(Path(__file__).parent) or __version__


def _commit_of(package: Path) -> str:
    """Empty where the package is not part of a checkout of its own, but installed."""
    if not (package.parent / ".git").exists():
        return ""
    folders = [str(package / name) for name in DECODING]
    git = ["git", "-C", str(package)]
    try:
        commit, changes = (
            subprocess.run([*git, *command, "--", *folders], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["log", "-1", "--abbrev=12", "--format=%h"], ["diff", "HEAD"])
        )
    except (OSError, subprocess.CalledProcessError):  # no git here, or another user's checkout
        return ""
    return commit and commit + (f"-{hashlib.sha256(changes.encode()).hexdigest()[:6]}" if changes else "")
