"""Tiny random models of every family, as transformers writes them: it is the judge of what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.peers import cache_name

WINDOW, ORIGINAL, LENGTH = 6, 12, 40  # texts are longer than windows and original contexts
_COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
_FALCON = {key: value for key, value in _COMMON.items() if key not in ("intermediate_size", "num_key_value_heads")}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, rope_theta=1e4)
_LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=ORIGINAL)
_LONG |= dict(short_factor=[1.0, 1.1, 1.2], long_factor=[1.5, 2.5, 4.0])

# by name: the family, and what differs from its defaults
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_biases": ("llama", _COMMON | dict(attention_bias=True, mlp_bias=True)),
    "llama_yarn": ("llama", _COMMON | dict(rope_parameters=_YARN)),
    "llama_yarn_mscale": (
        "llama",
        _COMMON | dict(rope_parameters=_YARN | dict(mscale=1.4, mscale_all_dim=0.6, truncate=False, beta_fast=4.0)),
    ),
    "qwen2_layers": (
        "qwen2",
        _COMMON | dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=[_SLIDING, _FULL, _SLIDING, _FULL]),
    ),
    "qwen3_layers": (
        "qwen3",
        _COMMON
        | dict(head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=WINDOW)
        | dict(layer_types=[_FULL, _SLIDING, _FULL, _SLIDING]),
    ),
    "gemma2": (
        "gemma2",
        _COMMON
        | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW)
        | dict(attn_logit_softcapping=5.0, final_logit_softcapping=9.0),
    ),
    "gemma3": (
        "gemma3_text",
        _COMMON
        | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, num_hidden_layers=7)
        | dict(final_logit_softcapping=9.0),
    ),
    "gemma3_linear": (
        "gemma3_text",
        _COMMON
        | dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW)
        | dict(layer_types=[_SLIDING, _FULL] * 2, attention_bias=True)
        | dict(
            rope_parameters={
                _FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                _SLIDING: dict(rope_type="default", rope_theta=1e4),
            }
        ),
    ),
    "phi3": ("phi3", _COMMON | dict(pad_token_id=0, sliding_window=WINDOW)),
    "phi4_longrope": (
        "phi3",
        _COMMON
        | dict(pad_token_id=0, partial_rotary_factor=0.75, tie_word_embeddings=True)
        | dict(original_max_position_embeddings=ORIGINAL, rope_scaling=_LONG),
    ),
    "glm": (
        "glm",
        _COMMON | dict(head_dim=16, partial_rotary_factor=0.5, attention_bias=True, pad_token_id=0),
    ),
    "olmo2": ("olmo2", _COMMON | dict(attention_bias=True)),
    "granite": (
        "granite",
        _COMMON
        | dict(embedding_multiplier=3.0, attention_multiplier=0.6, residual_multiplier=0.4, logits_scaling=2.0)
        | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "falcon_7b": ("falcon", _FALCON),
    "falcon_40b": ("falcon", _FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True)),
    "falcon_11b": (
        "falcon",
        _FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=40),
    ),
    "falcon_rw": ("falcon", _FALCON | dict(parallel_attn=False, multi_query=False, bias=True)),
}


def torch_model(name: str, changes: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """transformers' model of a family, all parameters random, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = FAMILIES[name]
    config = AutoConfig.for_model(family, **settings | (changes or {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = rng.standard_normal(parameter.shape)
            is_norm = "norm" in path or "ln_" in path
            if is_norm and path.endswith("weight"):
                noise = 0.2 * noise + (0.0 if family.startswith("gemma") else 1.0)
            elif parameter.ndim == 1:
                noise *= 0.5
            elif "embed" not in path and "lm_head" not in path:
                noise *= parameter.shape[1] ** -0.5 * (1.5 if "q_proj" in path or "qkv" in path else 1.0)
            parameter.copy_(torch.tensor(noise))
    return model


def save_torch(name: str, folder: Path, changes: dict[str, Any] | None = None) -> Any:
    """Write the directory of `torch_model`, and return it."""
    model = torch_model(name, changes)
    model.save_pretrained(folder)
    return model


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence [T]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0].numpy()


def torch_greedy(model: Any, prompt: list[int], count: int, cached: bool = False) -> list[int]:
    """The `count` likeliest tokens behind a prompt, one after the other, over transformers' cache or without one."""
    import torch

    ids, state, tokens, name = torch.tensor([prompt]), None, [], cache_name(model)
    with torch.no_grad():
        for _ in range(count):
            out = model(ids, use_cache=cached, **({name: state} if cached else {}))
            state = out[name] if cached else None
            tokens.append(int(out.logits[0, -1].argmax()))
            newest = torch.tensor([tokens[-1:]])
            ids = newest if cached else torch.cat([ids, newest], dim=1)
    return tokens
