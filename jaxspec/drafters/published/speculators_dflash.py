"""DFlash as the package `speculators` and vLLM publish it: the layers' config within the drafter's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.dflash_parts import DescribedBlocks, check_taps, layer_ids, read_dflash
from jaxspec.drafters.published.dflash_writing import export_layers, write_tensors
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
from jaxspec.drafters.published.vocabulary import HEAD, base_head, written_vocabulary
from jaxspec.methods import DFlash
from jaxspec.weights.load import Model

_IDS = "aux_hidden_state_layer_ids"
# sliding_window_non_causal says nothing without windows, which are refused
_KEYS = ("block_size", _IDS, "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "dflash"


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    keys, layer = checked_keys(folder, _KEYS)
    shapes = layer_shapes(folder, layer.content, FAMILIES, layer.where)
    check_base(folder, shapes, model, keys.optional_count("target_hidden_size", 10**6))
    leave_training_tensors(folder)
    block, anchor = keys.count("block_size", 10**4), keys.flag("sample_from_anchor")
    proposed_tokens(keys, "dflash", block)  # a block says how many it can draft
    ids = layer_ids(f"{keys.where}: {_IDS}", keys.required(_IDS))
    said = DescribedBlocks(
        dataclasses.replace(shapes, head_norms=True),  # whichever family the config names
        block,
        check_taps(f"{keys.where}: {_IDS}", ids, ids, model.config.num_layers),
        keys.count("mask_token_id", 10**7, 0),
        anchor,
        keys.count("draft_vocab_size", 10**7),
    )
    return read_dflash(folder, model, "speculators", said)


def _write(adapter: Adapter, model: Model) -> Written:
    method: DFlash = adapter.method
    shapes, layer = export_layers(method, model)
    tensors, V = write_tensors(adapter, model, shapes), model.config.vocab_size
    count = adapter.info.get("draft_vocabulary", 0)
    if count:
        ids = np.sort(adapter.frequent_tokens[:count].astype(np.int64))
        tensors |= {HEAD: base_head(model, ids), **written_vocabulary(ids, V)}
    config = {
        **written_config("dflash", "DFlashSpeculator", method.distances, model),
        "block_size": method.block,
        "draft_vocab_size": count or V,
        _IDS: sorted(method.taps(model.config.num_layers)),
        "mask_token_id": method.mask_token,
        "sample_from_anchor": method.sample_from_anchor,
        "transformer_layer_config": layer,
    }
    return Written(config, tensors)


FORM = Form("dflash", "DFlash of the package speculators", _recognises, _read, _write)
