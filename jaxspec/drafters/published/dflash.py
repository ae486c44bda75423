"""DFlash and DFlash 2 as their authors publish them, which borrow the base's embeddings and projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters.adapter import Adapter
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
from jaxspec.drafters.published.layers import LAYER_KEYS, check_base, check_layers, layer_ids, layer_shapes
from jaxspec.errors import UserError
from jaxspec.methods import DFlash
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

_DFLASH, _DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
_KEYS = ("architectures", "block_size", "dflash_config", "num_target_layers")
_OWN_KEYS = ("block_size", "mask_token_id", "target_layer_ids")  # of dflash_config
# of DFlash 2, with the values that change nothing
_NEUTRAL = {"output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": 0}


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") in ([_DFLASH], [_DFLASH2]) and "speculators_model_type" not in config


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    is_dflash2 = folder.config["architectures"] == [_DFLASH2]
    # blocks whose rows see each other, which they do where nothing is said, too
    both_ways = ("is_causal",) if folder.config.get("is_causal") is False else ()
    folder.check_keys((*LAYER_KEYS, *_KEYS, *both_ways))
    keys = Keys(folder.config, {}, folder.config_file)
    blocks = keys.part("dflash_config")
    neutral = (name for name, value in _NEUTRAL.items() if blocks.get(name) == value)
    own = (*_OWN_KEYS, *DFLASH2_KEYS, *neutral) if is_dflash2 else _OWN_KEYS
    folder.check_keys(own, blocks.content, "dflash_config.")
    shapes = layer_shapes(folder, folder.config, ("qwen3",), folder.config_file)
    check_base(folder, shapes, model, None)
    check_layers(folder, keys.count("num_target_layers", 1000), model)
    where = f"{blocks.where}: target_layer_ids"
    ids = layer_ids(where, blocks.required("target_layer_ids"))
    tapped = check_taps(where, ids, [i + 1 for i in ids], model.config.num_layers)  # outputs
    block = _block(keys, blocks)
    said = DescribedBlocks(
        shapes,
        block,
        tapped,
        blocks.count("mask_token_id", 10**7, 0),
        False,
        shapes.vocab_size,
        dflash2_settings(blocks, block, shapes.vocab_size) if is_dflash2 else {},
    )
    return read_dflash(folder, model, "dflash", said)


def _block(keys: Keys, blocks: Keys) -> int:
    """Rows of a block, which older files have at the top and newer ones in dflash_config."""
    given = [part.count("block_size", 10**4) for part in (keys, blocks) if part.get("block_size") is not None]
    if len({*given}) > 1:
        raise UserError(f"{keys.where}: block_size is {given[0]}, and {given[1]} in dflash_config")
    return given[0] if given else keys.count("block_size", 10**4)  # which says that it is missing


def _write(adapter: Adapter, model: Model) -> Written:
    method: DFlash = adapter.method
    shapes, layer = export_layers(method, model, "dflash")
    if method.sample_from_anchor:
        raise UserError("dflash: the form dflash has no sample_from_anchor; --form speculators has it")
    for name, off in (("markov_rank", 0), ("confidence_head", "none")):
        if getattr(method, name) != off:
            raise UserError(f"dflash: the form dflash has no {name}; --form speculators has it, as DSpark")
    if method.vocabulary:
        raise UserError("dflash: the form dflash has no vocabulary: it drafts all tokens; --form speculators has it")
    reads = sorted(method.taps(model.config.num_layers))
    if not reads[0]:
        raise UserError("dflash: the form dflash reads outputs of layers, and tapped has 0; --form speculators has it")
    is_dflash2 = bool(method.convolution or method.selector_rank)
    own = {"mask_token_id": method.mask_token, "target_layer_ids": [read - 1 for read in reads]}
    config = {
        "architectures": [_DFLASH2 if is_dflash2 else _DFLASH],
        "block_size": method.block,
        "dflash_config": own | (dflash2_keys(method) if is_dflash2 else {}),
        "num_target_layers": model.config.num_layers,
    }
    return Written(layer | config, write_tensors(adapter, model, shapes))


FORM = Form("dflash", "DFlash and DFlash 2 of their authors", _recognises, _read, _write)
