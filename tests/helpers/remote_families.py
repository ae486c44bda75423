"""The families whose checkpoints came with code of their own, once more in numpy: tiny random files and their logits.

Written from what the published files and papers say, in the order of the files, apart from everything in the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

LENGTH, TRAINED = 40, 12  # texts are longer than the original context
D, MLP, LAYERS, V, H, K, DH = 32, 24, 3, 64, 4, 2, 8

_SIZES = dict(
    vocab_size=V, hidden_size=D, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=H
)  # as most files call them

CONFIGS = {
    "internlm": dict(
        _SIZES,
        model_type="internlm",
        max_position_embeddings=TRAINED,
        rms_norm_eps=1e-6,
        bias=True,
        rotary={"base": 10000, "type": "dynamic", "scaling_factor": 4.0},
    ),
    "internlm2": dict(
        _SIZES,
        model_type="internlm2",
        num_key_value_heads=K,
        max_position_embeddings=TRAINED,
        rms_norm_eps=1e-5,
        rope_theta=1000000,
        rope_scaling={"type": "dynamic", "factor": 4.0},
        bias=False,
    ),
    "chatglm": dict(
        model_type="chatglm",
        padded_vocab_size=V,
        hidden_size=D,
        ffn_hidden_size=MLP,
        num_layers=LAYERS,
        num_attention_heads=H,
        multi_query_attention=True,
        multi_query_group_num=K,
        kv_channels=16,
        seq_length=64,
        layernorm_epsilon=1e-5,
        rope_ratio=50,
        add_qkv_bias=True,
        add_bias_linear=False,
        rmsnorm=True,
        original_rope=True,
        post_layer_norm=True,
    ),
    "qwen": dict(
        _SIZES,
        model_type="qwen",
        intermediate_size=2 * MLP,  # of gate and up together
        kv_channels=DH,
        seq_length=LENGTH,
        max_position_embeddings=4 * LENGTH,
        layer_norm_epsilon=1e-6,
        rotary_emb_base=10000,
        rotary_pct=1.0,
        scale_attn_weights=True,
        no_bias=True,
        use_dynamic_ntk=True,
        use_logn_attn=True,
    ),
}


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the files, with its shape."""
    family = c["model_type"]
    if family == "internlm":
        layer = {f"self_attn.{x}_proj.weight": (D, D) for x in "qkvo"} | {
            f"self_attn.{x}_proj.bias": (D,) for x in "qkvo"
        }
        layer |= {"mlp.gate_proj.weight": (MLP, D), "mlp.up_proj.weight": (MLP, D), "mlp.down_proj.weight": (D, MLP)}
        layer |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        ends = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
        return ends | {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    if family == "internlm2":
        layer = {"attention.wqkv.weight": ((H + 2 * K) * DH, D), "attention.wo.weight": (D, H * DH)}
        layer |= {"feed_forward.w1.weight": (MLP, D), "feed_forward.w3.weight": (MLP, D)}
        layer |= {"feed_forward.w2.weight": (D, MLP), "attention_norm.weight": (D,), "ffn_norm.weight": (D,)}
        ends = {"model.tok_embeddings.weight": (V, D), "model.norm.weight": (D,), "output.weight": (V, D)}
        return ends | {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    if family == "chatglm":
        wide = (H + 2 * K) * c["kv_channels"]
        layer = {"self_attention.query_key_value.weight": (wide, D), "self_attention.query_key_value.bias": (wide,)}
        layer |= {"self_attention.dense.weight": (D, H * c["kv_channels"]), "input_layernorm.weight": (D,)}
        layer |= {"mlp.dense_h_to_4h.weight": (2 * MLP, D), "mlp.dense_4h_to_h.weight": (D, MLP)}
        layer |= {"post_attention_layernorm.weight": (D,)}
        whole = {"embedding.word_embeddings.weight": (V, D), "encoder.final_layernorm.weight": (D,)}
        whole |= {"output_layer.weight": (V, D), "rotary_pos_emb.inv_freq": (c["kv_channels"] // 4,)}
        whole |= {f"encoder.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
        return {f"transformer.{name}": shape for name, shape in whole.items()}
    layer = {
        "attn.c_attn.weight": (3 * H * DH, D),
        "attn.c_attn.bias": (3 * H * DH,),
        "attn.c_proj.weight": (D, H * DH),
    }
    layer |= {"mlp.w1.weight": (MLP, D), "mlp.w2.weight": (MLP, D), "mlp.c_proj.weight": (D, MLP)}
    layer |= {"ln_1.weight": (D,), "ln_2.weight": (D,)}
    ends = {"transformer.wte.weight": (V, D), "transformer.ln_f.weight": (D,), "lm_head.weight": (V, D)}
    return ends | {f"transformer.h.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def write(folder: Path, family: str, seed: int = 0, **changes: object) -> dict[str, np.ndarray]:
    """Write a directory as published, all parameters random, and return its tensors."""
    rng, tensors, content = np.random.default_rng(seed), {}, CONFIGS[family] | changes
    for name, shape in shapes(content).items():
        noise = rng.standard_normal(shape)
        if len(shape) == 1:
            noise = 0.5 * noise if name.endswith("bias") else 1 + 0.2 * noise
        elif not any(end in name for end in ("emb", "wte", "output.", "output_layer", "lm_head")):
            noise *= 1.5 * shape[1] ** -0.5
        tensors[name] = noise.astype(np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return tensors


def logits(family: str, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """[T, V], in float64."""
    return {"internlm": _internlm, "internlm2": _internlm2, "chatglm": _chatglm, "qwen": _qwen}[family](
        CONFIGS[family], {name: np.float64(x) for name, x in tensors.items()}, tokens
    )


def greedy(family: str, tensors: dict[str, np.ndarray], prompt: list[int], count: int) -> list[int]:
    """The `count` likeliest tokens behind a prompt, one after the other."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(family, tensors, np.array(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def _internlm(c, t, tokens):
    x = t["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        h = _norm(x, t[p + "input_layernorm.weight"], 1e-6)
        q, k, v = (
            (h @ t[f"{p}self_attn.{n}_proj.weight"].T + t[f"{p}self_attn.{n}_proj.bias"]).reshape(-1, H, DH)
            for n in "qkv"
        )
        angles = _dynamic_angles(DH, 10000.0, 4.0, len(tokens))
        o = _attention(_turn_halves(q, angles), _turn_halves(k, angles), v)
        x = x + o @ t[p + "self_attn.o_proj.weight"].T + t[p + "self_attn.o_proj.bias"]
        h = _norm(x, t[p + "post_attention_layernorm.weight"], 1e-6)
        gate, up = h @ t[p + "mlp.gate_proj.weight"].T, h @ t[p + "mlp.up_proj.weight"].T
        x = x + (_silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T
    return _norm(x, t["model.norm.weight"], 1e-6) @ t["lm_head.weight"].T


def _internlm2(c, t, tokens):
    x = t["model.tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        groups = (_norm(x, t[p + "attention_norm.weight"], 1e-5) @ t[p + "attention.wqkv.weight"].T).reshape(
            len(x), K, H // K + 2, DH
        )
        q, k, v = groups[:, :, :-2].reshape(len(x), H, DH), groups[:, :, -2], groups[:, :, -1]
        angles = _dynamic_angles(DH, 1e6, 4.0, len(tokens))
        o = _attention(_turn_halves(q, angles), _turn_halves(k, angles), v)
        x = x + o @ t[p + "attention.wo.weight"].T
        h = _norm(x, t[p + "ffn_norm.weight"], 1e-5)
        w1, w3 = h @ t[p + "feed_forward.w1.weight"].T, h @ t[p + "feed_forward.w3.weight"].T
        x = x + (_silu(w1) * w3) @ t[p + "feed_forward.w2.weight"].T
    return _norm(x, t["model.norm.weight"], 1e-5) @ t["output.weight"].T


def _chatglm(c, t, tokens):
    x, dh = t["transformer.embedding.word_embeddings.weight"][tokens], c["kv_channels"]
    base, size = 10000.0 * c["rope_ratio"], dh // 2
    angles = np.arange(len(tokens))[:, None] / base ** (np.arange(0, size, 2) / size)
    for i in range(LAYERS):
        p = f"transformer.encoder.layers.{i}."
        h = _norm(x, t[p + "input_layernorm.weight"], 1e-5)
        mixed = h @ t[p + "self_attention.query_key_value.weight"].T + t[p + "self_attention.query_key_value.bias"]
        q, k, v = np.split(mixed, [H * dh, (H + K) * dh], axis=-1)
        q, k, v = q.reshape(-1, H, dh), k.reshape(-1, K, dh), v.reshape(-1, K, dh)
        x = x + _attention(_turn_pairs(q, angles), _turn_pairs(k, angles), v) @ t[p + "self_attention.dense.weight"].T
        h = _norm(x, t[p + "post_attention_layernorm.weight"], 1e-5) @ t[p + "mlp.dense_h_to_4h.weight"].T
        x = x + (_silu(h[:, :MLP]) * h[:, MLP:]) @ t[p + "mlp.dense_4h_to_h.weight"].T
    return _norm(x, t["transformer.encoder.final_layernorm.weight"], 1e-5) @ t["transformer.output_layer.weight"].T


def _qwen(c, t, tokens):
    """Within `seq_length`, where neither its dynamic base nor its scaled queries begin."""
    x = t["transformer.wte.weight"][tokens]
    angles = np.arange(len(tokens))[:, None] / 10000.0 ** (np.arange(0, DH, 2) / DH)
    for i in range(LAYERS):
        p = f"transformer.h.{i}."
        mixed = _norm(x, t[p + "ln_1.weight"], 1e-6) @ t[p + "attn.c_attn.weight"].T + t[p + "attn.c_attn.bias"]
        q, k, v = (part.reshape(-1, H, DH) for part in np.split(mixed, 3, axis=-1))
        x = x + _attention(_turn_halves(q, angles), _turn_halves(k, angles), v) @ t[p + "attn.c_proj.weight"].T
        h = _norm(x, t[p + "ln_2.weight"], 1e-6)
        a1, a2 = h @ t[p + "mlp.w1.weight"].T, h @ t[p + "mlp.w2.weight"].T
        x = x + (a1 * _silu(a2)) @ t[p + "mlp.c_proj.weight"].T
    return _norm(x, t["transformer.ln_f.weight"], 1e-6) @ t["lm_head.weight"].T


def _norm(x, scale, epsilon):
    return scale * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _silu(x):
    return x / (1 + np.exp(-x))


def _dynamic_angles(size, base, factor, length):
    """[T, size / 2] as when a text is decoded token by token: each key keeps the base of the length it came at."""
    angles = []
    for position in range(length):
        grown = max(position + 1, TRAINED)
        now = base * (factor * grown / TRAINED - (factor - 1)) ** (size / (size - 2))
        angles.append(position / now ** (np.arange(0, size, 2) / size))
    return np.array(angles)


def _turn_halves(x, angles):
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _turn_pairs(x, angles):
    """Neighbours of the first half of every head; the second half stays."""
    out = x.copy()
    for i in range(angles.shape[-1]):
        cos, sin = np.cos(angles[:, None, i]), np.sin(angles[:, None, i])
        out[..., 2 * i] = x[..., 2 * i] * cos - x[..., 2 * i + 1] * sin
        out[..., 2 * i + 1] = x[..., 2 * i + 1] * cos + x[..., 2 * i] * sin
    return out


def _attention(q, k, v):
    """Causal, [T, heads, Dh] each: [T, heads * Dh]."""
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)
