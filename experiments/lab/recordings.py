"""Recorded offers as one compressed file."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import Offer
from jaxspec.drafters.adapter import Adapter, method_of
from jaxspec.drafters.drafter import Drafter
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError, first_line
from jaxspec.files import write_atomically
from jaxspec.trees import from_paths
from jaxspec.tuning.record import Recording
from jaxspec.weights.model import Model

_STORED = {"tokens": np.int32, "known": bool, "log_p": np.float32, "parent": np.int16}  # fields of offers, and as what
_WHOLE = {"parent": np.int32}  # as what they are read
_INFO = ("accuracy", "calibration", "tree", "draft_vocabulary")  # of an adapter


def save_recordings(file: Path, recordings: Sequence[Recording], drafter: Drafter) -> None:
    """Write recordings, answer after answer, with what a replay needs of the drafter."""
    arrays = {
        "sources": np.array(json.dumps([_described(source) for source in drafter.sources])),
        "lengths": np.array([len(recording.answer) for recording in recordings], np.int32),
        "answers": np.concatenate([recording.answer for recording in recordings]).astype(np.int32),
    }
    for number in range(len(recordings[0].offers)):
        for field in _STORED:
            parts = [getattr(recording.offers[number], field) for recording in recordings]
            if parts[0] is not None:
                arrays[f"{field}-{number}"] = np.concatenate(parts).astype(_STORED[field])
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, stream.getvalue())


def load_recordings(file: Path, model: Model) -> tuple[list[Recording], Drafter]:
    """Read what `save_recordings` wrote, and a drafter to replay it with, which lacks the weights of adapters.

    Raises:
      UserError: there is no such file or it is damaged.
    """
    try:
        with np.load(file) as held:
            arrays = {name: held[name] for name in held.files}
        drafter = Drafter(
            tuple(_source(each, model.config) for each in json.loads(str(arrays["sources"]))), model, from_paths([])
        )
        return _divided(arrays), drafter
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{file}: no recording that can be read ({first_line(error)}); remove the job's result"
        ) from None


def _described(source: Source) -> dict[str, Any]:
    """Of a source what a replay needs."""
    info = source.adapter.info if source.adapter else {}
    settings = {"name": source.method.name} | dataclasses.asdict(source.method)
    kept = {name: info[name] for name in _INFO if name in info}
    return {"settings": settings, "info": kept, "trained": source.adapter is not None}


def _source(described: dict[str, Any], config: ModelConfig) -> Source:
    settings = dict(described["settings"])
    method = method_of(settings.pop("name"), settings)
    return Source(method, {}, config, Adapter(method, {}, "", described["info"]) if described["trained"] else None)


def _divided(arrays: dict[str, np.ndarray]) -> list[Recording]:
    """The arrays of all answers as a recording each."""
    ends = np.cumsum(arrays["lengths"])[:-1]
    places = np.cumsum(arrays["lengths"] - 1)[:-1]
    split = {
        name: np.split(array.astype(_WHOLE.get(name.partition("-")[0], array.dtype)), places)
        for name, array in arrays.items()
        if name.partition("-")[0] in _STORED
    }

    def offer(source: int, row: int) -> Offer:
        parts = {field: split.get(f"{field}-{source}") for field in _STORED}
        return Offer(**{field: part and part[row] for field, part in parts.items()})

    sources = range(sum(name.startswith("tokens-") for name in arrays))
    answers = np.split(arrays["answers"], ends)
    return [Recording(answer, [offer(i, row) for i in sources]) for row, answer in enumerate(answers)]
