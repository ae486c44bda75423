"""The next-token module of MiMo, which lies in the base's own files: `model.mtp_layers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.traverse_util

from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.drafters.published.imported import check_sizes, make_adapter, take
from jaxspec.errors import UserError
from jaxspec.methods import Mtp
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model
from jaxspec.weights.params import HF_NAMES, parameter_table, stored_transposed, tensor_names
from jaxspec.weights.parts import join_parts

_MODULE, _LAYER, _COUNT = "model.mtp_layers.", "model.layers.0.", "num_nextn_predict_layers"
_AROUND = {  # the layer, by our names
    "hidden_norm/scale": "hidden_layernorm.weight",
    "token_norm/scale": "token_layernorm.weight",
    "input/kernel": "input_proj.weight",
    "norm/scale": "final_layernorm.weight",
}
_USUAL = (
    (0.75, 0.08, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01),
    (0.55, 0.09, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01),
    (0.40, 0.09, 0.05, 0.03, 0.02, 0.02, 0.02, 0.01, 0.01, 0.01),
)


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "mimo" and bool(config.get(_COUNT))


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    keys, c = Keys(folder.config, {}, folder.config_file), model.config
    if keys.count(_COUNT, 100) != 1:
        raise UserError(f"{keys.where}: {_COUNT} {keys.get(_COUNT)} is not supported, only 1")
    check_sizes(folder, keys.count("hidden_size", 10**6), keys.count("vocab_size", 10**7), model)
    if c.sliding_window is not None:
        raise UserError(f"{keys.where}: a base with sliding_window {c.sliding_window} is not supported with mtp")
    shapes, flat = parameter_table(c), {}
    for path, name in _AROUND.items():
        shape = (c.hidden_size, 2 * c.hidden_size) if path == "input/kernel" else (c.hidden_size,)
        flat[path] = take(folder, f"{_MODULE}0.{name}", shape)
    for name, path in tensor_names(c, HF_NAMES).items():
        if name.startswith(_LAYER):
            shape = shapes[path][::-1] if stored_transposed(path) else shapes[path]
            flat[path.replace("layers_0", "layer")] = take(folder, name.replace(_LAYER, f"{_MODULE}0."), shape)
    folder.leave(*(name for name in folder.tensors if not name.startswith(_MODULE)))
    trainable = flax.traverse_util.unflatten_dict(join_parts(c, flat), sep="/")
    adapter = make_adapter(folder, model, "mtp", Mtp(), trainable, _USUAL)
    after = dataclasses.replace(adapter, method=Mtp(after_norm=True))
    meaning = "the module reads states {} the base's final norm".format
    return [Interpretation(meaning("before"), adapter), Interpretation(meaning("after"), after)]


FORM = Form("mtp", "MiMo's own next-token module", _recognises, _read)
