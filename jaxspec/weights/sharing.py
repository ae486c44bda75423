"""Bases that share some weights with another one, such as embeddings: config.json says with which, and names the rest.

config.json           as in a Hugging Face directory, and what is shared: see `Shared`
adapter.safetensors   or another file: the weights of its own, as `storage.pack` stores them
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.files import read_json, write_json
from jaxspec.model.decoder import abstract_params, param_dtype
from jaxspec.weights.families import hf_config, read_config
from jaxspec.weights.parts import as_held
from jaxspec.weights.storage import check_shapes, read_weights

_KEY = "jaxspec_shared"


@dataclasses.dataclass(frozen=True)
class Shared:
    """The parameters that a base shares with another one.

    Attributes:
      base: the other one, as `load_model` takes it.
      base_fingerprint: which it must have.
      tensors: the shared parameters, by path.
      weights: the file of those that are its own.
      fingerprint: of the whole base.
    """

    base: str
    base_fingerprint: str
    tensors: Sequence[str]
    weights: str
    fingerprint: str


def write_sharing(folder: Path, config: ModelConfig, shared: Shared) -> None:
    """Write config.json beside the weights; another base on this machine is named as seen from the folder."""
    if Path(shared.base).exists():
        shared = dataclasses.replace(shared, base=os.path.relpath(shared.base, folder))
    content = hf_config(config) | {_KEY: dataclasses.asdict(shared)}
    write_json(folder / "config.json", content)


def read_shared(folder: Path) -> Shared | None:
    """Parameters that the base in a folder shares, or None. Raises UserError for a config.json that is incomplete."""
    file = folder / "config.json"
    content = read_json(file) if file.exists() else {}
    if _KEY not in content:
        return None
    try:
        shared = Shared(**content[_KEY])
    except TypeError as error:
        raise UserError(f"{file}: {_KEY} does not fit: {error}") from None
    there = folder / shared.base
    return dataclasses.replace(shared, base=str(there)) if there.exists() else shared


def join_shared(
    folder: Path, shared: Shared, other: dict, fingerprint: str, dtype: jnp.dtype
) -> tuple[ModelConfig, dict, str]:
    """Config, parameters and fingerprint of a base that shares parameters of another one.

    Args:
      folder: where it is.
      shared: of `read_shared`.
      other: the other base's parameters, on the devices that this one is for.
      fingerprint: of the other base.
      dtype: of the weights.

    Raises:
      UserError: the other base has other weights, or a tensor is missing or misshapen.
    """
    if fingerprint != shared.base_fingerprint:
        raise UserError(
            f"{folder}: this base shares weights with one of fingerprint {shared.base_fingerprint}; {shared.base!r} "
            f"has {fingerprint}"
        )
    config, file = read_config(folder), folder / shared.weights
    expected, theirs = (flatten_dict(tree, sep="/") for tree in (abstract_params(config, dtype), other))
    own = {path: x.astype(param_dtype(path, dtype)) for path, x in read_weights(file).items()}
    found = own | {path: theirs[path] for path in shared.tensors if path in theirs}
    check_shapes(file, found, expected, "the configuration")
    params = as_held(unflatten_dict({path: found[path] for path in expected}, sep="/"))
    return config, params, shared.fingerprint
