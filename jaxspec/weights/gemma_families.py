"""Gemma 2 and 3: norms around each half, scaled embeddings, capped scores and logits, windows in most layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxspec.config import ModelConfig
from jaxspec.weights.family import Family, Fields, all_but_one, attention_bias, window
from jaxspec.weights.keys import Keys
from jaxspec.weights.params import HF_NAMES
from jaxspec.weights.published import Published

_AROUND = {  # Gemma's names: its norms stand before and after each half
    **HF_NAMES,
    "attention_out_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
}


def _gemma(keys: Keys) -> Fields:
    width, head_dim = keys.number("query_pre_attn_scalar"), keys.count("head_dim", 10**4)
    return attention_bias(keys) | {
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
    window=window,
    pattern=_one_in(6),
    layer_types=True,
    published=lambda config: Published(_AROUND, norm_shift=1.0),
    names={"hidden_act": "hidden_activation"},
    local_rope=True,
    unread={"attn_logit_softcapping": None},
)

GEMMA_FAMILIES: dict[str, Family] = {  # by model_type
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        read=_gemma2,
        write=_write_gemma,
        window=window,
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
}
