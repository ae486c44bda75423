"""What the lab trains and compares: the table of entries, and methods of the reader's own."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.early_exit import EarlyExit
from experiments.lab.terms import digest
from jaxspec.decoding.method import Method
from jaxspec.drafters import METHODS
from jaxspec.errors import UserError, first_line
from jaxspec.methods import (
    PPD,
    SPACE,
    Amphista,
    BiTA,
    DFlash,
    Eagle,
    HiddenTransfer,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    PromptLookup,
    Suffix,
    TokenRecycling,
)
from jaxspec.weights.load import DEFAULT_MODEL, load_shapes

_CLIPPED = {"clip": 1.0}


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A method with its settings, and how it is trained as far as the terms leave that open.

    Attributes:
      name: of its jobs and of its row.
      method: settings.
      rate: the learning rate in the middle of those that are tried; 0: nothing is trained.
      recipe: settings of its `TrainConfig` that the terms leave open.
      along_paths: it expands a tree of its own, with which recordings of it must be made.
      accelerator: too large for a CPU.
      source: digest of the file that the method is in; empty for one of the package's.
    """

    name: str
    method: Method
    rate: float = 0.0
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    along_paths: bool = False
    accelerator: bool = False
    source: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The method with its settings, as plain values."""
        return {"name": self.method.name} | dataclasses.asdict(self.method)

    @property
    def drafts(self) -> bool:
        """Whether it can decode; a control only predicts."""
        return self.method.name in METHODS


_HYDRA_PLUS = Hydra(heads=3, blocks=4, prefix_attention=True, alignment=1.0, labels=0.0)
_PATHS = {"along_paths": True}
_LARGE = {"accelerator": True}
TRAINED = (
    Entry("ppd", PPD(), 3e-2),
    Entry("hidden_transfer", HiddenTransfer(layers=(10, 14, 18), training="joint"), 7e-3, _CLIPPED),
    Entry("medusa", Medusa(heads=3), 3e-3, _CLIPPED),
    Entry("amphista", Amphista(heads=3), 1e-3, _CLIPPED),
    Entry("bita", BiTA(objective="distillation", initial="text"), 3e-2, _CLIPPED),
    Entry("hydra", Hydra(heads=3), 1e-3, _CLIPPED, **_PATHS),
    Entry("eagle", Eagle(depth=5, reads=(2, 15, 29), direct=True, even=True, confidence=0.3), 1e-3, _CLIPPED, **_PATHS),
    Entry("dflash", DFlash(layers=2, markov_rank=64), 1e-3, _CLIPPED, **_PATHS),
    Entry("space", SPACE(weighting="sums"), 1e-3, _CLIPPED),
    Entry("hydra++", _HYDRA_PLUS, 1e-3, _CLIPPED, **_PATHS, **_LARGE),
    Entry("medusa_full", Medusa(heads=3, lm_head="full"), 1e-3, _CLIPPED, **_LARGE),
    Entry("early_exit", EarlyExit((10, 14, 18)), 3e-3, _CLIPPED, **_LARGE),
    Entry("space_full", SPACE(weighting="sums", tuning="full"), 5e-5, _CLIPPED, **_LARGE),
)  # fmt: skip
UNTRAINED = (
    Entry("prompt_lookup", PromptLookup()),
    Entry("suffix", Suffix()),
    Entry("token_recycling", TokenRecycling()),
    Entry("lookahead", Lookahead()),
    Entry("jacobi", Jacobi()),
)
# What these draft depends on the drafts before, which a recording along the answer does not have.
DECODED = ("token_recycling", "lookahead", "jacobi")
SHIPPED = ("ppd", "hidden_transfer", "medusa", "amphista", "bita", "hydra", "eagle", "dflash", "space")


def own_entry(word: str, rate: float) -> Entry:
    """A method of the reader's own, as `FILE.py:CLASS`; `rate` as in `Entry`.

    Raises:
      UserError: the file holds no such method, or one that the lab cannot compare.
    """
    path, colon, class_name = word.rpartition(":")
    file = Path(path)
    if not colon or not file.is_file():
        raise UserError(f"{word}: no such file; give FILE.py:CLASS")
    method = _registered(_load_class(file, class_name), file)
    facts = method.facts(load_shapes(DEFAULT_MODEL))
    if not facts.distances:
        raise UserError(f"{method.name} drafts nothing")
    if facts.adapter and not facts.trained:
        raise UserError(
            f"{method.name} drafts from an adapter that `jaxspec {facts.adapter}` builds and does not train"
        )
    content = digest(file.read_text(encoding="utf-8"))
    return Entry(method.name, method, rate if facts.trained else 0.0, _CLIPPED, facts.own_layers > 0, source=content)


def _load_class(file: Path, name: str) -> type[Method]:
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
        raise UserError(f"{file}: holds no method {name!r}, a subclass of Method")
    return kind


def _registered(kind: type[Method], file: Path) -> Method:
    """The method with its defaults, known by its name from now on."""
    if METHODS.setdefault(kind.name, kind) is not kind:
        raise UserError(f"{file}: there is a method {kind.name!r} already; give {kind.__name__} another name")
    try:
        return kind()
    except TypeError as error:  # abstract, or with settings that have no default
        raise UserError(f"{file}: {kind.__name__} cannot be made without settings ({first_line(error)})") from None
