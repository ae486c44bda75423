"""Adapters on disk: a method's trained pytree as safetensors, and what is needed to check and use it as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import safetensors.numpy

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Method, abstract_trainable, method_text
from jaxspec.errors import UserError
from jaxspec.files import read_json, shipped_folder, write_atomically
from jaxspec.methods import METHODS
from jaxspec.parallel.processes import as_leader, host
from jaxspec.weights.parts import with_split_gates
from jaxspec.weights.storage import check_shapes, pack, read_weights

WEIGHTS = "adapter.safetensors"
OWN_MODEL = "model"  # folder, beside an adapter, of a base that was trained with it
_FORMAT = 1
_FREQUENT = "frequent_tokens"  # a tensor beside those of the method


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A trained adapter, or one that a program builds.

    Attributes:
      method: its method with the settings it was trained with.
      trainable: the pytree, float32 and int32.
      fingerprint: names the base it belongs to.
      info: further content of adapter.json: `base` (name), `training`, `data`, `accuracy` [M][K] per distance and
        rank, `calibration` ([M][2] by `temperature_key`: `calibrated`), `tree` (the candidate paths of its draft
        tree), `draft_vocabulary` (how many tokens it drafts, 0 all).
      frequent_tokens: ids by how often the base writes them, int32; a draft vocabulary is the first of them. None where
        they were not counted.
      folder: that it was read from, or None.
    """

    method: Method
    trainable: PyTree
    fingerprint: str
    info: dict[str, Any]
    frequent_tokens: np.ndarray | None = None
    folder: Path | None = None

    @functools.cached_property
    def digest(self) -> str:
        """12 hex digits that name the weights, or the settings of an adapter without weights."""
        digest = hashlib.sha256(b"" if self.trainable else method_text(self.method).encode())
        for leaf in jax.tree.leaves(with_split_gates(self.trainable)):  # one at a time: all of a whole base may not fit
            digest.update(host(leaf).tobytes())
        return digest.hexdigest()[:12]


def save_adapter(folder: Path, adapter: Adapter, dtype: str = "float32") -> None:
    """Write adapter.safetensors and adapter.json.

    Args:
      folder: created where missing.
      adapter: what to write.
      dtype: of the weights, as `storage.pack` takes it.

    Raises:
      UserError: it cannot be written there.
    """
    tensors = pack(with_split_gates(adapter.trainable), dtype)
    if adapter.frequent_tokens is not None:
        tensors[_FREQUENT] = adapter.frequent_tokens.astype(np.min_scalar_type(adapter.frequent_tokens.max()))
    weights = safetensors.numpy.save(tensors)
    head = {
        "format": _FORMAT,
        "method": adapter.method.name,
        "settings": dataclasses.asdict(adapter.method),
        "fingerprint": adapter.fingerprint,
    }
    text = json.dumps(head | adapter.info, indent=1).encode()

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / WEIGHTS, weights)
            write_atomically(folder / "adapter.json", text)
        except OSError as error:
            raise UserError(f"{folder}: the adapter cannot be written there ({error.strerror})") from None

    as_leader(write)


def read_head(folder: Path) -> dict[str, Any]:
    """The content of adapter.json. Raises UserError where there is none, or one of another format."""
    file = folder / "adapter.json"
    if not folder.exists():
        raise UserError(f"{folder}: no such folder, and so no adapter there (adapter.json is missing)")
    if not file.exists():
        unfinished = (
            "; its training is not finished: continue it with --resume" if (folder / "run.json").exists() else ""
        )
        raise UserError(f"{folder}: no adapter there (adapter.json is missing){unfinished}")
    head = read_json(file)
    if head.get("format") != _FORMAT:
        raise UserError(f"{file}: format {head.get('format')!r} is not {_FORMAT}")
    return head


def load_adapter(folder: Path, config: ModelConfig, head: Mapping[str, Any] | None = None) -> Adapter:
    """Read an adapter, of whichever method, and check it against its own settings and the base's shapes.

    Args:
      folder: what `save_adapter` wrote.
      config: of the base.
      head: of `read_head`, where that was read already.

    Raises:
      UserError: missing or truncated files, an unknown method or setting, a tensor missing, unknown or misshapen.
    """
    info = dict(head or read_head(folder))
    name, settings, fingerprint = info.pop("method", None), info.pop("settings", {}), info.pop("fingerprint", "")
    if name not in METHODS:
        raise UserError(f"{folder}/adapter.json: unknown method {name!r}")
    try:
        method = method_of(name, settings)
        expected = flax.traverse_util.flatten_dict(abstract_trainable(method, config), sep="/")
    except (AttributeError, TypeError) as error:  # AttributeError: no object of settings
        raise UserError(f"{folder}/adapter.json: settings do not fit {name}: {error}") from None
    file = folder / WEIGHTS
    flat = read_weights(file)
    frequent = flat.pop(_FREQUENT, None)
    if frequent is not None:
        ids = np.unique(frequent)
        whole = frequent.ndim == 1 and np.issubdtype(frequent.dtype, np.integer) and len(ids) == frequent.size
        if not whole or not np.all((ids >= 0) & (ids < config.vocab_size)):
            known = f"the vocabulary of {config.vocab_size}"
            raise UserError(f"{file}: {_FREQUENT} must hold different token ids of {known}")
        frequent = frequent.astype(np.int32)
    check_shapes(file, flat, expected, f"{name} on this base")
    for key in sorted(flat.keys() - expected.keys()):
        raise UserError(f"{file}: unknown tensor {key!r}")
    trainable = flax.traverse_util.unflatten_dict(flat, sep="/")
    info.pop("format")
    return Adapter(method, trainable, fingerprint, info, frequent, folder)


def method_of(name: str, settings: Mapping[str, Any]) -> Method:
    """A method with settings as JSON holds them: lists instead of tuples. Raises TypeError where they do not fit."""
    return METHODS[name](**{key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()})


def find_shipped(method: str, fingerprint: str) -> Path | None:
    """The folder of the adapter that ships for a method and a base, or None.

    An installed package lacks the weights of large ones.
    """
    for folder, head in shipped_heads().items():
        if head.get("method") == method and head.get("fingerprint") == fingerprint:
            return folder
    return None


def shipped_heads() -> dict[Path, dict[str, Any]]:
    """The content of adapter.json of all adapters that ship, by folder; damaged ones are left out."""
    heads = {}
    for file in sorted(shipped_folder("adapters").glob("*/adapter.json")):
        with contextlib.suppress(UserError):
            heads[file.parent] = read_json(file)
    return heads
