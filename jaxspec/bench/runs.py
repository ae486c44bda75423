"""What to compare, as a user writes it: `METHOD[+METHOD...] [tree=SPEC] [vocabulary=N] [adapter=DIR]`.

A draft model is given as `[draft=MODEL] [draft-adapter=DIR]`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Sequence

from jaxspec.drafters import load_drafter, method_names
from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError, suggest
from jaxspec.files import display_name
from jaxspec.weights.load import Model

REFERENCE = "autoregressive"
AGAIN = f"{REFERENCE} again"  # against itself: how far two ways differ that do not
_FORM = "METHOD[+METHOD...] [tree=SPEC] [vocabulary=N] [adapter=DIR] [draft=MODEL] [draft-adapter=DIR]"
_SETTINGS = ("tree", "vocabulary", "adapter", "draft", "draft-adapter")


@dataclasses.dataclass(frozen=True)
class Run:
    """A method and how to load it.

    Attributes:
      method: a key of `METHODS`, or several joined by a +.
      tree: as `load_drafter` takes it; None for the adapter's own.
      vocabulary: how many tokens may be drafted, 0 is all; None for the adapter's own.
      adapter: folder; None for the one that ships.
      draft: a draft model, as `load_drafter` takes it; None for the one that ships.
      draft_adapter: folder of an adapter for it.
    """

    method: str
    tree: str | None = None
    vocabulary: int | None = None
    adapter: str | None = None
    draft: str | None = None
    draft_adapter: str | None = None

    @property
    def text(self) -> str:
        """As a user writes it, with files and folders by their own names: what is kept names no machine's paths."""
        values = [(name, getattr(self, name.replace("-", "_"))) for name in _SETTINGS]
        given = [f"{name}={display_name(str(value))}" for name, value in values if value is not None]
        return shlex.join([self.method, *given])

    @property
    def name(self) -> str:
        """The same without the adapter."""
        return dataclasses.replace(self, adapter=None).text

    def load(self, model: Model, batch_size: int = 1, temperature: float = 0.0) -> Drafter:
        """What it names, ready to decode on a base; the settings and errors of `load_drafter`."""
        return load_drafter(
            self.method, model, self.adapter, tree=self.tree, draft_vocabulary=self.vocabulary, batch_size=batch_size,
            temperature=temperature, draft_model=self.draft, draft_adapter=self.draft_adapter,
        )  # fmt: skip


def parse_run(text: str) -> Run:
    """Read a run. Raises UserError for an unknown method or setting, or a setting that is given twice."""
    try:
        method, *words = shlex.split(text) or [""]
    except ValueError as error:  # an open quote
        raise UserError(f"run {text!r}: {error}") from None
    try:
        names = method_names(method)
    except UserError as error:
        raise UserError(f"run {text!r}: expected {_FORM}, {error}") from None
    given = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _SETTINGS or not value:
            raise UserError(f"run {text!r}: expected {_FORM}, got {word!r}{suggest(name, _SETTINGS)}")
        if name in given:
            raise UserError(f"run {text!r}: {name} is given twice")
        given[name] = value
    if given and names == [REFERENCE]:
        raise UserError(f"run {text!r}: {method} drafts nothing and takes no settings")
    if "vocabulary" in given:
        if not given["vocabulary"].isdecimal():
            raise UserError(f"run {text!r}: vocabulary must be a whole number, got {given['vocabulary']!r}")
        if given.get("tree") == "auto":
            raise UserError(f"run {text!r}: a tree of auto brings its own vocabulary")
        given["vocabulary"] = int(given["vocabulary"])
    return Run(method, **{name.replace("-", "_"): value for name, value in given.items()})


def name_runs(texts: Sequence[str]) -> dict[str, Run]:
    """Runs by the names of their ways, autoregressive decoding first; named twice it races itself.

    An adapter is part of a name only where nothing else tells two runs apart.

    Raises:
      UserError: a run that cannot be read, or two of the same name.
    """
    runs = [parse_run(text) for text in texts]
    alike = Counter(run.name for run in runs)
    named: dict[str, Run] = {}
    for run in runs:
        name = run.text if alike[run.name] > 1 else run.name
        if name == REFERENCE in named:
            name = AGAIN
        if name in named:
            raise UserError(f"two runs are called {name!r}: give them other settings, or adapters with other names")
        named[name] = run
    return {REFERENCE: Run(REFERENCE)} | named
