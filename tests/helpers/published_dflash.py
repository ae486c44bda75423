"""Published DFlash drafters of random weights, and what they compute, written out in numpy."""

import numpy as np

from tests.helpers.published import DRAFTED, TOKENS, WIDTH

BLOCK, MASK = 4, 13
LAYER = {
    "model_type": "qwen3",
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 2,
    "torch_dtype": "float16",
}


def authors(dflash=(), **more):
    """The config.json of DFlash's authors, with further keys of its own and of `dflash_config`."""
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1]} | dict(dflash)
    config = {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": 3}
    return LAYER | config | {"dflash_config": own} | more


def packaged(layer=(), **more):
    """The config.json of the package speculators, with further keys of its own and of its layers."""
    method = {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": len(DRAFTED),
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [2, 0],
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [method]},
        "transformer_layer_config": LAYER | dict(layer),
    } | more


def dspark(**more):
    """The config.json of DSpark in the package speculators, which predicts from the anchor's row unless it says not."""
    named = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "markov_rank": 5}
    proposal = packaged()["speculators_config"] | {"algorithm": "dspark"}
    config = packaged(**named, speculators_config=proposal, confidence_head_with_markov=True)
    del config["sample_from_anchor"]
    return config | more


def taps_of(config):
    """Before which layers of the base it reads, in the order of the file."""
    outputs = config.get("dflash_config", {}).get("target_layer_ids")
    return [i + 1 for i in outputs] if outputs else config["aux_hidden_state_layer_ids"]


def make_dflash(config, head, dtype=np.float16, seed=0):
    """Random tensors as a config.json says, and of the base's projection [V, D] the rows that are drafted."""
    c, D = config.get("transformer_layer_config", config), WIDTH
    queries, keys = (c["head_dim"] * c[f"num_{of}_heads"] for of in ("attention", "key_value"))
    inner = c["intermediate_size"]
    names = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    names |= {"self_attn.q_norm": (c["head_dim"],), "self_attn.k_norm": (c["head_dim"],)}
    names |= {"self_attn.q_proj": (queries, D), "self_attn.k_proj": (keys, D), "self_attn.v_proj": (keys, D)}
    names |= {"self_attn.o_proj": (D, queries)}
    names |= {"mlp.gate_proj": (inner, D), "mlp.up_proj": (inner, D), "mlp.down_proj": (D, inner)}
    shapes = {"fc.weight": (D, D * len(taps_of(config))), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in names.items()}
        if c.get("attention_bias"):
            shapes |= {f"layers.{i}.self_attn.{n}_proj.bias": names[f"self_attn.{n}_proj"][:1] for n in "qkvo"}
    count = config.get("draft_vocab_size", TOKENS)
    if rank := config.get("markov_rank"):
        shapes |= {"markov_head.markov_w1.weight": (TOKENS, rank), "markov_head.markov_w2.weight": (count, rank)}
        if config.get("enable_confidence_head", True):
            shapes |= {"confidence_head.proj.weight": (1, D + rank), "confidence_head.proj.bias": (1,)}
    rng = np.random.default_rng(seed)
    tensors = {n: (("norm" in n) + 0.3 * rng.normal(size=shape)).astype(dtype) for n, shape in shapes.items()}
    if count < TOKENS:
        tensors |= {"d2t": DRAFTED - np.arange(len(DRAFTED)), "t2d": np.isin(np.arange(TOKENS), DRAFTED)}
        tensors["lm_head.weight"] = head[DRAFTED].astype(dtype)
    return tensors


def fused(tensors):
    """The same with queries, keys and values as one tensor."""
    apart = {name: x for name, x in tensors.items() if not any(f".{part}_proj." in name for part in "qkv")}
    for name in [name for name in tensors if ".q_proj." in name]:
        three = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
        apart[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(three)
    return apart


def reference(config, tensors, states, embedding, head, tokens, anchors):
    """Logits [anchors][block, V'] of blocks, each behind the text before its anchor.

    From the base's states [T, D] in the order of the file's ids, its embeddings [V, D] and projection [V', D]. DSpark's
    Markov head knows the text within a block.
    """
    c = config.get("transformer_layer_config", config)
    w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}
    Dh, heads, kv = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c["rms_norm_eps"]) * w[scale]

    def rotated(x, positions):
        turn = np.exp(1j * positions[:, None, None] * c["rope_theta"] ** (-np.arange(Dh // 2) / (Dh // 2)))
        turned = (x[..., : Dh // 2] + 1j * x[..., Dh // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def block(anchor):
        context = norm(np.concatenate(states, -1)[:anchor] @ w["fc"].T, "hidden_norm")
        h = embedding[[tokens[anchor], *[config.get("dflash_config", config)["mask_token_id"]] * (BLOCK - 1)]]
        at = np.arange(anchor + BLOCK)
        for i in range(c["num_hidden_layers"]):
            name = f"layers.{i}.self_attn."

            def project(x, part, many, name=name):
                return (x @ w[f"{name}{part}_proj"].T + w.get(f"{name}{part}_proj.bias", 0)).reshape(len(x), many, -1)

            x = norm(h, f"layers.{i}.input_layernorm")
            seen = np.concatenate([context, x])
            q = rotated(norm(project(x, "q", heads), name + "q_norm"), at[anchor:])
            k = np.repeat(rotated(norm(project(seen, "k", kv), name + "k_norm"), at), heads // kv, axis=1)
            v = np.repeat(project(seen, "v", kv), heads // kv, axis=1)
            weights = np.exp(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(Dh))
            mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(BLOCK, -1)
            h = h + mixed @ w[name + "o_proj"].T + w.get(name + "o_proj.bias", 0)
            x, mlp = norm(h, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
            gate = x @ w[mlp + "gate_proj"].T
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w[mlp + "up_proj"].T)) @ w[mlp + "down_proj"].T
        logits = norm(h, "norm") @ head.T
        if "markov_head.markov_w1" in w:
            before = tokens[anchor : anchor + BLOCK]
            if config.get("sample_from_anchor") is False:  # row i predicts the token at anchor + i
                before = np.concatenate([before[:1], before[:-1]])
            logits = logits + w["markov_head.markov_w1"][before] @ w["markov_head.markov_w2"].T
        return logits

    return np.stack([block(anchor) for anchor in anchors])
