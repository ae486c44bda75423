"""DFlash, and DSpark, as the package `speculators` and vLLM publish them: the layers' config within the drafter's.

DSpark's confidence head, which says where a draft should end, is left out: drafts end by measured chances here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.dflash_parts import MARKOV, DescribedBlocks, check_taps, read_dflash
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
from jaxspec.methods import DFlash
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

_IDS = "aux_hidden_state_layer_ids"
_DFLASH, _DSPARK = "dflash", "dspark"
_ARCHITECTURES = {_DFLASH: "DFlashSpeculator", _DSPARK: "DSparkSpeculator"}
# sliding_window_non_causal says nothing without windows, which are refused
_KEYS = ("block_size", _IDS, "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
_MARKOV_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_MARKOV_DEFAULTS = {"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"}


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") in (_DFLASH, _DSPARK)


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    kind = folder.config["speculators_model_type"]
    more = (_MARKOV_KEYS, _MARKOV_DEFAULTS) if kind == _DSPARK else ((), {})
    keys, layer = checked_keys(folder, (*_KEYS, *more[0]), more[1])
    shapes = layer_shapes(folder, layer.content, FAMILIES, layer.where)
    check_base(folder, shapes, model, keys.optional_count("target_hidden_size", 10**6))
    leave_training_tensors(folder)
    block, anchor = keys.count("block_size", 10**4), keys.flag("sample_from_anchor")
    proposed_tokens(keys, kind, block)  # a block says how many it can draft
    ids = layer_ids(f"{keys.where}: {_IDS}", keys.required(_IDS))
    said = DescribedBlocks(
        dataclasses.replace(shapes, head_norms=True),  # whichever family the config names
        block,
        check_taps(f"{keys.where}: {_IDS}", ids, ids, model.config.num_layers),
        keys.count("mask_token_id", 10**7, 0),
        anchor,
        keys.count("draft_vocab_size", 10**7),
        _markov_rank(folder, keys) if kind == _DSPARK else 0,
    )
    return read_dflash(folder, model, "speculators", said)


def _markov_rank(folder: PublishedFolder, keys: Keys) -> int:
    """r of the Markov head. Raises UserError for one that is not vanilla."""
    if keys.get("enable_confidence_head", True):
        folder.leave("confidence_head.proj.weight", "confidence_head.proj.bias")
    rank = keys.count("markov_rank", 10**5, 0)
    if rank and keys.get("markov_head_type") != "vanilla":
        raise keys.error("markov_head_type", "vanilla: gated and recurrent heads are not supported")
    return rank


def _write(adapter: Adapter, model: Model) -> Written:
    method: DFlash = adapter.method
    shapes, layer = export_layers(method, model)
    tensors, V = write_tensors(adapter, model, shapes), model.config.vocab_size
    count = adapter.info.get("draft_vocabulary", 0)
    if count:
        ids = adapter.frequent_tokens[:count].astype(np.int64)
        order = np.argsort(ids)
        tensors |= {HEAD: base_head(model, ids[order]), **written_vocabulary(ids[order], V)}
        if method.markov_rank:
            rows = order if method.vocabulary else ids[order]
            tensors[MARKOV["after"]] = tensors[MARKOV["after"]][rows]
    kind = _DSPARK if method.markov_rank else _DFLASH
    own = {"markov_rank": method.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    config = {
        **written_config(kind, _ARCHITECTURES[kind], method.distances, model),
        **(own if kind == _DSPARK else {}),
        "block_size": method.block,
        "draft_vocab_size": count or V,
        _IDS: sorted(method.taps(model.config.num_layers)),
        "mask_token_id": method.mask_token,
        "sample_from_anchor": method.sample_from_anchor,
        "transformer_layer_config": layer,
    }
    return Written(config, tensors)


FORM = Form("dflash", "DFlash and DSpark of the package speculators", _recognises, _read, _write)
