"""What the published forms of EAGLE-3 share in writing: what they can express, and tensors by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.eagle_parts import tensor_names
from jaxspec.drafters.published.layers import written_shapes
from jaxspec.drafters.published.vocabulary import EMBEDDING, HEAD, base_head, written_vocabulary
from jaxspec.errors import UserError
from jaxspec.methods import Eagle
from jaxspec.parallel.processes import host
from jaxspec.weights.model import Model
from jaxspec.weights.parts import split_parts


def export_shapes(method: Eagle, model: Model, families: Sequence[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """The shapes of an adapter's layer, and the config.json that describes it in one of `families`.

    Raises UserError for what no published form has: by the name of the setting.
    """
    for name in ("direct", "even"):
        if getattr(method, name):
            raise UserError(
                f"eagle: {name} is an option of jaxspec alone, which other software cannot compute: it must be off"
            )
    return written_shapes("eagle", method.layer_shapes(model.config), model.config.vocab_size, families, 1)


def write_tensors(adapter: Adapter, model: Model, shapes: ModelConfig, layer: str) -> dict[str, np.ndarray]:
    """The tensors by published names, as they are held; `layer` begins the names of the layer's."""
    method = adapter.method
    trainable = {name: part for name, part in adapter.trainable.items() if name not in ("lm_head", "embedding")}
    flat, tensors = split_parts(shapes, trainable), {}
    for name, (path, shape) in tensor_names(shapes, layer).items():
        # a bias that is missing beside another one is 0
        tensors[name] = host(flat[path]).T if path in flat else np.zeros(shape, np.float32)
    reads = method.taps(model.config.num_layers)
    D, n = shapes.hidden_size, len(reads)
    tensors["fc.weight"] = host(flat["fc/kernel"]).reshape(n, D, D)[::-1].reshape(n * D, D).T
    if method.norm_before_fc:
        tensors["input_norm.weight"] = host(flat["input_norm/scale"]).reshape(n, D)[::-1].reshape(-1)
    if method.fc_norm:
        tensors |= {f"fc_norm.{n - 1 - i}.weight": row for i, row in enumerate(host(flat["fc_norm/scale"]))}
    tensors["norm.weight"] = host(flat["norm/scale"])
    return tensors | _written_vocabulary(adapter, model)


def _written_vocabulary(adapter: Adapter, model: Model) -> dict[str, np.ndarray]:
    """The projection, embeddings of its own, and where it drafts few tokens which: in the order of their ids."""
    method, V = adapter.method, model.config.vocab_size
    count = method.vocabulary if method.own_head else adapter.info.get("draft_vocabulary", 0)
    ids = np.arange(V) if not count else adapter.frequent_tokens[:count].astype(np.int64)
    head = host(adapter.trainable["lm_head"]).T if method.own_head else base_head(model, ids)
    order = np.argsort(ids)
    tensors = {HEAD: head[order]}
    if method.own_embedding:
        tensors[EMBEDDING] = host(adapter.trainable["embedding"])
    if count:
        tensors |= written_vocabulary(ids[order], V)
    return tensors
