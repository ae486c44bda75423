"""Hugging Face directories: config.json, generation_config.json, weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.errors import UserError
from jaxspec.files import read_json
from jaxspec.weights.params import HF_NAMES, load_params, stored_transposed, tensor_names
from jaxspec.weights.parts import split_parts
from jaxspec.weights.shards import WEIGHTS, differ, find_shards, read_tensors

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SHARD_BYTES = 5 * 10**9


def parse_config(hf: dict, where: str = "config.json") -> ModelConfig:
    """The shapes that the content of a Hugging Face config.json gives; `where` names it in messages.

    Raises:
      UserError: a family, activation, bias or rope scaling that the decoder does not have, or a missing key.
    """
    family = hf.get("model_type")
    if family not in _FAMILIES:
        raise UserError(f"{where}: model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
    if hf.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {hf['hidden_act']!r} is not supported, only silu")
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise UserError(f"{where}: attention_bias and mlp_bias are not supported for {family}")
    try:
        heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
        trained = hf.get("max_position_embeddings", 2048)
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        scaling = _parse_rope(rope, trained, where)
        window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", family == "mistral") else None
        return ModelConfig(
            vocab_size=hf["vocab_size"],
            hidden_size=hidden,
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            max_positions=_longest(hf, scaling, trained),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            head_norms=family == "qwen3",
            sliding_window=window,
            first_window_layer=hf.get("max_window_layers", 28) if window and family in ("qwen2", "qwen3") else 0,
        )
    except KeyError as error:
        raise UserError(f"{where}: key {error.args[0]!r} is missing") from None


def read_config(folder: Path) -> ModelConfig:
    """The shapes of a base from its config.json. Raises UserError as `parse_config`, or where it cannot be read."""
    file = folder / "config.json"
    return parse_config(read_json(file), str(file))


def _longest(hf: dict, scaling: RopeScaling | None, trained: int) -> int:
    """Tokens of context, stretched: `max_position_embeddings`, unless that is the context of pretraining."""
    if scaling and scaling.kind == "dynamic":
        return int(trained * scaling.factor)
    if scaling and scaling.kind == "linear":  # Vicuna's 16k models say both
        return max(trained, hf.get("max_sequence_length") or 0)
    return trained


def _parse_rope(rope: dict, trained: int, where: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3"):
        raise UserError(f"{where}: rope scaling {kind!r} is not supported; supported: linear, dynamic, llama3")
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "dynamic":  # transformers counts from max_position_embeddings, whatever else the config says
        return RopeScaling(kind, float(rope["factor"]), trained)
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        original_max_positions=int(rope.get("original_max_position_embeddings") or trained),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
    )


def hf_config(config: ModelConfig) -> dict:
    """The config.json of a base: the inverse of `parse_config`."""
    rope, trained = {"rope_type": "default", "rope_theta": config.rope_theta}, config.max_positions
    if config.rope_scaling:
        s = config.rope_scaling
        trained = s.original_max_positions if s.kind == "dynamic" else trained
        rope |= {"rope_type": s.kind, "factor": s.factor}
        if s.kind == "llama3":
            rope["original_max_position_embeddings"] = s.original_max_positions
            rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    family = "mistral" if config.sliding_window else "llama"
    family = "qwen3" if config.head_norms else "qwen2" if config.qkv_bias else family
    return {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": trained,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # the older style of the same
        "rope_scaling": rope if config.rope_scaling else None,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": config.first_window_layer,
        "hidden_act": "silu",
    }


def load_directory(folder: Path, dtype: jnp.dtype, mesh: Mesh | None = None) -> tuple[ModelConfig, dict, str]:
    """Config, parameters and fingerprint of a Hugging Face directory, read tensor by tensor.

    For `dtype` and `mesh` see `load_params`. Raises UserError where a file is missing, truncated or does not match.
    """
    config, shards = read_config(folder), find_shards(folder)
    if config.tie_embeddings and differ(shards, (HF_NAMES["embedding"], HF_NAMES["lm_head"])):
        config = dataclasses.replace(config, tie_embeddings=False)  # as transformers has it: the file's own head counts
    tensors = read_tensors(folder, shards)
    params, fingerprint = load_params(config, tensors, HF_NAMES, dtype, str(folder), mesh)
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
    flat = split_parts(config, params)
    paths = tensor_names(config, HF_NAMES)
    shards = split_state_dict_into_shards_factory(
        {name: flat[path] for name, path in paths.items()},
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in shards.filename_to_tensors.items():
        arrays = {name: np.asarray(flat[paths[name]]) for name in names}
        tensors = {n: np.ascontiguousarray(x.T if stored_transposed(paths[n]) else x) for n, x in arrays.items()}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # as of any new file; safetensors makes it readable to its owner alone
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / f"{WEIGHTS[0]}.index.json").write_text(json.dumps(index, indent=1))
    write_config(folder, config, eos)
