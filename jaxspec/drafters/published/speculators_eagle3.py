"""EAGLE-3 as the package `speculators` and vLLM publish it: a layer's config within the drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.eagle_parts import NORMS, Described, layers_read, read_eagle
from jaxspec.drafters.published.eagle_writing import export_shapes, write_tensors
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation, Written
from jaxspec.drafters.published.layers import check_base, layer_shapes
from jaxspec.drafters.published.speculators_parts import (
    FAMILIES,
    checked_keys,
    leave_training_tensors,
    proposed_tokens,
    written_config,
)
from jaxspec.drafters.published.vocabulary import EMBEDDING, base_embedding
from jaxspec.methods import Eagle
from jaxspec.weights.model import Model

_IDS = "eagle_aux_hidden_state_layer_ids"
_DEPTH = 3  # where proposal_methods does not say it


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "eagle3"


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    keys, layer = checked_keys(folder, ("embed_requires_grad", _IDS, *NORMS))
    shapes = layer_shapes(folder, layer.content, FAMILIES, layer.where, 1)
    check_base(folder, shapes, model, keys.optional_count("target_hidden_size", 10**6))
    leave_training_tensors(folder)
    said = Described(
        shapes,
        keys.count("draft_vocab_size", 10**7),
        layers_read(folder, keys.get(_IDS), model.config.num_layers, "input"),
        {"": {name: keys.flag(name) for name in NORMS}},
        proposed_tokens(keys, "eagle3", _DEPTH),
        "layers.0.",
    )
    return read_eagle(folder, model, "speculators", said)


def _write(adapter: Adapter, model: Model) -> Written:
    method: Eagle = adapter.method
    shapes, layer = export_shapes(method, model, FAMILIES)
    tensors = write_tensors(adapter, model, shapes, "layers.0.")
    tensors.setdefault(EMBEDDING, base_embedding(model))
    config = {
        **written_config("eagle3", "Eagle3Speculator", method.depth, model),
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        _IDS: list(method.taps(model.config.num_layers)),
        **{name: getattr(method, name) for name in NORMS},
        "transformer_layer_config": layer,
    }
    return Written(config, tensors)


FORM = Form("eagle", "EAGLE-3 of the package speculators", _recognises, _read, _write)
