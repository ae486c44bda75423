"""The names of the drafters that a benchmark compares."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jaxspec.drafters import DrafterSpec, parse_drafter
from jaxspec.errors import UserError

REFERENCE = "autoregressive"
AGAIN = f"{REFERENCE} again"  # against itself: how far two ways differ that do not


def name_runs(texts: Sequence[str]) -> dict[str, DrafterSpec]:
    """Drafters by their names, autoregressive decoding first; named twice it races itself.

    An adapter is part of a name only where nothing else tells two drafters apart.

    Raises:
      UserError: a drafter that cannot be read, or two of the same name.
    """
    runs = [parse_drafter(text) for text in texts]
    names = [dataclasses.replace(run, adapter=None).text for run in runs]
    alike = Counter(names)
    named: dict[str, DrafterSpec] = {}
    for name, run in zip(names, runs, strict=True):
        name = run.text if alike[name] > 1 else name
        if name == REFERENCE in named:
            name = AGAIN
        if name in named:
            raise UserError(f"two runs are called {name!r}: give them other settings, or adapters with other names")
        named[name] = run
    return {REFERENCE: parse_drafter(REFERENCE)} | named
