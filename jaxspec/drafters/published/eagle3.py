"""EAGLE-3 as its authors publish it, and SpecForge, NeMo and others after them: `midlayer` in a LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.eagle_parts import (
    NORMS,
    Described,
    layers_read,
    read_eagle,
)
from jaxspec.drafters.published.eagle_writing import export_shapes, write_tensors
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation, Written
from jaxspec.drafters.published.layers import LAYER_KEYS, check_base, layer_shapes
from jaxspec.errors import UserError
from jaxspec.methods import Eagle
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
_KEYS = ("draft_vocab_size", "target_hidden_size", "target_model_type", "draft_model_type", "eagle_config", *NORMS)
_IDS = "eagle_aux_hidden_state_layer_ids"
_DEPTH = 7  # steps on its own states in the authors' training and in SpecForge's


def _recognises(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or [""]
    named = isinstance(architectures, list) and architectures[0] in ARCHITECTURES
    return named and "draft_vocab_size" in config and "speculators_model_type" not in config


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    folder.check_keys((*LAYER_KEYS, *_KEYS, _IDS))
    keys = Keys(folder.config, {}, folder.config_file)
    shapes = layer_shapes(folder, folder.config, ("llama",), folder.config_file, 1)
    check_base(folder, shapes, model, keys.optional_count("target_hidden_size", 10**6))
    taps = keys.part("eagle_config")
    folder.check_keys((_IDS, "use_aux_hidden_state"), taps.content, "eagle_config.")
    given = [ids for ids in (taps.get(_IDS), keys.get(_IDS)) if ids is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise UserError(f"{keys.where}: {_IDS} is {given[1]!r:.60}, and {given[0]!r:.60} in eagle_config")
    if taps.get("use_aux_hidden_state") is not None and not taps.flag("use_aux_hidden_state"):
        raise UserError(f"{taps.where}: use_aux_hidden_state false is EAGLE 1 or 2, which is not supported")
    said = Described(
        shapes,
        keys.optional_count("draft_vocab_size", 10**7) or shapes.vocab_size,
        layers_read(folder, given[0] if given else None, model.config.num_layers, ""),
        _norms(folder, keys),
        _DEPTH,
        "midlayer.",
    )
    return read_eagle(folder, model, "eagle3", said)


def _norms(folder: PublishedFolder, keys: Keys) -> dict[str, dict[str, bool]]:
    """The norms that are on, by what `norm_output` can mean.

    In SpecForge up to September 2026 `norm_output` true was EAGLE-3, where the norm stands before the projection alone,
    and false left that norm out.
    """
    norms = {name: keys.flag(name) for name in NORMS}
    if norms["norm_output"]:
        return {
            "norm_output feeds the normed state back": norms,
            "norm_output is the norm before lm_head alone": norms | {"norm_output": False},
        }
    norm = folder.tensors.get("norm.weight")
    if keys.get("norm_output") is False and norm is not None and np.all(norm.astype(np.float32) == 1):
        raise UserError(
            f"{folder.config_file}: norm_output false, and 'norm.weight' has not learned: trained without a norm "
            "before lm_head, which is not supported"
        )
    return {"": norms}


def _write(adapter: Adapter, model: Model) -> Written:
    method: Eagle = adapter.method
    if method.norm_before_residual:
        raise UserError("eagle: the form eagle3 has no norm_before_residual; --form speculators has it")
    layers, reads = model.config.num_layers, method.taps(model.config.num_layers)
    if len(reads) != 3 or reads[0] < 1:
        raise UserError(
            f"eagle: the form eagle3 reads the outputs of 3 layers, and reads is {list(reads)}; --form speculators "
            "takes any"
        )
    shapes, config = export_shapes(method, model, ("llama",))
    tensors = write_tensors(adapter, model, shapes, "midlayer.")
    config |= {"architectures": [ARCHITECTURES[0]], "draft_vocab_size": len(tensors["lm_head.weight"])}
    if reads != (2, layers // 2, layers - 3):
        ids = [read - 1 for read in reads]
        if reads not in layers_read(None, ids, layers, "").values():
            raise UserError(
                f"eagle: the form eagle3 means other layers by the ids {ids} of its reads {list(reads)}; "
                "--form speculators says which"
            )
        config["eagle_config"] = {_IDS: ids, "use_aux_hidden_state": True}
    return Written(config | {name: True for name in NORMS if getattr(method, name)}, tensors)


FORM = Form("eagle", "EAGLE-3 of its authors and SpecForge", _recognises, _read, _write)
