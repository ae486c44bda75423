"""What GGUF files say of families that differ from LLaMA by more than shapes: fields of a ModelConfig, and names.

llama.cpp adds 1 to the scales of Gemma's norms when it writes them, so that they are read as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxspec.weights.params import GGUF_NAMES

Get = Callable[..., Any]  # of a key without the architecture before it, and of a default

_AROUND = {
    **GGUF_NAMES,
    "attention_out_norm/scale": "post_attention_norm.weight",
    "mlp_out_norm/scale": "post_ffw_norm.weight",
}
NAMES = {"gemma2": _AROUND, "gemma3": _AROUND}  # by architecture, where they are not `GGUF_NAMES`
_LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores are scaled by the model's width


def family_fields(architecture: str, get: Get, head_dim: int) -> dict[str, Any]:
    """Fields of a ModelConfig beyond those that all architectures have."""
    return _gemma(architecture, get, head_dim) if architecture in _LARGE else {}


def _gemma(architecture: str, get: Get, head_dim: int) -> dict[str, Any]:
    layers, hidden = get("block_count"), get("embedding_length")
    width = hidden / get("attention.head_count") if layers == _LARGE[architecture] else head_dim
    period = get("attention.sliding_window_pattern", 2 if architecture == "gemma2" else 6)
    slides = period if isinstance(period, list) else [bool((i + 1) % period) for i in range(layers)]
    fields = {
        "norms": "around",
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
        "score_scale": None if width == head_dim else width**-0.5,
        "logit_cap": get("final_logit_softcapping"),
        "full_layers": tuple(i for i, slides in enumerate(slides) if not slides),
    }
    if architecture == "gemma2":
        return fields | {"score_cap": get("attn_logit_softcapping")}
    return fields | {"local_rope_theta": float(get("rope.freq_base_swa", 10000.0))}
