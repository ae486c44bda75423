"""What GGUF files say of families that differ from LLaMA by more than shapes: fields of a ModelConfig, and names.

llama.cpp adds 1 to the scales of Gemma's norms when it writes them, so that they are read as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxspec.config import window_fields
from jaxspec.weights.family import all_but_one
from jaxspec.weights.params import GGUF_NAMES

Get = Callable[..., Any]  # of a key without the architecture before it, and of a default

_AROUND = {
    **GGUF_NAMES,
    "attention_out_norm/scale": "post_attention_norm.weight",
    "mlp_out_norm/scale": "post_ffw_norm.weight",
}
NAMES = {"gemma2": _AROUND, "gemma3": _AROUND}  # by architecture, where they are not `GGUF_NAMES`
_GEMMA = ("attention.sliding_window_pattern", "final_logit_softcapping")
FAMILY_KEYS = {  # of the metadata, that these families alone have
    "gemma2": (*_GEMMA, "attn_logit_softcapping"),
    "gemma3": (*_GEMMA, "rope.freq_base_swa"),
}
_LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores are scaled by the model's width


def family_fields(architecture: str, get: Get, head_dim: int) -> dict[str, Any]:
    """Fields of a ModelConfig beyond those that all architectures have.

    Raises:
      ValueError: a key is missing or impossible; begins with its name.
    """
    return _gemma(architecture, get, head_dim) if architecture in _LARGE else {}


def _gemma(architecture: str, get: Get, head_dim: int) -> dict[str, Any]:
    layers, hidden = get("block_count"), get("embedding_length")
    width = hidden / get("attention.head_count") if layers == _LARGE[architecture] else head_dim
    if not get("attention.sliding_window"):
        raise ValueError("attention.sliding_window is missing")
    slides = _sliding(get("attention.sliding_window_pattern", 2 if architecture == "gemma2" else 6), layers)
    fields = {
        "norms": "around",
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
        "score_scale": None if width == head_dim else width**-0.5,
        "logit_cap": get("final_logit_softcapping"),
        **window_fields(get("attention.sliding_window"), slides),
    }
    if architecture == "gemma2":
        if not (fields["logit_cap"] and get("attn_logit_softcapping")):
            raise ValueError("attn_logit_softcapping or final_logit_softcapping is missing")
        return fields | {"score_cap": get("attn_logit_softcapping")}
    return fields | {"local_rope_theta": float(get("rope.freq_base_swa", 10000.0))}


def _sliding(pattern: Any, layers: int) -> list[bool]:
    """Which layers have a window: all but one of a period, or as a list says. Raises ValueError as `family_fields`."""
    if isinstance(pattern, list) and len(pattern) == layers:
        return [bool(slides) for slides in pattern]
    if type(pattern) is not int or pattern < 1:
        told = f"must be a period or a list of {layers}, got {pattern!s:.80}"
        raise ValueError(f"attention.sliding_window_pattern {told}")
    return all_but_one(pattern, layers)
