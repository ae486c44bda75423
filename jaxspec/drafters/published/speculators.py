"""EAGLE-3 as the package `speculators` and vLLM publish it: a layer's config within the drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.eagle3 import LAYER_KEYS
from jaxspec.drafters.published.eagle_parts import (
    NORMS,
    Described,
    base_embedding,
    check_base,
    layer_shapes,
    layers_read,
    read_eagle,
)
from jaxspec.drafters.published.eagle_writing import export_shapes, write_tensors
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation, Written
from jaxspec.errors import UserError
from jaxspec.methods import Eagle
from jaxspec.weights.families import hf_config
from jaxspec.weights.keys import Keys
from jaxspec.weights.load import Model

_FAMILIES = ("llama", "qwen3")
_IDS = "eagle_aux_hidden_state_layer_ids"
_KEYS = (
    *("architectures", "speculators_model_type", "speculators_version", "speculators_config", "auto_map"),
    *("transformer_layer_config", "draft_vocab_size", "target_hidden_size", "embed_requires_grad", "torch_dtype"),
    *(_IDS, *NORMS),
)
_SWITCHES = ("has_no_defaults_at_init", "enable_sp_ulysses")  # of its training, which say nothing when off
_DEPTH = 3  # where proposal_methods does not say it


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "eagle3"


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    folder.check_keys((*_KEYS, *LAYER_KEYS, *(name for name in _SWITCHES if folder.config.get(name) is False)))
    keys = Keys(folder.config, {"draft_vocab_size": 32000}, folder.config_file)
    layer = keys.part("transformer_layer_config")
    folder.check_keys(LAYER_KEYS, layer.content, "transformer_layer_config.")
    shapes = layer_shapes(folder, layer.content, _FAMILIES, layer.where)
    check_base(folder, shapes, model, keys.optional_count("target_hidden_size", 10**6))
    folder.leave("verifier_norm.weight", "verifier_lm_head.weight")  # the base's, which its training needs
    said = Described(
        shapes,
        keys.count("draft_vocab_size", 10**7),
        layers_read(folder, keys.get(_IDS), model.config.num_layers, "input"),
        {"": {name: keys.flag(name) for name in NORMS}},
        _depth(keys.part("speculators_config")),
        "layers.0.",
    )
    return read_eagle(folder, model, "speculators", said)


def _depth(keys: Keys) -> int:
    """How many tokens the first way to propose drafts. Raises UserError for another algorithm than EAGLE-3."""
    if keys.get("algorithm", "eagle3") != "eagle3":
        raise UserError(f"{keys.where}: algorithm {keys.get('algorithm')!r:.60} is not eagle3")
    proposals = keys.get("proposal_methods") or [{}]
    first = proposals[0] if isinstance(proposals, list) and isinstance(proposals[0], dict) else {}
    return Keys(first, {"speculative_tokens": _DEPTH}, f"{keys.where}: proposal_methods").count(
        "speculative_tokens", 64
    )


def _write(adapter: Adapter, model: Model) -> Written:
    method: Eagle = adapter.method
    shapes, layer = export_shapes(method, model, _FAMILIES)
    tensors = write_tensors(adapter, model, shapes, "layers.0.")
    tensors.setdefault("embed_tokens.weight", base_embedding(model))
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        _IDS: list(method.taps(model.config.num_layers)),
        **{name: getattr(method, name) for name in NORMS},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": method.depth}],
            "verifier": {"name_or_path": model.name, "architectures": hf_config(model.config)["architectures"]},
        },
    }
    return Written(config, tensors)


EAGLE3 = Form("eagle", "EAGLE-3 of the package speculators", _recognises, _read, _write)
