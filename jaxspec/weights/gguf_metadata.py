"""What the metadata of a GGUF file say of the model: its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import ReaderTensor

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.errors import UserError
from jaxspec.model.rope import llama3_frequencies
from jaxspec.weights.gguf_families import DIVISORS, FAMILIES, LONG_FACTORS, SHORT_FACTORS, GGUFFamily
from jaxspec.weights.keys import MOST_POSITIONS, Keys
from jaxspec.weights.rope_keys import BASES, FACTORS

# keys behind the architecture's name that are read, or that change nothing of what is computed
_READ = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
_READ += ("attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base")
_READ += ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length")
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False}
_NEUTRAL |= {"attention.max_alibi_bias": 0, "attention.clamp_kqv": 0, "rope.scaling.attn_factor": 1, "logit_scale": 1}
_NEUTRAL |= {"residual_scale": 1, "embedding_scale": 1}

Tensors = Mapping[str, ReaderTensor]


def read_metadata(
    architecture: str, content: Mapping[str, Any], tensors: Tensors, vocab_size: int, where: str
) -> ModelConfig:
    """The shapes of a model.

    Args:
      architecture: one of `FAMILIES`.
      content: the metadata whose keys begin with it.
      tensors: of the file, by name.
      vocab_size: V.
      where: the file, for messages.

    Raises:
      UserError: a key is missing, impossible, or would change what is computed and is not read.
    """
    family = FAMILIES[architecture]
    names = {key: f"{architecture}.{key}" for key in (*_READ, *family.keys)}
    keys = Keys(content, {"rope.freq_base": 10000.0, "attention.sliding_window": 0}, where, names)
    hidden, mlp = keys.count("embedding_length", 10**6), keys.count("feed_forward_length", 10**7)
    layers, heads = keys.count("block_count", 10**6), keys.count("attention.head_count", 10**4)
    longest = keys.count("context_length", MOST_POSITIONS)
    if layers > len(tensors):
        raise UserError(f"{where}: {names['block_count']} is {layers}, of {len(tensors)} tensors")
    head_dim = keys.optional_count("attention.key_length", 10**4) or hidden // heads
    rotated = content.get(f"{architecture}.rope.dimension_count", head_dim) if family.partial_rope else head_dim
    _refuse_unread(architecture, family, content, head_dim, rotated, where)
    theta = keys.number("rope.freq_base", *BASES)
    fields = dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.optional_count("attention.head_count_kv", 10**4) or heads,
        head_dim=head_dim,
        max_positions=longest,
        rope_theta=theta,
        rope_scaling=_long(keys, tensors, rotated) or _divided(keys, tensors, theta) or _linear(keys),
        rotary_dim=None if rotated == head_dim else rotated,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        head_norms="blk.0.attn_q_norm.weight" in tensors,
    )
    return ModelConfig(**fields | family.read(keys, head_dim))


def _refuse_unread(
    architecture: str, family: GGUFFamily, content: Mapping[str, Any], head_dim: int, rotated: Any, where: str
) -> None:
    """Raise UserError for a key of the architecture that could change what is computed, and is not read."""
    usual = _NEUTRAL | {"attention.value_length": head_dim, "rope.dimension_count": rotated}
    known, prefix = {*_READ, *_HARMLESS, *family.keys}, f"{architecture}."
    if type(rotated) is not int or not 0 < rotated <= head_dim or rotated % 2:
        wanted = f"an even number of at most {head_dim}"
        raise UserError(f"{where}: {prefix}rope.dimension_count must be {wanted}, got {rotated!s:.80}")
    for key, value in content.items():
        name = key.removeprefix(prefix)
        if name not in known and (name not in usual or value != usual[name]):
            wanted = f", only {usual[name]}" if name in usual else ""
            raise UserError(f"{where}: metadata key {key} {value!s:.80} is not supported{wanted}")


def _long(keys: Keys, tensors: Tensors, rotated: int) -> RopeScaling | None:
    """Phi's factors, one per frequency, for long texts and for short ones."""
    if "rope.scaling.attn_factor" not in keys.names or LONG_FACTORS not in tensors:
        return None
    original = keys.count("rope.scaling.original_context_length", MOST_POSITIONS, least=2)
    factors = {}
    for name in (SHORT_FACTORS, LONG_FACTORS):
        factors[name] = tuple(map(float, tensors[name].data)) if name in tensors else ()
        if len(factors[name]) != rotated // 2:
            raise UserError(f"{keys.where}: tensor {name!r} must hold {rotated // 2} factors, got {len(factors[name])}")
    return RopeScaling(
        "longrope",
        max(keys.count("context_length", MOST_POSITIONS) / original, 1.0),
        original,
        attention_factor=keys.optional_number("rope.scaling.attn_factor") or 1.0,
        short_factors=factors[SHORT_FACTORS],
        long_factors=factors[LONG_FACTORS],
    )


def _divided(keys: Keys, tensors: Tensors, theta: float) -> RopeScaling | None:
    """LLaMA 3's rule, which is stored as one divisor per frequency."""
    if DIVISORS not in tensors:
        return None
    divisors = tensors[DIVISORS].data
    scaling = RopeScaling("llama3", float(np.max(divisors)), original_max_positions=8192)
    plain = theta ** -(np.arange(len(divisors)) / len(divisors))
    if not np.allclose(plain / divisors, llama3_frequencies(plain, scaling), rtol=1e-3):
        raise UserError(f"{keys.where}: tensor {DIVISORS!r} is not LLaMA 3's; load the original directory")
    return scaling


def _linear(keys: Keys) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UserError(f"{keys.where}: rope scaling {kind!r} is not supported in GGUF files; supported: linear")
    key = "rope.scaling.factor" if keys.get("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.number(key, *FACTORS) if keys.get(key) else 1.0  # 0 is none, as in llama.cpp
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None
