"""Files of weights: float8 with scales, and headers that no such file has."""

import json
import struct
import time
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.errors import UserError
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.shards import find_shards, read_tensors
from tests.helpers.model import assert_same_params, random_params, tiny_config

CONFIG = tiny_config(hidden_size=160, intermediate_size=136)  # blocks of 128 that are not full
LAST = "model.layers.1.mlp.down_proj.weight"
NAMES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}


def write_tensors(file, tensors):
    """A safetensors file; the dtypes' names are given, as (name, array) pairs."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        content = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def quantized(weight, kind, dtype):
    """A matrix [out, in] in float8, its scale, and what both stand for."""
    rows, columns = weight.shape
    if kind == "tensor":
        scale = np.full((), np.abs(weight).max() / 100, np.float32)
    elif kind == "rows":
        scale = np.abs(weight).max(axis=1, keepdims=True) / 100
    else:
        parts = [[np.abs(weight[i : i + 128, j : j + 128]).max() for j in range(0, columns, 128)]
                 for i in range(0, rows, 128)]  # fmt: skip
        scale = np.array(parts, np.float32) / 100
    whole = np.kron(scale, np.ones((128, 128), np.float32))[:rows, :columns] if kind == "blocks" else scale
    small = (weight / whole).astype(dtype)
    return small, scale, small.astype(np.float32) * whole


def save_float8(folder, kind, suffix, dtype="F8_E4M3", scale_first=False):
    """A base whose matrices within layers are in float8, and the same base in float32 in a folder beside it."""
    save_directory(folder / "plain", CONFIG, random_params(CONFIG))
    plain = safetensors.numpy.load_file(folder / "plain" / "model.safetensors")
    tensors = {}
    for name, weight in plain.items():
        if "_proj.weight" not in name:
            tensors[name] = "F32", weight
            continue
        small, scale, plain[name] = quantized(weight, kind, NAMES[dtype])
        pair = {name: (dtype, small), name + suffix: ("F32", scale)}
        tensors |= dict(reversed(pair.items())) if scale_first else pair
        tensors[name.replace(".weight", ".input_scale")] = "F32", np.ones(1, np.float32)
    safetensors.numpy.save_file(plain, folder / "plain" / "model.safetensors")
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text((folder / "plain" / "config.json").read_text())
    write_tensors(folder / "small" / "model.safetensors", tensors)
    return tensors


@pytest.mark.parametrize("scale_first", [False, True])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("kind", "suffix"), [("blocks", "_scale_inv"), ("tensor", "_scale"), ("rows", "_scale"), ("blocks", "_scale")]
)
def test_float8_weights_are_multiplied_by_their_scales(kind, suffix, dtype, scale_first, tmp_path):
    save_float8(tmp_path, kind, suffix, dtype, scale_first)
    _, params, fingerprint = load_directory(tmp_path / "small", jnp.float32)
    _, expected, name = load_directory(tmp_path / "plain", jnp.float32)
    assert_same_params(params, expected)
    assert fingerprint == name


def test_a_scale_may_be_in_another_file(tmp_path):
    tensors = save_float8(tmp_path, "blocks", "_scale_inv")
    folder, halves = tmp_path / "small", (list(tensors)[::2], list(tensors)[1::2])
    for i, names in enumerate(halves):
        write_tensors(folder / f"{i}.safetensors", {name: tensors[name] for name in names})
    where = {name: f"{i}.safetensors" for i, names in enumerate(halves) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "model.safetensors").unlink()
    assert_same_params(load_directory(folder, jnp.float32)[1], load_directory(tmp_path / "plain", jnp.float32)[1])


def refused(folder, message):
    with pytest.raises(UserError, match=message):
        load_directory(folder / "small", jnp.float32)


def test_float8_weights_without_a_known_scale_are_named(tmp_path):
    tensors, file = save_float8(tmp_path, "tensor", "_scale"), tmp_path / "small" / "model.safetensors"
    scale = f"{LAST}_scale"
    write_tensors(file, {name: x for name, x in tensors.items() if name != scale})
    refused(tmp_path, rf"tensor '{LAST}' is float8_e4m3fn without a scale")
    write_tensors(file, tensors | {scale: ("F32", np.ones((5, 8), np.float32))})
    refused(
        tmp_path, rf"tensor '{LAST}' \[160, 136\] is float8_e4m3fn with scales \[5, 8\]; known are .* blocks of 128"
    )
    norm = "model.norm.weight_scale"
    write_tensors(file, tensors | {norm: ("F32", np.ones(1, np.float32))})
    refused(tmp_path, rf"unknown tensor '{norm}'")
    write_tensors(file, tensors | {scale: ("F8_E8M0", np.ones(1, np.uint8))})
    refused(tmp_path, rf"tensor '{scale}' has dtype F8_E8M0; known are F8_E4M3, ")


DEEP = '{"x": ' + "[" * 10_000 + "]" * 10_000 + "}"
HEADERS = {
    "a_gigabyte": struct.pack("<Q", 2**30 - 8),
    "more_than_the_file": struct.pack("<Q", 2**62),
    "deep_lists": struct.pack("<Q", len(DEEP)) + DEEP.encode(),
    "nothing": b"",
    "zeros": bytes(8),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_absurd_headers_are_refused_at_once(kind, tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(HEADERS[kind])
        file.truncate(2**30 if HEADERS[kind] else 0)
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^\S*model\.safetensors: not a complete safetensors file \(.*\)$"):
        list(read_tensors(tmp_path, find_shards(tmp_path)))
    assert time.monotonic() - began < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
