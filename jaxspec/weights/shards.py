"""Weight files of Hugging Face directories: safetensors shards, or older ones of PyTorch, mapped into memory."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.errors import UserError, first_line
from jaxspec.files import read_json
from jaxspec.weights.float8 import FLOAT8, with_scales

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_DTYPES = FLOAT8 | {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}  # safetensors' names
_MAX_HEADER = 16 * 2**20  # bytes, of some 150,000 tensors
_ROWS = 4096  # of two matrices that are compared at a time


def find_shards(folder: Path, files: Sequence[str] = WEIGHTS) -> list[Path]:
    """Files of weights: what an index lists, or a single one; of the names in `files` the first that is there counts.

    Raises UserError where one is missing.
    """
    forms = {name: folder / f"{name}.index.json" for name in files}
    there = (name for name, index in forms.items() if index.exists() or (folder / name).exists())
    names = [next(there, files[0])]
    index = forms[names[0]]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index}: key 'weight_map' is missing or does not name a file for every tensor")
        names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).exists():
            raise UserError(f"{folder}: {name} is missing; jaxspec reads safetensors and PyTorch weights")
    return [folder / name for name in names]


def read_tensors(folder: Path, shards: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of all tensors in shards of a folder, a shard at a time; float8 weights times their scales.

    Raises UserError for a file that is truncated or holds what cannot be read.
    """
    yield from with_scales(itertools.chain.from_iterable(_map_shard(shard).items() for shard in shards), str(folder))


def differ(shards: list[Path], names: tuple[str, str], plain: Callable[[str], str] = lambda name: name) -> bool:
    """Whether shards hold both matrices of these names, and not the same values in both.

    Args:
      shards: the files.
      names: of the matrices.
      plain: the names of the files' tensors to those that are asked for.
    """
    matrices: dict[str, np.ndarray] = {}
    for shard in shards:
        for name, array in _map_shard(shard).items():
            if plain(name) in names:
                matrices.setdefault(plain(name), array)
    if len(matrices) < 2:
        return False
    a, b = matrices.values()
    if a.shape != b.shape or {a.dtype, b.dtype} & {*FLOAT8.values()}:  # the same float8 may have other scales
        return True
    blocks = (slice(at, at + _ROWS) for at in range(0, len(a), _ROWS))
    return any(np.any(a[rows].astype(np.float32) != b[rows].astype(np.float32)) for rows in blocks)


def _map_shard(shard: Path) -> dict[str, np.ndarray]:
    return map_safetensors(shard) if shard.suffix == ".safetensors" else _map_pickle(shard)


def map_safetensors(shard: Path) -> dict[str, np.ndarray]:
    """Arrays that are read when they are used, bfloat16 among them, which the package safetensors cannot give numpy.

    The file is 8 bytes with the header's size, the header, the data. Raises UserError where it is not whole.
    """
    with shard.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise UserError(f"{shard}: not a complete safetensors file (its header would have {size} bytes)")
        try:
            with safe_open(shard, framework="numpy"):  # which checks the header against the size of the file
                header = json.loads(file.read(size))
        except SafetensorError as error:
            raise UserError(f"{shard}: not a complete safetensors file ({error})") from None
    data, arrays = np.memmap(shard, mode="r").view(np.ndarray)[8 + size :], {}
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        if tensor["dtype"] not in _DTYPES:
            raise UserError(f"{shard}: tensor {name!r} has dtype {tensor['dtype']}; known are {', '.join(_DTYPES)}")
        start, end = tensor["data_offsets"]
        arrays[name] = data[start:end].view(_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return arrays


def _map_pickle(shard: Path) -> dict[str, np.ndarray]:
    """Like Vicuna's. PyTorch maps them into memory, and refuses anything but weights."""
    torch = _torch(shard)
    try:
        content = torch.load(shard, map_location="cpu", mmap=True, weights_only=True)
        halves = {name for name, tensor in content.items() if tensor.dtype == torch.bfloat16}
        arrays = {n: (tensor.view(torch.int16) if n in halves else tensor).numpy() for n, tensor in content.items()}
    except Exception as error:  # not whole, not mappable, not weights: torch raises many kinds
        objects = isinstance(error, pickle.UnpicklingError)  # torch's own text advises to run them
        reason = "it holds more than tensors, and no code of a file is run" if objects else first_line(error)
        raise UserError(f"{shard}: not a complete file of PyTorch weights ({reason})") from None
    # numpy knows bfloat16 from ml_dtypes alone
    return {name: array.view(ml_dtypes.bfloat16) if name in halves else array for name, array in arrays.items()}


def _torch(shard: Path) -> ModuleType:
    """PyTorch, which only this form of weights needs. In older versions reading weights can run code."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise UserError(f"{shard}: reading such weights takes PyTorch; install it with: pip install 'torch>=2.10'")
    return torch
