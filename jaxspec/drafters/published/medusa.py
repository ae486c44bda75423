"""Medusa as its authors publish it: for every head residual blocks and a projection, numbered in one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation, Written
from jaxspec.drafters.published.imported import (
    COMMON_KEYS,
    check_plain,
    count_parts,
    make_adapter,
    projection_shape,
    take,
)
from jaxspec.errors import UserError
from jaxspec.methods import Medusa
from jaxspec.model.quantized import dense
from jaxspec.parallel.processes import host
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

_KEYS = ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path")
_MOST = 64  # heads and blocks
_USUAL = (
    (0.50, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01),
    (0.30, 0.10, 0.06, 0.04, 0.03, 0.03, 0.02, 0.02, 0.01, 0.01),
    (0.20, 0.08, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02, 0.02, 0.01),
)


def _recognises(config: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in config or "medusa_num_layers" in config


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    folder.check_keys((*COMMON_KEYS, *_KEYS))
    check_plain(model, "medusa")
    keys = Keys(folder.config, {"medusa_num_heads": 1, "medusa_num_layers": 1}, folder.config_file)
    blocks = keys.count("medusa_num_layers", _MOST)
    heads = max(count_parts(folder), keys.count("medusa_num_heads", _MOST))  # published configs say 2 for 5
    V, D = projection_shape(folder, f"0.{blocks}.weight", model)
    kernels = [[take(folder, f"{h}.{b}.linear.weight", (D, D)) for b in range(blocks)] for h in range(heads)]
    biases = [[take(folder, f"{h}.{b}.linear.bias", (D,)) for b in range(blocks)] for h in range(heads)]
    projections = [take(folder, f"{h}.{blocks}.weight", (V, D)) for h in range(heads)]
    trainable = {"blocks": np.array(kernels), "bias": np.array(biases), "lm_head": np.array(projections)}
    method = Medusa(heads=heads, blocks=blocks, lm_head="full")
    return [Interpretation("", make_adapter(folder, model, "medusa", method, trainable, _USUAL))]


def _write(adapter: Adapter, model: Model) -> Written:
    """Heads that have the base's projection get a copy of it each: the form knows no other."""
    method: Medusa = adapter.method
    if method.lm_head == "low_rank":
        raise UserError("medusa: the form medusa has no lm_head low_rank, only whole projections: full, or the base's")
    check_plain(model, "medusa")
    trainable, tensors = {name: host(x) for name, x in adapter.trainable.items()}, {}
    tied = None if method.lm_head == "full" else host(dense(model.params["lm_head"])).astype(np.float32).T
    for h in range(method.heads):
        for b in range(method.blocks):
            tensors[f"{h}.{b}.linear.weight"] = trainable["blocks"][h, b].T
            tensors[f"{h}.{b}.linear.bias"] = trainable["bias"][h, b]
        tensors[f"{h}.{method.blocks}.weight"] = trainable["lm_head"][h].T if tied is None else tied
    config = {
        "medusa_num_heads": method.heads,
        "medusa_num_layers": method.blocks,
        "base_model_name_or_path": model.name,
    }
    return Written(config, tensors)


FORM = Form(
    "medusa",
    "Medusa of its authors",
    _recognises,
    _read,
    _write,
    weights=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
)
