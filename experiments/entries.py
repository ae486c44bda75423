"""What enters the leaderboard: a method of the package, a config of one, or a class in a file of the reader's own."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import sys
from pathlib import Path

from jaxspec.config import TrainConfig
from jaxspec.drafting.method import Method
from jaxspec.errors import UserError, first_line, suggest
from jaxspec.methods import METHODS
from jaxspec.training.configs import load_configs
from jaxspec.training.run_config import RunConfig
from jaxspec.weights.load import DEFAULT_MODEL


@dataclasses.dataclass(frozen=True)
class Entry:
    """What enters.

    Attributes:
      name: of its row.
      run: the method with its settings, and how it is trained as far as the terms leave that open.
      source: digest of the file that the method is in; empty for one of the package's.
    """

    name: str
    run: RunConfig
    source: str = ""

    @property
    def method(self) -> Method:
        """Its settings."""
        return self.run.method


def find_entry(word: str, rate: float | None = None) -> Entry:
    """What a command line names: a method, a config of one for the default model, or `FILE.py:CLASS`.

    Args:
      word: the name. A method has the settings of its first config for the default model, where there is one.
      rate: the middle one of the learning rates to try; default the config's.

    Raises:
      UserError: nothing of that name, or something that cannot enter.
    """
    configs = {name: run for name, run in load_configs().items() if run.model == DEFAULT_MODEL}
    file, colon, class_name = word.rpartition(":")
    configured = configs.get(word) or next((run for run in configs.values() if run.method.name == word), None)
    if colon:
        method = _own_method(Path(file), class_name)
        run = RunConfig(DEFAULT_MODEL, method, train=TrainConfig(learning_rate=1e-3, clip=1.0))
        entry = Entry(method.name, run, digest(Path(file).read_bytes()))
    elif configured:
        entry = Entry(word, configured)
    elif word in METHODS:
        entry = Entry(word, RunConfig(DEFAULT_MODEL, METHODS[word]()))
    else:
        known = [*METHODS, *configs]
        raise UserError(
            f"unknown entry {word!r}{suggest(word, known)}; give one of {', '.join(known)}, or FILE.py:CLASS"
        )
    if rate is not None:
        train = dataclasses.replace(entry.run.train, learning_rate=rate)
        entry = dataclasses.replace(entry, run=dataclasses.replace(entry.run, train=train))
    _check_entry(entry)
    return entry


def digest(content: bytes) -> str:
    """12 hex digits that name it."""
    return hashlib.sha256(content).hexdigest()[:12]


def _own_method(file: Path, name: str) -> Method:
    """A method of the reader's own, registered."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; give FILE.py:CLASS")
    spec = importlib.util.spec_from_file_location(f"entry_{file.stem}", file)
    if spec is None:
        raise UserError(f"{file}: not a Python file; give FILE.py:CLASS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever it does
        raise UserError(f"{file}: cannot be run ({type(error).__name__}: {first_line(error)})") from None
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f"{file}: holds no method {name!r}, a subclass of jaxspec.drafting.method.Method")
    if METHODS.setdefault(kind.name, kind) is not kind:
        raise UserError(f"{file}: there is a method {kind.name!r} already; give {name} another name")
    try:
        return kind()
    except TypeError as error:  # abstract, or with settings that have no default
        raise UserError(f"{file}: {name} cannot be made without settings ({first_line(error)})") from None


def _check_entry(entry: Entry) -> None:
    method = entry.method
    if not method.max_distance:
        raise UserError(f"{entry.name} drafts nothing")
    if method.replaces_base:
        raise UserError(f"{entry.name} trains a base of its own, and the leaderboard is about drafting for one base")
    if method.built_with:
        raise UserError(f"{entry.name} drafts from what {method.built_with} builds, which is not trained")
