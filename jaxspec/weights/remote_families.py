"""Families whose published checkpoints came with code of their own, which transformers calls "remote code".

None of it is run here: what it computes is said by these entries, as for every other family (`family_table`). What it
computes beyond that is refused by name, or, where it begins at a length, the context ends there.
"""

from __future__ import annotations

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.weights.family import Family, Fields
from jaxspec.weights.keys import MOST_POSITIONS, Keys
from jaxspec.weights.params import HF_NAMES
from jaxspec.weights.published import Published
from jaxspec.weights.rope_keys import BASES, dynamic_scaling, longest


def _biases(keys: Keys) -> Fields:
    bias = keys.flag("bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _internlm(keys: Keys) -> Fields:
    """Its `rotary` says what others say in `rope_scaling`; configs without it are of code that rotates plainly."""
    given = {key: value for key, value in keys.part("rotary").content.items() if value is not None}
    rotary, fields = Keys(given, {"scaling_factor": 1.0}, f"{keys.where}: rotary"), _biases(keys)
    if not given:
        return fields
    fields["rope_theta"] = rotary.number("base", *BASES)
    if rotary.choice("type", {"origin": False, "dynamic": True}):
        trained = keys.count("max_position_embeddings", MOST_POSITIONS)
        head_dim = keys.count("hidden_size", 10**6) // keys.count("num_attention_heads", 10**4)
        scaling = dynamic_scaling(rotary, "scaling_factor", trained, head_dim)
        fields |= {"rope_scaling": scaling, "max_positions": longest(keys, scaling, trained)}
    return fields


_INTERNLM2_NAMES = {
    "embedding": "model.tok_embeddings.weight",
    "lm_head": "output.weight",
    "norm/scale": "model.norm.weight",
    "attention_norm/scale": "attention_norm.weight",
    "mlp_norm/scale": "ffn_norm.weight",
    **{f"attention/{part}": f"attention.wqkv[{part}]" for part in "qkv"},
    "attention/o": "attention.wo",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
    "layers": "model.layers",
}


def _chatglm(keys: Keys) -> Fields:
    """In its long versions the base is `rope_ratio` times as large; ChatGLM2's code divided positions by it."""
    ratio = keys.optional_number("rope_ratio") or 1.0
    if ratio != 1 and "chatglm2" in str(keys.get("_name_or_path")).lower():
        raise UserError(f"{keys.where}: rope_ratio {ratio:g} of ChatGLM2 is not supported, only ChatGLM3's")
    return {"qkv_bias": keys.flag("add_qkv_bias"), "rope_theta": 10000.0 * ratio}


_CHATGLM_NAMES = {
    "embedding": "transformer.embedding.word_embeddings.weight",
    "lm_head": "transformer.output_layer.weight",
    "norm/scale": "transformer.encoder.final_layernorm.weight",
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    **{f"attention/{part}": f"self_attention.query_key_value[{part}]" for part in "qkv"},
    "attention/o": "self_attention.dense",
    **{f"mlp/{part}": f"mlp.dense_h_to_4h[{part}]" for part in ("gate", "up")},
    "mlp/down": "mlp.dense_4h_to_h",
    "layers": "transformer.encoder.layers",
}


def _qwen(keys: Keys) -> Fields:
    """Beyond `seq_length` it would turn more slowly, by the length of the prompt, and scale queries: a text ends there.

    Its `intermediate_size` counts gate and up together.
    """
    longest = keys.count("max_position_embeddings", MOST_POSITIONS)
    if keys.flag("use_dynamic_ntk") or keys.flag("use_logn_attn"):
        longest = min(longest, keys.count("seq_length", MOST_POSITIONS))
    wide = keys.count("intermediate_size", 10**7, least=2)
    if wide % 2:
        raise keys.error("intermediate_size", "an even number, of gate and up together")
    bias = not keys.flag("no_bias")
    fields = {"qkv_bias": True, "o_bias": bias, "mlp_bias": bias}
    return fields | {"intermediate_size": wide // 2, "max_positions": longest}


_QWEN_NAMES = {
    "embedding": "transformer.wte.weight",
    "lm_head": "lm_head.weight",
    "norm/scale": "transformer.ln_f.weight",
    "attention_norm/scale": "ln_1.weight",
    "mlp_norm/scale": "ln_2.weight",
    **{f"attention/{part}": f"attn.c_attn[{part}]" for part in "qkv"},
    "attention/o": "attn.c_proj",
    "mlp/gate": "mlp.w2",
    "mlp/up": "mlp.w1",
    "mlp/down": "mlp.c_proj",
    "layers": "transformer.h",
}


def _form(
    names: dict[str, str], fused: dict[str, str], pairs: bool = False, aside: tuple[str, ...] = ()
) -> dict[str, object]:
    def published(config: ModelConfig) -> Published:
        return Published(names, fused=fused, pairs=pairs, aside=aside)

    return {"published": published}


REMOTE_FAMILIES: dict[str, Family] = {  # by model_type
    "internlm": Family(
        "InternLMForCausalLM",
        {"vocab_size": 103168, "bias": True},
        read=_internlm,
        own_head_dim=False,
    ),
    "internlm2": Family(
        "InternLM2ForCausalLM",
        {"vocab_size": 103168, "bias": True},
        read=_biases,
        own_head_dim=False,
        **_form(_INTERNLM2_NAMES, {"wqkv": "heads"}),
    ),
    "chatglm": Family(
        "ChatGLMModel",
        {
            "head_dim": 128,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "multi_query_attention": False,
        },
        read=_chatglm,
        names={
            "vocab_size": "padded_vocab_size",
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layernorm_epsilon",
        },
        partial_rope=True,
        unread={
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "interleaved_qkv": False,
            "multi_query_attention": True,
            "original_rope": True,
            "position_encoding_2d": False,  # of the first ChatGLM
            "post_layer_norm": True,
            "pre_seq_len": None,
            "quantization_bit": 0,
            "rmsnorm": True,
        },
        **_form(
            _CHATGLM_NAMES,
            {"query_key_value": "qkv", "dense_h_to_4h": "gate_up"},
            pairs=True,
            aside=("transformer.rotary_pos_emb.",),
        ),
    ),
    "qwen": Family(
        "QWenLMHeadModel",
        {"head_dim": 128, "seq_length": 2048, "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True},
        read=_qwen,
        names={"rms_norm_eps": "layer_norm_epsilon", "head_dim": "kv_channels", "rope_theta": "rotary_emb_base"},
        unread={"rotary_pct": 1.0, "scale_attn_weights": True, "use_cache_quantization": False},
        **_form(_QWEN_NAMES, {"c_attn": "qkv"}),
    ),
    # what transformers made of ChatGLM's successors; ChatGLM3 is written in this form
    "glm": Family(
        "GlmForCausalLM",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        read=lambda keys: {"qkv_bias": keys.flag("attention_bias")},
        write=lambda config: {"attention_bias": config.qkv_bias},
        partial_rope=True,
        **_form(
            {**HF_NAMES, **{f"mlp/{part}": f"mlp.gate_up_proj[{part}]" for part in ("gate", "up")}},
            {"gate_up_proj": "gate_up"},
            pairs=True,
        ),
    ),
}
