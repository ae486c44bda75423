"""Hugging Face directories: config.json, safetensors shards (or older ones of PyTorch), tokenizer files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError, first_line
from jaxspec.files import read_json
from jaxspec.weights.families import hf_config, parse_config, published_form
from jaxspec.weights.params import load_params
from jaxspec.weights.parts import split_parts

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SHARD_BYTES = 5 * 10**9


def _shards(folder: Path) -> list[Path]:
    """Files of weights: what an index lists, or a single one; safetensors come before PyTorch's."""
    forms = {name: folder / f"{name}.index.json" for name in _WEIGHTS}
    there = (name for name, index in forms.items() if index.exists() or (folder / name).exists())
    names = [next(there, _WEIGHTS[0])]
    index = forms[names[0]]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: key 'weight_map' is missing or no object")
        names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).exists():
            raise UserError(f"{folder}: {name} is missing; jaxspec reads safetensors and PyTorch weights")
    return [folder / name for name in names]


def _read_shard(shard: Path) -> Iterator[tuple[str, np.ndarray]]:
    if shard.suffix != ".safetensors":
        yield from _pickled(shard)
        return
    try:
        with safe_open(shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (a file handle, not a dict)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise UserError(f"{shard}: not a complete safetensors file ({error})") from None


def _pickled(shard: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Like Vicuna's. PyTorch maps them into memory, and refuses anything but weights."""
    torch = _torch(shard)
    try:
        content = torch.load(shard, map_location="cpu", mmap=True, weights_only=True)
        halves = {name for name, tensor in content.items() if tensor.dtype == torch.bfloat16}
        arrays = {n: (tensor.view(torch.int16) if n in halves else tensor).numpy() for n, tensor in content.items()}
    except Exception as error:  # not whole, not mappable, not weights: torch raises many kinds
        raise UserError(f"{shard}: not a complete file of PyTorch weights ({first_line(error)})") from None
    for name, array in arrays.items():  # numpy knows bfloat16 from ml_dtypes alone
        yield name, array.view(ml_dtypes.bfloat16) if name in halves else array


def _torch(shard: Path) -> ModuleType:
    """PyTorch, which only this form of weights needs. In older versions reading weights can run code."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise UserError(f"{shard}: reading such weights takes PyTorch; install it with: pip install 'torch>=2.10'")
    return torch


def load_directory(folder: Path, dtype: jnp.dtype, mesh: Mesh | None = None) -> tuple[ModelConfig, dict, str]:
    """Config, parameters and fingerprint of a Hugging Face directory, read tensor by tensor.

    For `dtype` and `mesh` see `load_params`. Raises UserError where a file is missing, truncated or does not match.
    """
    file = folder / "config.json"
    content = read_json(file)
    config = parse_config(content, str(file))
    form = published_form(config, content)
    tensors = form.read(config, itertools.chain.from_iterable(map(_read_shard, _shards(folder))), str(folder))
    params, fingerprint = load_params(config, tensors, form.names, dtype, str(folder), mesh)
    return config, params, fingerprint


def eos_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, from generation_config.json or config.json; one or several."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def write_config(folder: Path, config: ModelConfig, eos: tuple[int, ...], **more: str) -> None:
    """Write config.json: the shapes, the ids that end a text, and `more` entries."""
    (folder / "config.json").write_text(json.dumps(hf_config(config) | {"eos_token_id": list(eos)} | more, indent=2))


def save_directory(
    folder: Path, config: ModelConfig, params: dict, eos: tuple[int, ...] = (), shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write config.json and weights so that transformers and `load_model` can read them.

    Weights go to the host's memory a shard at a time; where there are several, an index says which holds what.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat, form = split_parts(config, params), published_form(config, hf_config(config))
    paths = form.groups(config)
    shards = split_state_dict_into_shards_factory(
        {name: [flat[path] for path in parts.values()] for name, parts in paths.items()},
        get_storage_size=lambda arrays: sum(array.nbytes for array in arrays),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in shards.filename_to_tensors.items():
        tensors = {name: form.written(config, name, flat, paths[name]) for name in names}
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / f"{_WEIGHTS[0]}.index.json").write_text(json.dumps(index, indent=1))
    write_config(folder, config, eos)
