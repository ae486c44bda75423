"""What a form of published drafters is, for `jaxspec.drafters.published.table`, which has them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.weights.model import Model
from jaxspec.weights.shards import WEIGHTS


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """One way to understand a published drafter. Where a file says it clearly there is one, else several.

    Attributes:
      meaning: what this one takes an unclear key to mean, in words; empty where it is the only one.
      adapter: the drafter as an adapter.
    """

    meaning: str
    adapter: Adapter


@dataclasses.dataclass(frozen=True)
class Written:
    """The files of a drafter in a form.

    Attributes:
      config: content of config.json.
      tensors: arrays by the form's names, for the first of its files of weights; floats are written in the dtype that
        the user chooses.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Form:
    """A form in which drafters are published.

    Attributes:
      method: name of the method that such a drafter is.
      about: whose form it is, in a few words.
      recognises: whether a config.json's content is of this form.
      read: a folder as adapters of a base, one for each way to understand it. Raises UserError naming the tensor, key
        or size that does not fit.
      write: an adapter of a base in this form. Raises UserError naming the setting that the form lacks. None: it is
        only read.
      weights: names of its file of weights, of which the first that is there counts; that is the one to write.
      further: names of files with more tensors, which may be there.
    """

    method: str
    about: str
    recognises: Callable[[Mapping[str, Any]], bool]
    read: Callable[[PublishedFolder, Model], list[Interpretation]]
    write: Callable[[Adapter, Model], Written] | None = None
    weights: tuple[str, ...] = WEIGHTS
    further: tuple[str, ...] = ()
