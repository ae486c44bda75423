"""Hugging Face directories: config.json, generation_config.json, weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.files import read_json
from jaxspec.weights.families import hf_config, parse_config, published_form
from jaxspec.weights.params import load_params
from jaxspec.weights.parts import split_parts
from jaxspec.weights.shards import WEIGHTS, differ, find_shards, read_tensors

_SHARD_BYTES = 5 * 10**9


def load_directory(
    folder: Path, dtype: jnp.dtype, mesh: Mesh | None = None, form: str = ""
) -> tuple[ModelConfig, dict, str]:
    """Config, parameters and fingerprint of a Hugging Face directory, read tensor by tensor.

    For `dtype`, `mesh` and `form` see `load_params`.

    Raises:
      UserError: a file is missing, truncated or does not match.
    """
    file = folder / "config.json"
    content, shards = read_json(file), find_shards(folder)
    config = parse_config(content, str(file))
    published = published_form(config, content)
    both = (published.names["embedding"], published.names["lm_head"])
    if config.tie_embeddings and differ(shards, both, published.plain):
        config = dataclasses.replace(config, tie_embeddings=False)  # as transformers has it: the file's own head counts
        published = published_form(config, content)
    tensors = published.read(config, read_tensors(folder, shards), str(folder))
    params, fingerprint = load_params(config, tensors, published.names, dtype, str(folder), mesh, form)
    return config, params, fingerprint


def eos_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, of generation_config.json and of config.json. Raises UserError for what is no id."""
    found = []
    for file in (folder / "generation_config.json", folder / "config.json"):
        eos = read_json(file).get("eos_token_id") if file.exists() else None
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(each) is int and each >= 0 for each in ids):
            raise UserError(f"{file}: eos_token_id must be one token id or several, got {str(eos)[:80]}")
        found += ids
    return tuple(dict.fromkeys(found))


def write_config(folder: Path, config: ModelConfig, eos: tuple[int, ...], **more: str) -> None:
    """Write config.json: the shapes, the ids that end a text, and `more` entries; generation_config.json: these ids."""
    ends = {"eos_token_id": list(eos)}
    (folder / "config.json").write_text(json.dumps(hf_config(config) | ends | more, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ends if eos else {}, indent=2))


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
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # as of any new file; safetensors makes it readable to its owner alone
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / f"{WEIGHTS[0]}.index.json").write_text(json.dumps(index, indent=1))
    write_config(folder, config, eos)
