"""Families of decoders: how each one's config.json says what the decoder needs, and what its files look like.

A family is a value of `model_type`. It differs from the others by fields of `ModelConfig` and by names; no code of
the decoder knows it. What a key means and its default are those of transformers' own configuration class. A key of that
class that would change what is computed, and that nothing here reads, is refused by name.
"""

from __future__ import annotations

from jaxspec.config import ModelConfig
from jaxspec.weights.family import Family, Fields, attention_bias, window
from jaxspec.weights.gemma_families import GEMMA_FAMILIES
from jaxspec.weights.keys import Keys
from jaxspec.weights.params import HF_NAMES
from jaxspec.weights.published import Published
from jaxspec.weights.remote_families import REMOTE_FAMILIES

_FUSED = {
    **HF_NAMES,
    **{f"attention/{part}": f"self_attn.qkv_proj[{part}]" for part in "qkv"},
    **{f"mlp/{part}": f"mlp.gate_up_proj[{part}]" for part in ("gate", "up")},
}


def _biases(keys: Keys) -> Fields:
    return attention_bias(keys) | {"mlp_bias": keys.flag("mlp_bias")}


def _write_biases(config: ModelConfig) -> Fields:
    return {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}


def _used_window(keys: Keys) -> int | None:
    return window(keys) if keys.flag("use_sliding_window") else None


def _upper_layers(keys: Keys, layers: int) -> list[bool]:
    first = keys.count("max_window_layers", 10**6, least=0)
    return [i >= first for i in range(layers)]


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
FAMILIES: dict[str, Family] = {  # by model_type
    "llama": Family("LlamaForCausalLM", read=_biases, write=_write_biases),
    "mistral": Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        read=_biases,
        write=_write_biases,
        window=window,
    ),
    "qwen2": Family("Qwen2ForCausalLM", read=lambda keys: {"qkv_bias": True}, **_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        read=lambda keys: attention_bias(keys) | {"head_norms": True},
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
    "phi3": Family(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        window=window,
        published=lambda config: Published(_FUSED, fused={"qkv_proj": "qkv", "gate_up_proj": "gate_up"}),
        partial_rope=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        read=lambda keys: attention_bias(keys) | {"norms": "after", "joint_norms": True},
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
    **GEMMA_FAMILIES,
    **REMOTE_FAMILIES,
}
