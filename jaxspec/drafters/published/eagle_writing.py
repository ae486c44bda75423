"""What the published forms of EAGLE-3 share in writing: what they can express, and tensors by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.eagle_parts import EMBEDDING, HEAD, tensor_names
from jaxspec.errors import UserError
from jaxspec.methods import Eagle
from jaxspec.model.quantized import dense
from jaxspec.parallel.processes import host
from jaxspec.weights.families import hf_config
from jaxspec.weights.load import Model
from jaxspec.weights.parts import split_parts

# settings of a layer that no form has, with the values that change nothing
_PLAIN = {"rotary_dim": None, "gated": True, "logit_cap": None, "logit_scale": 1.0}


def export_shapes(method: Eagle, model: Model, families: Sequence[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """The shapes of an adapter's layer, and the config.json that describes it in one of `families`.

    Raises UserError for what no published form has: by the name of the setting.
    """
    for name in ("direct", "even"):
        if getattr(method, name):
            raise UserError(
                f"eagle: {name} is an option of jaxspec alone, which other software cannot compute: it must be off"
            )
    shapes = method.layer_shapes(model.config)
    for name, usual in _PLAIN.items():
        if getattr(shapes, name) != usual:
            raise UserError(f"eagle: no published form has {name} {getattr(shapes, name)!r} of its layer")
    if shapes.head_norms and "qwen3" not in families:
        raise UserError("eagle: this form has no head_norms; --form speculators has them")
    if shapes.head_norms and shapes.mlp_bias:
        raise UserError("eagle: no published form has mlp_bias and head_norms of one layer")
    biased = shapes.qkv_bias or shapes.o_bias  # forms have one key for both
    shapes = dataclasses.replace(
        shapes,
        **dict(num_layers=1, tie_embeddings=False, embedding_scale=1.0, sliding_window=None),
        **dict(
            first_window_layer=0, full_layers=(), qkv_bias=biased, o_bias=biased, vocab_size=model.config.vocab_size
        ),
    )
    written = hf_config(shapes)
    if shapes.head_norms:
        written["attention_bias"] = biased
    if written["model_type"] not in families:
        raise UserError(
            f"eagle: a layer like {written['model_type']}'s is none that this form has: {', '.join(families)}"
        )
    return shapes, written


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
    head = host(adapter.trainable["lm_head"]).T if method.own_head else _base_head(model, ids)
    order = np.argsort(ids)
    tensors = {HEAD: head[order]}
    if method.own_embedding:
        tensors[EMBEDDING] = host(adapter.trainable["embedding"])
    if count:
        drafted = np.zeros(V, bool)
        drafted[ids] = True
        tensors |= {"d2t": ids[order] - np.arange(count), "t2d": drafted}
    return tensors


def _base_head(model: Model, ids: np.ndarray) -> np.ndarray:
    """Rows [V', D] of the base's projection."""
    columns = model.base.drafting(jnp.asarray(ids, jnp.int32)).draft_vocabulary.columns
    return host(dense(columns)).astype(np.float32).T
