"""Hydra and Hydra++ as their authors publish them: heads that read tokens, and perhaps a layer before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from jaxspec.decoding.draft import PyTree
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.drafters.published.imported import (
    COMMON_KEYS,
    check_plain,
    count_parts,
    make_adapter,
    projection_shape,
    take,
)
from jaxspec.drafters.published.layers import layer_tensors
from jaxspec.drafters.published.vocabulary import base_embedding, is_copy
from jaxspec.errors import UserError
from jaxspec.methods import Hydra
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model
from jaxspec.weights.parts import join_parts

_KEYS = (
    *("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset"),
    *("base_model_name_or_path", "dropout_rate"),
)
_MOST = 64  # heads and blocks
_ARCHITECTURES = {"mlp": False, "prefix-mlp": True}  # whether a layer stands before the heads
# Settings of a base's layers that the published layer, LLaMA's, does not have, with the values that it has instead.
_LLAMA = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "head_norms": False, "gated": True}
_LLAMA |= {"activation": "silu", "rotary_dim": None}
_LAYER, _EMBEDDING = "prefix_embeding_layer.", "input_embed_fn.weight"  # the files' spelling
# The tokens between are given when these are measured, as in the paper.
_USUAL = ((0.55, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01),)


def _recognises(config: Mapping[str, Any]) -> bool:
    return "hydra_num_heads" in config or "hydra_head_arch" in config


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    folder.check_keys((*COMMON_KEYS, *_KEYS))
    check_plain(model, "hydra")
    defaults = {"hydra_num_heads": 1, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    keys = Keys(folder.config, defaults, folder.config_file)
    prefix, blocks = keys.choice("hydra_head_arch", _ARCHITECTURES), keys.count("hydra_num_layers", _MOST)
    if not keys.flag("grounded_heads"):
        raise UserError(f"{keys.where}: grounded_heads false, heads that read no tokens, is not supported")
    if keys.get("hidden_state_offset"):
        raise UserError(f"{keys.where}: hidden_state_offset {keys.get('hidden_state_offset')!r:.60} is not supported")
    heads = max(count_parts(folder, "hydra_mlp."), keys.count("hydra_num_heads", _MOST))
    method = Hydra(
        heads=heads,
        blocks=blocks,
        lm_head="full",
        prefix_attention=prefix,
        prefix_norm=prefix,
        even=False,
        bias=True,
    )
    trainable = _read_heads(folder, model, heads, blocks)
    if prefix:
        trainable |= _read_layer(folder, model)
    _check_embedding(folder, model)
    return [Interpretation("", make_adapter(folder, model, "hydra", method, trainable, _USUAL))]


def _read_heads(folder: PublishedFolder, model: Model, heads: int, blocks: int) -> PyTree:
    """First blocks, further blocks, projections. Dropout, where it was built in, takes every other number."""
    place = range(blocks) if folder.shape("hydra_mlp.0.0.linear.weight") is not None else range(1, 2 * blocks, 2)
    inner = "" if folder.shape("hydra_lm_head.0.weight") is not None else "1."
    V, D = projection_shape(folder, f"hydra_lm_head.0.{inner}weight", model)

    def linear(name: str, width: int) -> PyTree:
        return {"kernel": take(folder, f"{name}.weight", (D, width)), "bias": take(folder, f"{name}.bias", (D,))}

    trainable, further = {}, []
    for h in range(heads):
        name, width = f"hydra_mlp.{h}.{place[0]}", (h + 2) * D
        trainable[f"first{h + 1}"] = linear(f"{name}.res_connection", width) | {
            "inner": linear(f"{name}.linear", width)
        }
        further.append([linear(f"hydra_mlp.{h}.{at}.linear", D) for at in place[1:]])
    if blocks > 1:
        for ours, part in {"blocks": "kernel", "bias": "bias"}.items():
            trainable[ours] = np.array([[block[part] for block in head] for head in further])
    trainable["lm_head"] = np.array([take(folder, f"hydra_lm_head.{h}.{inner}weight", (V, D)) for h in range(heads)])
    biases = [folder.take(f"hydra_lm_head.{h}.{inner}bias", (V,)) for h in range(heads)]
    return trainable | {"lm_head_bias": np.array(biases).astype(np.float32)}


def _read_layer(folder: PublishedFolder, model: Model) -> PyTree:
    """The decoder layer of Hydra++, shaped as the base's, and the norm after it.

    Raises UserError for a base whose layers are not LLaMA's: the published one always is.
    """
    c = model.config.plain_layers()
    for name, usual in _LLAMA.items():
        if getattr(c, name) != usual:
            raise UserError(f"the form hydra is not for bases with {name} {getattr(c, name)!r}, such as {model.name!r}")
    flat, D = {}, c.hidden_size
    for path, (name, shape) in layer_tensors(c, D).items():
        ours = path if path.startswith("mlp/") else f"attention/{path}"
        flat[f"prefix_layer/{ours}"] = take(folder, f"{_LAYER}layers.0.{name}", shape)
    for ours, name in {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}.items():
        flat[f"prefix_layer/{ours}/scale"] = take(folder, f"{_LAYER}layers.0.{name}.weight", (D,))
    flat["prefix_norm/scale"] = take(folder, f"{_LAYER}norm.weight", (D,))
    folder.leave(f"{_LAYER}embed_tokens.weight", f"{_LAYER}layers.0.self_attn.rotary_emb.inv_freq")
    return flax.traverse_util.unflatten_dict(join_parts(c, flat), sep="/")


def _check_embedding(folder: PublishedFolder, model: Model) -> None:
    """Raise UserError where the heads were trained beside other embeddings than the base's, of which files keep a copy.

    They may have been rounded to another dtype.
    """
    if folder.shape(_EMBEDDING) is None:
        return
    theirs = folder.take(_EMBEDDING, (model.config.vocab_size, model.config.hidden_size)).astype(np.float32)
    if not is_copy(theirs, base_embedding(model), model):
        raise UserError(
            f"{folder.path}: its copy {_EMBEDDING!r} of the base's embeddings differs from {model.name!r}'s"
        )


FORM = Form(
    "hydra",
    "Hydra and Hydra++ of their authors",
    _recognises,
    _read,
    weights=("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
)
