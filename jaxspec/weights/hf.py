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

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.errors import UserError, first_line
from jaxspec.files import read_json
from jaxspec.weights.params import HF_NAMES, load_params, stored_transposed, tensor_names
from jaxspec.weights.parts import split_parts

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
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


def load_directory(
    folder: Path, dtype: jnp.dtype, mesh: Mesh | None = None, form: str = ""
) -> tuple[ModelConfig, dict, str]:
    """Config, parameters and fingerprint of a Hugging Face directory, read tensor by tensor.

    For `dtype`, `mesh` and `form` see `load_params`.

    Raises:
      UserError: a file is missing, truncated or does not match.
    """
    config = read_config(folder)
    tensors = itertools.chain.from_iterable(map(_read_shard, _shards(folder)))
    params, fingerprint = load_params(config, tensors, HF_NAMES, dtype, str(folder), mesh, form)
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
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / f"{_WEIGHTS[0]}.index.json").write_text(json.dumps(index, indent=1))
    write_config(folder, config, eos)
