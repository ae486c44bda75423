"""DFlash, DFlash 2 and DSpark as `speculators` and vLLM publish them: the layers' config within the drafter's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.dflash_heads import MARKOV_COLUMNS
from jaxspec.drafters.published.dflash_parts import (
    DFLASH2_KEYS,
    DescribedBlocks,
    check_taps,
    dflash2_keys,
    dflash2_settings,
    read_dflash,
)
from jaxspec.drafters.published.dflash_writing import export_layers, write_tensors
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation, Written
from jaxspec.drafters.published.layers import check_base, layer_ids, layer_shapes
from jaxspec.drafters.published.speculators_parts import (
    FAMILIES,
    checked_keys,
    leave_training_tensors,
    proposed_tokens,
    written_config,
)
from jaxspec.drafters.published.vocabulary import HEAD, base_head, written_vocabulary
from jaxspec.errors import UserError
from jaxspec.methods import DFlash
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

_IDS = "aux_hidden_state_layer_ids"
_DFLASH, _DFLASH2, _DSPARK = "dflash", "dflash2", "dspark"
_ARCHITECTURES = {_DFLASH: "DFlashSpeculator", _DFLASH2: "DFlash2DraftModel", _DSPARK: "DSparkSpeculator"}
# sliding_window_non_causal says nothing without windows, which are refused
_KEYS = ("block_size", _IDS, "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
_OWN_KEYS = {
    _DFLASH: (),
    _DFLASH2: tuple(DFLASH2_KEYS),
    _DSPARK: ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
}
_DEFAULTS = {
    _DFLASH: {},
    _DFLASH2: dict(zip(DFLASH2_KEYS, (2, 16, 256, 16), strict=True)),
    _DSPARK: {
        "sample_from_anchor": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") in _ARCHITECTURES


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    kind = folder.config["speculators_model_type"]
    keys, layer = checked_keys(folder, (*_KEYS, *_OWN_KEYS[kind]), _DEFAULTS[kind])
    shapes = layer_shapes(folder, layer.content, FAMILIES, layer.where)
    check_base(folder, shapes, model, keys.optional_count("target_hidden_size", 10**6))
    leave_training_tensors(folder)
    block, anchor = keys.count("block_size", 10**4), keys.flag("sample_from_anchor")
    proposed_tokens(keys, kind, block)  # a block says how many it can draft
    ids = layer_ids(f"{keys.where}: {_IDS}", keys.required(_IDS))
    drafted = keys.count("draft_vocab_size", 10**7)
    if kind == _DFLASH2 and drafted < shapes.vocab_size:
        raise keys.error("draft_vocab_size", f"{shapes.vocab_size}: DFlash 2 drafts all tokens")
    said = DescribedBlocks(
        dataclasses.replace(shapes, head_norms=True),  # whichever family the config names
        block,
        check_taps(f"{keys.where}: {_IDS}", ids, ids, model.config.num_layers),
        keys.count("mask_token_id", 10**7, 0),
        anchor,
        drafted,
        _heads(kind, keys, block, shapes.vocab_size),
    )
    return read_dflash(folder, model, "speculators", said)


def _heads(kind: str, keys: Keys, block: int, tokens: int) -> dict[str, Any]:
    """Settings of `DFlash` for what this kind has beside it. Raises UserError for a Markov head that is not vanilla."""
    if kind != _DSPARK:
        return dflash2_settings(keys, block, tokens) if kind == _DFLASH2 else {}
    rank, confidence = keys.count("markov_rank", 10**5, 0), "none"
    if rank and keys.get("markov_head_type") != "vanilla":
        raise keys.error("markov_head_type", "vanilla: gated and recurrent heads are not supported")
    if keys.flag("enable_confidence_head"):
        confidence = "markov" if keys.flag("confidence_head_with_markov") else "state"
    if confidence == "markov" and not rank:
        raise keys.error("confidence_head_with_markov", "false where markov_rank is 0")
    return {"markov_rank": rank, "markov_tables": rank > 0, "confidence_head": confidence}


def _write(adapter: Adapter, model: Model) -> Written:
    method: DFlash = adapter.method
    shapes, layer = export_layers(method, model, "speculators")
    kind, own = _written_heads(method)
    V = model.config.vocab_size
    if kind == _DFLASH2 and method.vocabulary:
        raise UserError("dflash: DFlash 2 in the form speculators has no vocabulary: it drafts all tokens")
    count = 0 if kind == _DFLASH2 else adapter.info.get("draft_vocabulary", 0)  # its tables are of all tokens
    tensors = write_tensors(adapter, model, shapes)
    if count:
        ids = adapter.frequent_tokens[:count].astype(np.int64)
        order = np.argsort(ids)
        tensors |= {HEAD: base_head(model, ids[order]), **written_vocabulary(ids[order], V)}
        if method.markov_rank:
            rows = order if method.vocabulary else ids[order]
            tensors[MARKOV_COLUMNS] = tensors[MARKOV_COLUMNS][rows]
    config = {
        **written_config(kind, _ARCHITECTURES[kind], method.distances, model),
        **own,
        "block_size": method.block,
        "draft_vocab_size": count or V,
        _IDS: sorted(method.taps(model.config.num_layers)),
        "mask_token_id": method.mask_token,
        "sample_from_anchor": method.sample_from_anchor,
        "transformer_layer_config": layer,
    }
    return Written(config, tensors)


def _written_heads(method: DFlash) -> tuple[str, dict[str, Any]]:
    """The kind that a drafter is, and the keys of this kind alone. Raises UserError for what none of them has."""
    if method.convolution or method.selector_rank:
        return _DFLASH2, dflash2_keys(method)
    if not method.markov_rank and method.confidence_head == "none":
        return _DFLASH, {}
    own = {"markov_rank": method.markov_rank, "markov_head_type": "vanilla"}
    own |= {"enable_confidence_head": method.confidence_head != "none"}
    return _DSPARK, own | {"confidence_head_with_markov": method.confidence_head == "markov"}


FORM = Form("dflash", "DFlash, DFlash 2 and DSpark of the package speculators", _recognises, _read, _write)
