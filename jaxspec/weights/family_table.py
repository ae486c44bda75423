"""Families of decoders: how each one's config.json says what the decoder needs, and what its files look like.

A family is a value of `model_type`. It differs from the others by fields of `ModelConfig` and by names; no code of
the decoder knows it. What a key means and its default are those of transformers' own configuration class. A key of that
class that would change what is computed, and that nothing here reads, is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxspec.config import ModelConfig
from jaxspec.weights.family import Family, Fields, all_but_one
from jaxspec.weights.keys import MOST_POSITIONS, Keys
from jaxspec.weights.params import HF_NAMES
from jaxspec.weights.published import Published
from jaxspec.weights.remote_families import REMOTE_FAMILIES

_AROUND = {  # Gemma's names: its norms stand before and after each half
    **HF_NAMES,
    "attention_out_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
}
_FUSED = {
    **HF_NAMES,
    **{f"attention/{part}": f"self_attn.qkv_proj[{part}]" for part in "qkv"},
    **{f"mlp/{part}": f"mlp.gate_up_proj[{part}]" for part in ("gate", "up")},
}


def _attention_bias(keys: Keys) -> Fields:
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _biases(keys: Keys) -> Fields:
    return _attention_bias(keys) | {"mlp_bias": keys.flag("mlp_bias")}


def _write_biases(config: ModelConfig) -> Fields:
    return {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}


def _window(keys: Keys) -> int | None:
    return keys.optional_count("sliding_window", MOST_POSITIONS)


def _used_window(keys: Keys) -> int | None:
    return _window(keys) if keys.flag("use_sliding_window") else None


def _upper_layers(keys: Keys, layers: int) -> list[bool]:
    first = keys.count("max_window_layers", 10**6, least=0)
    return [i >= first for i in range(layers)]


def _gemma(keys: Keys) -> Fields:
    width, head_dim = keys.number("query_pre_attn_scalar"), keys.count("head_dim", 10**4)
    return _attention_bias(keys) | {
        "norms": "around",
        "score_scale": None if width == head_dim else width**-0.5,
        "logit_cap": keys.optional_number("final_logit_softcapping"),
        "embedding_scale": math.sqrt(keys.count("hidden_size", 10**6)),
    }


def _gemma2(keys: Keys) -> Fields:
    return _gemma(keys) | {"score_cap": keys.optional_number("attn_logit_softcapping")}


def _gemma3(keys: Keys) -> Fields:
    return _gemma(keys) | {"head_norms": True}


def _write_gemma(config: ModelConfig) -> Fields:
    width = config.head_dim if config.score_scale is None else config.score_scale**-2
    return {
        "query_pre_attn_scalar": round(width) if math.isclose(width, round(width)) else width,
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
        "attention_bias": config.qkv_bias,
    }


def _one_in(period: int) -> Callable[[Keys, int], list[bool]]:
    """All layers but one of a period have a window."""

    def pattern(keys: Keys, layers: int) -> list[bool]:
        count = keys.count("sliding_window_pattern", 10**6) if keys.get("sliding_window_pattern") else period
        return all_but_one(count, layers)

    return pattern


def _granite(keys: Keys) -> Fields:
    width = keys.count("head_dim", 10**4) if keys.get("head_dim") else None
    usual = (width or keys.count("hidden_size", 10**6) // keys.count("num_attention_heads", 10**4)) ** -0.5
    scale = keys.number("attention_multiplier")
    return _biases(keys) | {
        "embedding_scale": keys.number("embedding_multiplier"),
        "residual_scale": keys.number("residual_multiplier"),
        "score_scale": None if scale == usual else scale,
        "logit_scale": 1 / keys.number("logits_scaling"),
    }


def _write_granite(config: ModelConfig) -> Fields:
    return _write_biases(config) | {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.head_dim**-0.5 if config.score_scale is None else config.score_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def _falcon(keys: Keys) -> Fields:
    new, bias = keys.flag("new_decoder_architecture"), keys.flag("bias")
    parallel = new or keys.flag("parallel_attn")
    norms = keys.optional_count("num_ln_in_parallel_attn", 2) or (2 if new else 1)
    fields = {
        "norm": "layer",
        "parallel": parallel,
        "shared_norm": parallel and not (new and norms == 2),
        "gated": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
    }
    if not new:
        fields["num_kv_heads"] = 1 if keys.flag("multi_query") else keys.count("num_attention_heads", 10**4)
    return fields


def _write_falcon(config: ModelConfig) -> Fields:
    new = config.parallel and (not config.shared_norm or config.num_kv_heads not in (1, config.num_heads))
    return {
        "new_decoder_architecture": new,
        "multi_query": not new and config.num_kv_heads == 1,
        "parallel_attn": config.parallel,
        "num_ln_in_parallel_attn": (1 if config.shared_norm else 2) if new else None,
        "bias": config.qkv_bias,
        "alibi": False,
    }


def _falcon_names(config: ModelConfig) -> Published:
    two = config.parallel and not config.shared_norm
    names = {
        "embedding": "transformer.word_embeddings.weight",
        "lm_head": "lm_head.weight",
        "norm": "transformer.ln_f",
        "attention_norm": "ln_attn" if two else "input_layernorm",
        "mlp_norm": "ln_mlp" if two else "post_attention_layernorm",
        **{f"attention/{part}": f"self_attention.query_key_value[{part}]" for part in "qkv"},
        "attention/o": "self_attention.dense",
        "mlp/up": "mlp.dense_h_to_4h",
        "mlp/down": "mlp.dense_4h_to_h",
        "layers": "transformer.h",
    }
    return Published(names, fused={"query_key_value": "heads"})


_QWEN = dict(
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    window=_used_window,
    pattern=_upper_layers,
    layer_types=True,
)
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    read=_gemma3,
    write=_write_gemma,
    window=_window,
    pattern=_one_in(6),
    layer_types=True,
    published=lambda config: Published(_AROUND, norm_shift=1.0),
    names={"hidden_act": "hidden_activation"},
    local_rope=True,
    unread={"attn_logit_softcapping": None},
)

FAMILIES: dict[str, Family] = {  # by model_type
    "llama": Family("LlamaForCausalLM", read=_biases, write=_write_biases),
    "mistral": Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        read=_biases,
        write=_write_biases,
        window=_window,
    ),
    "qwen2": Family("Qwen2ForCausalLM", read=lambda keys: {"qkv_bias": True}, **_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        read=lambda keys: _attention_bias(keys) | {"head_norms": True},
        write=lambda config: {"attention_bias": config.qkv_bias},
        **_QWEN | {"defaults": _QWEN["defaults"] | {"head_dim": 128}},
    ),
    # Qwen 2 with a module that predicts the next tokens, which decoding does not need
    "mimo": Family(
        "MiMoForCausalLM",
        read=lambda keys: {"qkv_bias": True},
        published=lambda config: Published(aside=("model.mtp_layers.",)),
        **_QWEN,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        read=_gemma2,
        write=_write_gemma,
        window=_window,
        pattern=lambda keys, layers: [i % 2 == 0 for i in range(layers)],
        layer_types=True,
        published=lambda config: Published(_AROUND, norm_shift=1.0),
        names={"hidden_act": "hidden_activation"},
    ),
    "gemma3_text": _GEMMA3,
    # with images, of which only the decoder is read; a config leaves out what is the default of its class
    "gemma3": dataclasses.replace(
        _GEMMA3,
        defaults=_GEMMA3.defaults | {"vocab_size": 262208, "num_attention_heads": 8},
        published=lambda config: Published(
            _AROUND,
            norm_shift=1.0,
            aside=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
            prefixes={
                "language_model.model.": "model.",
                "model.language_model.": "model.",
                "language_model.lm_head.": "lm_head.",
            },
        ),
        part="text_config",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        window=_window,
        published=lambda config: Published(_FUSED, fused={"qkv_proj": "qkv", "gate_up_proj": "gate_up"}),
        partial_rope=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        read=lambda keys: _attention_bias(keys) | {"norms": "after", "joint_norms": True},
        write=lambda config: {"attention_bias": config.qkv_bias},
        published=lambda config: Published(
            {
                **HF_NAMES,
                "attention_out_norm/scale": "post_attention_layernorm.weight",
                "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
            }
        ),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        read=_granite,
        write=_write_granite,
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
        },
        read=_falcon,
        write=_write_falcon,
        published=_falcon_names,
        names={
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
        },
        own_head_dim=False,
        mlp_factor=4,
        unread={"alibi": False, "apply_residual_connection_post_layernorm": False},
    ),
    **REMOTE_FAMILIES,
}
