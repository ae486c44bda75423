"""Weights in 8-bit floating point with scales, as published bases of DeepSeek, Qwen and others hold them.

X.weight              float8 [out, in]
X.weight_scale        or X.weight_scale_inv: what it is multiplied by, for the whole, [] or [1]; per row, [out, 1] or
                      [out]; or per block of 128 x 128, [ceil(out / 128), ceil(in / 128)]
X.input_scale         of activations computed in 8 bits as well, which ours are not: left out
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import UserError

FLOAT8 = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}  # safetensors' names
_SCALES = ("_scale", "_scale_inv")  # behind the name of the weight
_INPUT_SCALE = ".input_scale"
_BLOCK = 128


def reads_float8(quantization: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config`, of a config.json, is of float8 weights with scales that `with_scales` reads."""
    method, groups = quantization.get("quant_method"), quantization.get("config_groups")
    if method == "compressed-tensors":
        parts = list(groups.values()) if isinstance(groups, dict) else []
        known = all(isinstance(part, dict) and _is_float8(part.get("weights")) for part in parts)
        return bool(parts) and known and quantization.get("kv_cache_scheme") is None
    return method == "fp8" and _is_block(quantization.get("weight_block_size"))


def _is_float8(weights: object) -> bool:
    if not isinstance(weights, dict) or (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return False
    whole = weights.get("strategy") in (None, "tensor", "channel", "block")
    return whole and _is_block(weights.get("block_structure"))


def _is_block(size: object) -> bool:
    return size is None or size == [_BLOCK, _BLOCK]


def with_scales(tensors: Iterable[tuple[str, np.ndarray]], where: str) -> Iterator[tuple[str, np.ndarray]]:
    """A stream of named tensors in which float8 weights are multiplied by their scales, float32, which drop out.

    Args:
      tensors: (name, array) pairs; a weight and its scale may come in either order.
      where: the folder, for messages.

    Raises:
      UserError: a weight has no scale, or one whose shape says nothing known; names the tensor.
    """
    weights: dict[str, np.ndarray] = {}
    scales: dict[str, tuple[str, np.ndarray]] = {}
    inputs: dict[str, np.ndarray] = {}
    done = set()
    for name, array in tensors:
        if array.dtype in FLOAT8.values():
            weights[name] = array
        elif name.endswith(_SCALES) and not name.endswith(_INPUT_SCALE):
            name, own = _scaled(name), name
            scales[name] = own, array
        elif name.endswith(_INPUT_SCALE):
            inputs[name] = array
        else:
            yield name, array
        if name in weights and name in scales:
            scale, weight = scales.pop(name)[1], weights.pop(name)
            yield name, _multiplied(weight, scale, f"{where}: tensor {name!r}")
            done.add(name)
    if weights:
        name, array = next(iter(weights.items()))
        raise UserError(f"{where}: tensor {name!r} is {array.dtype} without a scale ({name}_scale or {name}_scale_inv)")
    yield from scales.values()  # of nothing in float8: whoever reads the stream does not know them
    yield from ((name, x) for name, x in inputs.items() if name.removesuffix(_INPUT_SCALE) + ".weight" not in done)


def _scaled(name: str) -> str:
    return name.removesuffix(_SCALES[1]).removesuffix(_SCALES[0])


def _multiplied(weight: np.ndarray, scale: np.ndarray, tensor: str) -> np.ndarray:
    """[out, in] float32."""
    scale = scale.astype(np.float32)
    blocks = tuple(-(-size // _BLOCK) for size in weight.shape)
    if scale.size == 1:
        scale = scale.reshape(())
    elif weight.ndim and scale.shape in ((len(weight),), (len(weight), 1)):
        scale = scale.reshape(-1, *[1] * (weight.ndim - 1))
    elif weight.ndim and scale.shape == blocks:
        for axis, size in enumerate(weight.shape):
            scale = np.repeat(scale, _BLOCK, axis).take(range(size), axis)
    else:
        found, known = list(scale.shape), f"[], {[*weight.shape[:1], 1]}, or {list(blocks)} for blocks of {_BLOCK}"
        raise UserError(f"{tensor} {list(weight.shape)} is {weight.dtype} with scales {found}; known are {known}")
    return weight.astype(np.float32) * scale
