"""Published EAGLE-3 drafters of random weights, and what they compute, written out in numpy."""

import json

import numpy as np
import safetensors.numpy

WIDTH, TOKENS = 32, 16  # of the tiny base
LAYER = {
    "model_type": "llama",
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "torch_dtype": "float16",
}
DRAFTED = np.array([0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 14, 15])  # tokens


def eagle3(**more):
    """The config.json of EAGLE-3's authors, and `more` keys."""
    return LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFTED)} | more


def speculators(layer=(), **more):
    """The config.json of the package speculators, with further keys of its own and of its layer."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(DRAFTED),
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [method]},
        "transformer_layer_config": LAYER | dict(layer),
    } | more


def make_tensors(config, dtype=np.float16, seed=0):
    """Random tensors as a config.json says."""
    c = config.get("transformer_layer_config", config)
    prefix = "layers.0." if c is not config else "midlayer."
    D, F, Dh, heads, kv = (
        WIDTH,
        c["intermediate_size"],
        c["head_dim"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
    )
    names = {"input_layernorm": (D,), "hidden_norm": (D,), "post_attention_layernorm": (D,)}
    names |= {"self_attn.q_proj": (heads * Dh, 2 * D), "self_attn.o_proj": (D, heads * Dh)}
    names |= {f"self_attn.{name}_proj": (kv * Dh, 2 * D) for name in "kv"}
    names |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    if c["model_type"] == "qwen3":
        names |= {"self_attn.q_norm": (Dh,), "self_attn.k_norm": (Dh,)}
    shapes = {f"{prefix}{name}.weight": shape for name, shape in names.items()}
    if c.get("attention_bias"):
        shapes |= {f"{prefix}self_attn.{n}_proj.bias": names[f"self_attn.{n}_proj"][:1] for n in "qkvo"}
    count = config["draft_vocab_size"] or c["vocab_size"]
    shapes |= {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (count, D)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * D,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(3)}
    rng = np.random.default_rng(seed)
    tensors = {n: (("norm" in n) + 0.3 * rng.normal(size=shape)).astype(dtype) for n, shape in shapes.items()}
    if count < c["vocab_size"]:
        tensors |= {"d2t": DRAFTED - np.arange(count), "t2d": np.isin(np.arange(c["vocab_size"]), DRAFTED)}
    return tensors


def save(folder, config, tensors):
    """Write both."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors))
    return folder


def reference(config, tensors, states, embedding, tokens, count):
    """Logits [count][T, V'] of unrolls along a text, from the base's states [T, D] in the order of the file's ids."""
    c = config.get("transformer_layer_config", config)
    prefix = "layers.0." if c is not config else "midlayer."
    w = {name.removeprefix(prefix).removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}
    T, Dh, heads, kv = len(tokens), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c["rms_norm_eps"]) * scale

    def project(x, name, many):
        y = (x @ w[f"self_attn.{name}_proj"].T + w.get(f"self_attn.{name}_proj.bias", 0)).reshape(T, many, Dh)
        return norm(y, w[f"self_attn.{name}_norm"]) if f"self_attn.{name}_norm" in w else y

    def rotated(x, positions):
        turn = np.exp(1j * positions[:, None, None] * c["rope_theta"] ** (-np.arange(Dh // 2) / (Dh // 2)))
        turned = (x[..., : Dh // 2] + 1j * x[..., Dh // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    if config.get("fc_norm"):
        states = [norm(x, w[f"fc_norm.{i}"]) for i, x in enumerate(states)]
    taps = np.concatenate(states, -1)
    h = (norm(taps, w["input_norm"]) if config.get("norm_before_fc") else taps) @ w["fc"].T
    keys, values, masks, logits = [], [], [], []
    for unroll in range(count):
        normed, e = norm(h, w["hidden_norm"]), norm(embedding[np.roll(tokens, -1 - unroll)], w["input_layernorm"])
        x, at = np.concatenate([e, normed], -1), np.arange(T) + unroll
        q = rotated(project(x, "q", heads), at)
        keys.append(np.repeat(rotated(project(x, "k", kv), at), heads // kv, axis=1))
        values.append(np.repeat(project(x, "v", kv), heads // kv, axis=1))
        masks.append(np.tril(np.ones((T, T))) if unroll == 0 else np.eye(T))
        scores = np.einsum("qhd,khd->hqk", q, np.concatenate(keys)) / np.sqrt(Dh)
        weights = np.exp(scores) * np.concatenate(masks, 1)
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), np.concatenate(values))
        h = normed if config.get("norm_before_residual") else h
        h = h + mixed.reshape(T, -1) @ w["self_attn.o_proj"].T + w.get("self_attn.o_proj.bias", 0)
        x = norm(h, w["post_attention_layernorm"])
        gate = x @ w["mlp.gate_proj"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        out = norm(h, w["norm"])
        logits.append(out @ w["lm_head"].T)
        h = out if config.get("norm_output") else h
    return logits
