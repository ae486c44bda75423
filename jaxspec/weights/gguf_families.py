"""Architectures of GGUF files: what their metadata say beyond those of all others, and what their tensors look like.

llama.cpp adds 1 to the scales of Gemma's norms when it writes them, so that they are read as any other. The heads of
LLaMA and Granite lie there in pairs of dimensions that rotate together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxspec.config import window_fields
from jaxspec.weights.family import Fields, all_but_one
from jaxspec.weights.keys import MOST_POSITIONS, Keys
from jaxspec.weights.params import GGUF_NAMES
from jaxspec.weights.published import Published

DIVISORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


@dataclasses.dataclass(frozen=True)
class GGUFFamily:
    """An architecture.

    Attributes:
      keys: of the metadata, behind the architecture's name, that it alone has.
      read: fields of a ModelConfig beyond those that all have, from the metadata and the width of a head.
      published: the form of its tensors.
      partial_rope: heads can be rotated in part.
    """

    keys: tuple[str, ...] = ()
    read: Callable[[Keys, int], Fields] = lambda keys, head_dim: {}
    published: Published = Published(GGUF_NAMES, aside=(DIVISORS,))
    partial_rope: bool = False


_AROUND = {
    **GGUF_NAMES,
    "attention_out_norm/scale": "post_attention_norm.weight",
    "mlp_out_norm/scale": "post_ffw_norm.weight",
}
_FUSED = {
    **GGUF_NAMES,
    **{f"attention/{part}": f"attn_qkv[{part}]" for part in "qkv"},
    **{f"mlp/{part}": f"ffn_up[{part}]" for part in ("gate", "up")},
}
_IN_PAIRS = Published(GGUF_NAMES, pairs=True, aside=(DIVISORS,))
_NORMS_AROUND = Published(_AROUND, aside=(DIVISORS,))


def _gemma(keys: Keys, head_dim: int, large: int, period: int) -> Fields:
    """`large` is the number of layers of the 27B model, whose scores are scaled by the model's width."""
    layers, hidden = keys.count("block_count", 1000), keys.count("embedding_length", 10**6)
    width = hidden / keys.count("attention.head_count", 10**4) if layers == large else head_dim
    return {
        "norms": "around",
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
        "score_scale": None if width == head_dim else width**-0.5,
        **window_fields(keys.count("attention.sliding_window", MOST_POSITIONS), _sliding(keys, period, layers)),
    }


def _gemma2(keys: Keys, head_dim: int) -> Fields:
    caps = {"score_cap": keys.number("attn_logit_softcapping"), "logit_cap": keys.number("final_logit_softcapping")}
    return _gemma(keys, head_dim, 46, 2) | caps


def _gemma3(keys: Keys, head_dim: int) -> Fields:
    local = keys.number("rope.freq_base_swa") if keys.get("rope.freq_base_swa") is not None else 10000.0
    cap = keys.optional_number("final_logit_softcapping")
    return _gemma(keys, head_dim, 62, 6) | {"local_rope_theta": local, "logit_cap": cap}


def _sliding(keys: Keys, usual: int, layers: int) -> list[bool]:
    """Which layers have a window: all but one of a period, or as a list says."""
    key = "attention.sliding_window_pattern"
    pattern: Any = keys.get(key, usual)
    if isinstance(pattern, list) and len(pattern) == layers:
        return [bool(slides) for slides in pattern]
    if type(pattern) is not int or pattern < 1:
        raise keys.error(key, f"a period or a list of {layers}")
    return all_but_one(pattern, layers)


def _granite(keys: Keys, head_dim: int) -> Fields:
    """Its converter leaves out what is 0, which stands for no such constant."""
    scale = keys.optional_number("attention.scale")
    embedding, residual, logit = (keys.number(key) if keys.get(key) else 1.0 for key in _GRANITE[1:])
    return {
        "score_scale": None if scale == float(np.float32(head_dim**-0.5)) else scale,  # files hold float32
        "embedding_scale": embedding,
        "residual_scale": residual,
        "logit_scale": 1 / logit,
    }


_GRANITE = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_GEMMA = ("attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping")


def _window(keys: Keys, head_dim: int) -> Fields:
    """0 is none."""
    return {"sliding_window": keys.count("attention.sliding_window", MOST_POSITIONS, least=0) or None}


FAMILIES: dict[str, GGUFFamily] = {  # by general.architecture
    "llama": GGUFFamily(("attention.sliding_window",), _window, _IN_PAIRS),
    "qwen2": GGUFFamily(("attention.sliding_window",), _window),
    "qwen3": GGUFFamily(("attention.sliding_window",), _window),
    "gemma2": GGUFFamily((*_GEMMA, "attn_logit_softcapping"), _gemma2, _NORMS_AROUND),
    "gemma3": GGUFFamily((*_GEMMA, "rope.freq_base_swa"), _gemma3, _NORMS_AROUND),
    "phi3": GGUFFamily(
        ("attention.sliding_window", "rope.scaling.attn_factor"),
        _window,
        Published(_FUSED, {"attn_qkv": "qkv", "ffn_up": "gate_up"}, aside=(LONG_FACTORS, SHORT_FACTORS)),
        partial_rope=True,
    ),
    "olmo2": GGUFFamily(
        read=lambda keys, head_dim: {"norms": "after", "joint_norms": True, "head_norms": False},
        published=_NORMS_AROUND,
    ),
    "granite": GGUFFamily(_GRANITE, _granite, _IN_PAIRS),
}
