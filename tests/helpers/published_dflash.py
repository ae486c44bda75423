"""Published DFlash drafters of random weights, and what they compute, written out in numpy."""

import numpy as np

from jaxspec.methods import DFlash
from tests.helpers.published import DRAFTED, TOKENS, WIDTH, save

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

# What is ours is off: only the layers' shapes and start are not said.
EXPORTABLE = DFlash(
    block=4,
    layers=2,
    tapped=(1, 2),
    sample_from_anchor=False,
    from_newest=False,
    even=False,
    mask_token=MASK,
    head_norms=True,
    start="random",
)


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


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def authors2(**more):
    """The config.json of DFlash 2's authors, with further keys of `dflash_config`."""
    config = authors(DFLASH2 | {"block_size": BLOCK} | more, architectures=["DFlash2DraftModel"], is_causal=False)
    del config["block_size"]
    return config


def packaged2(**more):
    """The config.json of DFlash 2 in the package speculators."""
    named = {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "draft_vocab_size": TOKENS}
    proposal = packaged()["speculators_config"] | {"algorithm": "dflash2"}
    return packaged(**named, **DFLASH2, speculators_config=proposal) | more


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
    if "markov_rank" in config and config.get("enable_confidence_head", True):
        read = D + rank * config.get("confidence_head_with_markov", True)
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    if own := dflash2_of(config):
        taps, groups = own["conv_kernel_size"], D // own["conv_group_size"]
        for i in range(c["num_hidden_layers"]):
            for part in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                shapes |= {f"{part}.base_kernel": (2, taps, D)}
                shapes |= {f"{part}.kernel_projection.weight": (2 * taps * groups, D)}
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (TOKENS, own["selector_rank"])
        shapes["candidate_selector.hidden_projection.weight"] = (own["selector_rank"], D)
    rng = np.random.default_rng(seed)
    tensors = {n: (("norm" in n) + 0.3 * rng.normal(size=shape)).astype(dtype) for n, shape in shapes.items()}
    if count < TOKENS:
        tensors |= {"d2t": DRAFTED - np.arange(len(DRAFTED)), "t2d": np.isin(np.arange(TOKENS), DRAFTED)}
        tensors["lm_head.weight"] = head[DRAFTED].astype(dtype)
    return tensors


def head_of(model):
    """The base's projection [V, D]."""
    return np.ascontiguousarray(np.asarray(model.params["lm_head"], np.float32).T)


def published(folder, model, config, dtype=np.float16):
    """The folder of a random drafter."""
    return save(folder, config, make_dflash(config, head_of(model), dtype))


def dflash2_of(config):
    """The keys of DFlash 2, if it is that."""
    keys = config.get("dflash_config", config)
    return keys if "selector_rank" in keys else None


def fused(tensors):
    """The same with queries, keys and values as one tensor."""
    apart = {name: x for name, x in tensors.items() if not any(f".{part}_proj." in name for part in "qkv")}
    for name in [name for name in tensors if ".q_proj." in name]:
        three = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
        apart[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(three)
    return apart


def reference(config, tensors, states, embedding, head, tokens, anchors):
    """Logits [anchors][block, V'] of blocks, each behind the text before its anchor, and log-odds of a confidence head.

    From the base's states [T, D] in the order of the file's ids, its embeddings [V, D] and projection [V', D]. What
    depends on the token before knows the text within a block.
    """
    c = config.get("transformer_layer_config", config)
    w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}
    Dh, heads, kv = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    own = dflash2_of(config)

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

            x, attention_out = convolutions(norm(h, f"layers.{i}.input_layernorm"), f"layers.{i}.attention_conv")
            seen = np.concatenate([context, x])
            q = rotated(norm(project(x, "q", heads), name + "q_norm"), at[anchor:])
            k = np.repeat(rotated(norm(project(seen, "k", kv), name + "k_norm"), at), heads // kv, axis=1)
            v = np.repeat(project(seen, "v", kv), heads // kv, axis=1)
            weights = np.exp(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(Dh))
            mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(BLOCK, -1)
            h = h + attention_out(mixed @ w[name + "o_proj"].T + w.get(name + "o_proj.bias", 0))
            x, mlp_out = convolutions(norm(h, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp_conv")
            mlp = f"layers.{i}.mlp."
            gate = x @ w[mlp + "gate_proj"].T
            h = h + mlp_out((gate / (1 + np.exp(-gate)) * (x @ w[mlp + "up_proj"].T)) @ w[mlp + "down_proj"].T)
        h = norm(h, "norm")
        logits, before = h @ head.T, tokens[anchor : anchor + BLOCK]
        if config.get("sample_from_anchor", "markov_rank" in config) is False:  # row i predicts the token at anchor + i
            before = np.concatenate([before[:1], before[:-1]])
        if "markov_head.markov_w1" in w:
            logits = logits + w["markov_head.markov_w1"][before] @ w["markov_head.markov_w2"].T
        odds = np.zeros(BLOCK)
        if "confidence_head.proj" in w:
            read = [h, w["markov_head.markov_w1"][before]] if config.get("confidence_head_with_markov", True) else [h]
            odds = (np.concatenate(read, -1) @ w["confidence_head.proj"].T + w["confidence_head.proj.bias"])[:, 0]
        return (logits if own is None else selected(logits, h, before)), odds

    def convolutions(x, name):
        """Rows after the first convolution, and the second one as a function; the rows themselves without."""
        if own is None:
            return x, lambda y: y
        taps, group = own["conv_kernel_size"], own["conv_group_size"]
        change = (x @ w[f"{name}.kernel_projection"].T).reshape(BLOCK, 2, taps, WIDTH // group)

        def apply(x, side):
            y = np.zeros_like(x)
            for row in range(BLOCK):
                for tap in range(min(taps, row + 1)):
                    weights = w[f"{name}.base_kernel"][side, tap] + np.repeat(change[row, side, tap], group)
                    y[row] += weights * x[row - tap]
            return y

        return apply(x, 0), lambda y: apply(y, 1)

    def selected(logits, h, before):
        """The best ones anew; the others, which the published code drops, stay behind them."""
        part = "candidate_selector."
        pair = w[f"{part}predecessor_codebook"][before] * (h @ w[f"{part}hidden_projection"].T)
        for row, best in enumerate(np.argsort(-logits)[:, : own["selector_top_k"]]):
            moved = logits[row, best] + w[f"{part}successor_codebook"][best] @ pair[row]
            others = np.delete(logits[row], best)
            logits[row] -= max(0, others.max() - moved.min())
            logits[row, best] = moved
        return logits

    logits, odds = zip(*[block(anchor) for anchor in anchors], strict=True)
    return np.stack(logits), np.stack(odds)
