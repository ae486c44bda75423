"""EAGLE-3 as DeepSpec publishes it: a layer of Qwen 3's that drafts all tokens, and ids of the layers it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters.published.eagle_parts import NORMS, Described, read_eagle, reads_checked
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.drafters.published.layers import LAYER_KEYS, check_base, check_layers, layer_ids, layer_shapes
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

_ARCHITECTURE = "Qwen3Eagle3Model"
_IDS = "target_layer_ids"
_KEYS = ("ttt_length", "step_loss_decay", "num_target_layers", "target_model_name_or_path", _IDS)


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == [_ARCHITECTURE]


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    folder.check_keys((*LAYER_KEYS, *_KEYS))
    keys = Keys(folder.config, {}, folder.config_file)
    shapes = layer_shapes(folder, folder.config, ("qwen3",), folder.config_file, 1)
    check_base(folder, shapes, model, None)
    check_layers(folder, keys.optional_count("num_target_layers", 10**4), model)
    ids = layer_ids(f"{keys.where}: {_IDS}", keys.required(_IDS))
    reads = reads_checked(folder, tuple(i + 1 for i in ids), model.config.num_layers)  # of outputs; -1: the embedding
    norms = {"": dict.fromkeys(NORMS, False)}
    said = Described(shapes, shapes.vocab_size, {"": reads}, norms, keys.count("ttt_length", 64), "layers.0.")
    return read_eagle(folder, model, "deepspec", said)


EAGLE3 = Form("eagle", "EAGLE-3 of DeepSpec", _recognises, _read)
