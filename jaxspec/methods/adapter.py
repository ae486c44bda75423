"""Adapters on disk: a method's trained pytree as safetensors, and what is needed to check and use it as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from jaxspec.config import ModelConfig
from jaxspec.decoding.loop import Drafter
from jaxspec.errors import UserError, suggest
from jaxspec.methods import METHODS
from jaxspec.methods.base import Method, PyTree
from jaxspec.model.hf import read_json
from jaxspec.model.load import Model
from jaxspec.tree import Tree, build_tree, sparse_paths

SHIPPED = Path(__file__).resolve().parents[2] / "adapters"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A trained adapter.

    Attributes:
      method: its method with the settings it was trained with.
      trainable: the pytree, float32.
      fingerprint: names the base it belongs to.
      info: further content of adapter.json: `base` (name), `training`, `data`, `accuracy` [M][K] per distance and
        rank, `tree` (the candidate paths of its draft tree).
    """

    method: Method
    trainable: PyTree
    fingerprint: str
    info: dict[str, Any]


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write adapter.safetensors and adapter.json.

    Args:
      folder: created where missing.
      adapter: what to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat = flax.traverse_util.flatten_dict(adapter.trainable, sep="/")
    weights = safetensors.numpy.save({name: np.asarray(leaf) for name, leaf in flat.items()})
    head = {
        "format": _FORMAT,
        "method": adapter.method.name,
        "settings": dataclasses.asdict(adapter.method),
        "fingerprint": adapter.fingerprint,
    }
    text = json.dumps(head | adapter.info, indent=1).encode()
    write_atomically(folder / "adapter.safetensors", weights)
    write_atomically(folder / "adapter.json", text)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: readers see the old content or the new, never half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def load_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Read an adapter and check it against its own settings and the base's shapes.

    Raises:
      UserError: missing or truncated files, an unknown method or setting, a tensor missing, unknown or misshapen.
    """
    head = read_json(folder / "adapter.json")
    if head.get("format") != _FORMAT:
        raise UserError(f"{folder}/adapter.json: format {head.get('format')!r} is not {_FORMAT}")
    name, settings = head.get("method"), head.get("settings", {})
    if name not in METHODS:
        raise UserError(f"{folder}/adapter.json: unknown method {name!r}")
    try:
        method = METHODS[name](**settings)
    except TypeError as error:
        raise UserError(f"{folder}/adapter.json: settings do not fit {name}: {error}") from None
    file = folder / "adapter.safetensors"
    try:
        flat = safetensors.numpy.load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None
    expected = flax.traverse_util.flatten_dict(method.abstract(config), sep="/")
    for key in sorted(expected.keys() | flat.keys()):
        if key not in flat:
            raise UserError(f"{file}: tensor {key!r} is missing")
        if key not in expected:
            raise UserError(f"{file}: unknown tensor {key!r}")
        if flat[key].shape != expected[key].shape:
            shape, wanted = list(flat[key].shape), list(expected[key].shape)
            raise UserError(f"{file}: tensor {key!r} has shape {shape}, {name} on this base needs {wanted}")
    trainable = flax.traverse_util.unflatten_dict({k: jnp.asarray(v) for k, v in flat.items()}, sep="/")
    info = {k: v for k, v in head.items() if k not in ("format", "method", "settings", "fingerprint")}
    return Adapter(method, trainable, head.get("fingerprint", ""), info)


def find_shipped(method: str, fingerprint: str) -> Path | None:
    """The folder of the adapter that ships for a method and a base, or None."""
    for file in sorted(SHIPPED.glob("*/adapter.json")):
        try:
            head = read_json(file)
        except UserError:  # a damaged neighbour is no reason to find nothing
            continue
        if head.get("method") == method and head.get("fingerprint") == fingerprint:
            return file.parent
    return None


def adapter_tree(adapter: Adapter, num_nodes: int | None = None) -> Tree:
    """The draft tree of an adapter: the one it carries, or a sparse one from its measured accuracies.

    Args:
      adapter: a trained adapter.
      num_nodes: nodes of a sparse tree, the root included; None: the adapter's own tree.

    Raises:
      UserError: fewer than two nodes, or an adapter whose tree or accuracies are missing or no good.
    """
    if num_nodes is not None and num_nodes < 2:
        raise UserError(f"a draft tree needs at least 2 nodes, the root and a candidate, got {num_nodes}")
    key = "tree" if num_nodes is None else "accuracy"
    if not isinstance(adapter.info.get(key), list):
        raise UserError(f"the adapter holds no list {key!r}; train.py writes it")
    if num_nodes is None:
        paths = [tuple(path) for path in adapter.info["tree"]]
    else:
        paths = sparse_paths(adapter.info["accuracy"], num_nodes)
    if not paths:
        raise UserError("the adapter's draft tree has no candidates; it was measured on too little text")
    return build_tree(paths, adapter.method.probe_distances)


def load_method(name: str, model: Model, adapter: str | Path | None = None, *, num_nodes: int | None = None) -> Drafter:
    """A method ready to decode on a base.

    Args:
      name: a key of `METHODS`.
      model: the base.
      adapter: folder of a trained adapter; default the one that ships for this method and base.
      num_nodes: nodes of the draft tree, the root included; default the adapter's own tree.

    Raises:
      UserError: an unknown method, no adapter, or one of another method or base.
    """
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{suggest(name, METHODS)}; methods: {', '.join(METHODS)}")
    if not METHODS[name].trainable:
        if adapter is not None:
            raise UserError(f"{name} takes no adapter, got {str(adapter)!r}")
        if num_nodes is not None:
            raise UserError(f"{name} drafts nothing and has no tree, got {num_nodes} nodes")
        return Drafter({}, build_tree([]), METHODS[name]())
    folder = Path(adapter) if adapter else find_shipped(name, model.fingerprint)
    if folder is None:
        raise UserError(
            f"no adapter of {name} ships for {model.name!r}; train one with train.py and pass it with --adapter"
        )
    if not (folder / "adapter.json").exists():
        raise UserError(f"{folder}: no adapter there (adapter.json is missing)")
    declared = read_json(folder / "adapter.json")
    if declared.get("method") != name:
        raise UserError(f"{folder}: this adapter belongs to method {declared.get('method')!r}, not {name!r}")
    if declared.get("fingerprint") != model.fingerprint:
        raise UserError(
            f"{folder}: this adapter was trained for another base ({declared.get('base')!r}, fingerprint "
            f"{declared.get('fingerprint')}); {model.name!r} has {model.fingerprint}"
        )
    loaded = load_adapter(folder, model.config)
    return Drafter(loaded.trainable, adapter_tree(loaded, num_nodes), loaded.method)
