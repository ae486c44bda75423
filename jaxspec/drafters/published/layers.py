"""Decoder layers of published drafters: their shapes from a config.json and back, and the base that they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.imported import COMMON_KEYS, check_sizes
from jaxspec.errors import UserError
from jaxspec.weights.families import hf_config, parse_config
from jaxspec.weights.model import Model

LAYER_KEYS = (  # of a layer of LLaMA's or Qwen3's, which are read, and what every config.json may hold
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *(
        "num_key_value_heads",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rms_norm_eps",
    ),
    *("partial_rotary_factor", "original_max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("model_type", "attention_dropout", "initializer_range", "pretraining_tp", "torch_dtype", "auto_map", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *COMMON_KEYS,
)
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
# settings of a layer that no form has, with the values that change nothing
_PLAIN = {"rotary_dim": None, "gated": True, "logit_cap": None, "logit_scale": 1.0}


def layer_shapes(
    folder: PublishedFolder,
    content: Mapping[str, Any],
    families: Sequence[str],
    where: str,
    most_layers: int | None = None,
) -> ModelConfig:
    """The shapes of the layers that a config.json, or a part of it, describes.

    Raises UserError for another family than `families`, more than `most_layers`, or a sliding window.
    """
    if content.get("model_type") not in families:
        known = ", ".join(families)
        raise UserError(f"{where}: model_type {content.get('model_type')!r:.60} is no layer of this form, only {known}")
    if content.get("sliding_window") is not None and content.get("use_sliding_window") is not False:
        raise UserError(f"{where}: sliding_window {content['sliding_window']!r:.60} is not supported in a drafter")
    shapes = parse_config(dict(content), where)
    if most_layers is not None and shapes.num_layers > most_layers:
        raise UserError(f"{where}: num_hidden_layers {shapes.num_layers} is not supported, only {most_layers}")
    if shapes.sliding_window is not None:
        raise UserError(f"{where}: layer_types with a window are not supported in a drafter")
    return dataclasses.replace(shapes, tie_embeddings=False)


def check_base(folder: PublishedFolder, shapes: ModelConfig, model: Model, target_width: int | None) -> None:
    """Raise UserError for a drafter of another base, with the sizes of both."""
    width = model.config.hidden_size
    check_sizes(folder, target_width or shapes.hidden_size, shapes.vocab_size, model)
    if shapes.hidden_size != width:
        raise UserError(
            f"{folder.path}: its width {shapes.hidden_size} differs from its base's {width}, which is not supported"
        )
    scaling = shapes.rope_scaling
    if scaling is not None and scaling.kind == "longrope" and scaling != model.config.rope_scaling:
        raise UserError(f"{folder.path}: longrope is supported only where the base has the same")


def layer_ids(where: str, ids: Any) -> list[int]:
    """Ids of layers. Raises UserError for what is no list of whole numbers."""
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{where} must be a list of layers, got {ids!r:.60}")
    return ids


def check_layers(folder: PublishedFolder, count: int | None, model: Model) -> None:
    """Raise UserError for a drafter of a base with another number of layers, where its file says one."""
    if count not in (None, layers := model.config.num_layers):
        raise UserError(f"{folder.path}: a drafter for a base of {count} layers; {model.name!r} has {layers}")


def written_shapes(
    method: str, shapes: ModelConfig, vocab_size: int, families: Sequence[str], layers: int
) -> tuple[ModelConfig, dict[str, Any]]:
    """Shapes of a method's layers as forms can have them, and the config.json that describes them.

    Args:
      method: its name, for messages.
      shapes: of its layers.
      vocab_size: V, of its base.
      families: that the form has.
      layers: how many there are.

    Raises:
      UserError: what the form lacks, by the name of the setting.
    """
    for name, usual in _PLAIN.items():
        if getattr(shapes, name) != usual:
            raise UserError(f"{method}: no published form has {name} {getattr(shapes, name)!r} of its layer")
    if shapes.head_norms and "qwen3" not in families:
        raise UserError(f"{method}: this form has no head_norms; --form speculators has them")
    if shapes.head_norms and shapes.mlp_bias:
        raise UserError(f"{method}: no published form has mlp_bias and head_norms of one layer")
    biased = shapes.qkv_bias or shapes.o_bias  # forms have one key for both
    whole = dict(sliding_window=None, first_window_layer=0, full_layers=(), vocab_size=vocab_size)
    plain = dict(num_layers=layers, tie_embeddings=False, embedding_scale=1.0, qkv_bias=biased, o_bias=biased)
    shapes = dataclasses.replace(shapes, **whole, **plain)
    written = hf_config(shapes)
    if shapes.head_norms:
        written["attention_bias"] = biased
    if written["model_type"] not in families:
        raise UserError(
            f"{method}: a layer like {written['model_type']}'s is none that this form has: {', '.join(families)}"
        )
    return shapes, written


def layer_tensors(c: ModelConfig, width: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a layer that forms name alike: all but the norms before its halves.

    Args:
      c: its shapes.
      width: of what queries, keys and values are made of.

    Returns:
      By our names, theirs and the shape there, [out, in].
    """
    D, inner, queries, keys = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    kernels = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (D, queries)}
    kernels |= {"mlp/gate": (inner, D), "mlp/up": (inner, D), "mlp/down": (D, inner)}
    biased = ["q", "k", "v"] if c.qkv_bias else []
    biased += (["o"] if c.o_bias else []) + (["mlp/gate", "mlp/up", "mlp/down"] if c.mlp_bias else [])
    shapes = {f"{name}/kernel": shape for name, shape in kernels.items()}
    shapes |= {f"{name}_norm/scale": (c.head_dim,) for name in "qk" if c.head_norms}
    shapes |= {f"{name}/bias": kernels[name][:1] for name in biased}
    return {path: (_published_name(path), shape) for path, shape in shapes.items()}


def _published_name(path: str) -> str:
    module, _, leaf = path.rpartition("/")
    part, _, name = module.rpartition("/")
    suffix = "" if name.endswith("_norm") else "_proj"
    return f"{part or 'self_attn'}.{name}{suffix}.{_LEAVES[leaf]}"
