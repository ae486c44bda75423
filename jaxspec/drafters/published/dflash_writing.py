"""What the published forms of DFlash share in writing: what they can express, and tensors by their names."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.dflash_heads import write_heads
from jaxspec.drafters.published.dflash_parts import NORMS, check_plain_embedding, check_plain_logits, check_taps
from jaxspec.drafters.published.layers import layer_tensors, written_shapes
from jaxspec.errors import UserError
from jaxspec.methods import DFlash
from jaxspec.parallel.processes import host
from jaxspec.weights.model import Model
from jaxspec.weights.parts import Flat, split_parts


def export_layers(method: DFlash, model: Model, form: str) -> tuple[ModelConfig, dict[str, Any]]:
    """The shapes of an adapter's layers, and the config.json that describes them in a form.

    Raises UserError for what no published form has: by the name of the setting.
    """
    check_plain_embedding(model)
    check_plain_logits(method, model, form)
    for name in ("from_newest", "even"):
        if getattr(method, name):
            raise UserError(
                f"dflash: {name} is an option of jaxspec alone, which other software cannot compute: it must be off"
            )
    if method.markov_rank and not method.markov_tables:
        raise UserError(
            f"dflash: markov_rank {method.markov_rank} without markov_tables is an option of jaxspec alone, which "
            "other software cannot compute"
        )
    if method.mask_token < 0:
        raise UserError("dflash: mask_token -1 is a vector of its own, and published forms name a token of the base")
    shapes = method.layer_shapes(model.config)
    if not shapes.head_norms:
        raise UserError("dflash: head_norms must be on: the layers of published forms are Qwen3's")
    layers = model.config.num_layers
    check_taps("dflash: tapped", list(method.taps(layers)), method.taps(layers), layers)
    return written_shapes("dflash", shapes, model.config.vocab_size, ("qwen3",), method.layers)


def write_tensors(adapter: Adapter, model: Model, shapes: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors by published names, as they are held."""
    flat, D = split_parts(shapes, adapter.trainable), shapes.hidden_size
    n = len(adapter.method.taps(model.config.num_layers))
    tensors = {
        "fc.weight": host(flat["fuse/kernel"]).reshape(n, D, D)[::-1].reshape(n * D, D).T,
        "hidden_norm.weight": host(flat["fuse_norm/scale"]),
        "norm.weight": host(flat["norm/scale"]),
    }
    tensors |= write_heads(flat, adapter.method, D, shapes.vocab_size)
    for number in range(shapes.num_layers):
        parts = _layer_parts(flat, shapes, f"layer{number + 1}/")
        for path, (name, shape) in layer_tensors(shapes, D).items():
            # a bias that is missing beside another one is 0
            tensors[f"layers.{number}.{name}"] = parts[path].T if path in parts else np.zeros(shape, np.float32)
        tensors |= {f"layers.{number}.{name}.weight": parts[f"{path}/scale"] for path, name in NORMS.items()}
    return tensors


def _layer_parts(flat: Flat, c: ModelConfig, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of a layer by our names, keys and values apart."""
    parts = {path.removeprefix(prefix): host(array) for path, array in flat.items() if path.startswith(prefix)}
    for path in [path for path in parts if path.startswith("kv/")]:
        both = parts.pop(path)
        heads = both.reshape(*both.shape[:-1], c.num_kv_heads, 2, c.head_dim)
        for i, name in enumerate("kv"):
            parts[f"{name}/{path.removeprefix('kv/')}"] = heads[..., i, :].reshape(*both.shape[:-1], -1)
    return parts
