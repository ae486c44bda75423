"""How the files of a family hold the parameters, where not as LLaMA's do: names, fused matrices, pairs, shifted norms.

Readers and writers of files know one tensor per parameter, as LLaMA's files have it. A matrix that holds several of
them is taken apart on the way in and put together on the way out; its parts are called `qkv_proj[q]` and the like.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.weights.params import HF_NAMES, stored_transposed, tensor_names

_PART = re.compile(r"(.*)\[(\w+)\](\.\w+)$")


@dataclasses.dataclass(frozen=True)
class Published:
    """The form of a family's files.

    Attributes:
      names: of tensors by path, as `HF_NAMES`.
      fused: ends of the names of matrices that hold several, with their order: `qkv` (all queries, all keys, all
        values), `heads` (each key/value head's queries, its key and its value) or `gate_up` (gate and up).
      pairs: dimensions that rotate together are neighbours, in files, and not in the two halves of a head (ChatGLM).
      norm_shift: added to the norms' scales: files hold w and the model multiplies with 1 + w (Gemma).
      aside: beginnings of the names of tensors that belong to no layer of the decoder and are left aside.
      prefixes: beginnings of names in files that hold more than the decoder, with what they stand for.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: HF_NAMES)
    fused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pairs: bool = False
    norm_shift: float = 0.0
    aside: tuple[str, ...] = ()
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def read(
        self, config: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]], where: str
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors of a file as one per parameter. Raises UserError for a fused one of another shape."""
        paths = tensor_names(config, self.names)
        for name, array in tensors:
            if name.startswith(self.aside):
                continue
            name = self.plain(name)
            stem, _, leaf = name.rpartition(".")
            kind, parts = self._kind(stem), {name: array}
            if kind:
                pieces = _taken_apart(config, kind, array, f"{where}: tensor {name!r}")
                parts = {f"{stem}[{part}].{leaf}": piece for part, piece in pieces.items()}
            for name, piece in parts.items():
                path = paths.get(name, "")
                if self.norm_shift and _is_norm(path):
                    piece = np.float32(piece) + np.float32(self.norm_shift)
                yield name, in_halves(config, piece) if self.pairs and _is_rotated(path) else piece

    def plain(self, name: str) -> str:
        """The name of a tensor in a file that holds the decoder alone."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        return self.prefixes.get(prefix, "") + name.removeprefix(prefix)

    @staticmethod
    def whole(name: str) -> str:
        """The tensor of the file that holds what is called so: a part of a fused matrix, or that tensor itself."""
        match = _PART.match(name)
        return match[1] + match[3] if match else name

    def _kind(self, name: str) -> str | None:
        """The order within a fused matrix; None for others."""
        return next((kind for end, kind in self.fused.items() if name.endswith(f".{end}")), None)

    def groups(self, config: ModelConfig) -> dict[str, dict[str, str]]:
        """Names of the file's tensors with the paths of their parts, `{"": path}` where there is one."""
        found: dict[str, dict[str, str]] = {}
        for name, path in tensor_names(config, self.names).items():
            match = _PART.match(name)
            found.setdefault(self.whole(name), {})[match[2] if match else ""] = path
        return found

    def written(
        self, config: ModelConfig, name: str, flat: Mapping[str, jax.Array], paths: Mapping[str, str]
    ) -> np.ndarray:
        """A tensor of the file, in the host's memory, from a base's parameters; `paths` are those of its parts."""
        arrays = {part: np.asarray(flat[path]) for part, path in paths.items()}
        parts = {part: x.T if stored_transposed(paths[part]) else x for part, x in arrays.items()}
        if self.pairs:
            parts |= {part: _in_pairs(config, x) for part, x in parts.items() if _is_rotated(paths[part])}
        if "" not in parts:
            return np.ascontiguousarray(_put_together(config, self._kind(name.rpartition(".")[0]), parts))
        shift = self.norm_shift if _is_norm(paths[""]) else 0.0
        return np.ascontiguousarray(parts[""] - np.float32(shift) if shift else parts[""])


def _is_norm(path: str) -> bool:
    return path.endswith("norm/scale")


def _is_rotated(path: str) -> bool:
    return "/attention/q/" in path or "/attention/k/" in path


def _pairs(config: ModelConfig) -> np.ndarray:
    """Dimensions of a head in the order of halves, where its rotated ones lie in neighbouring pairs."""
    size = config.rotary_size
    return np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2), np.arange(size, config.head_dim)])


def in_halves(config: ModelConfig, array: np.ndarray) -> np.ndarray:
    """Queries or keys [heads * Dh, ...] whose rotated pairs are neighbours, with them in two halves of every head."""
    if not array.shape or len(array) % config.head_dim:
        return array  # the shape is refused where shapes are compared
    return array.reshape(-1, config.head_dim, *array.shape[1:])[:, _pairs(config)].reshape(array.shape)


def _in_pairs(config: ModelConfig, array: np.ndarray) -> np.ndarray:
    """The inverse of `in_halves`."""
    order = np.argsort(_pairs(config))
    return array.reshape(-1, config.head_dim, *array.shape[1:])[:, order].reshape(array.shape)


def _sizes(config: ModelConfig, kind: str) -> dict[str, int]:
    """Rows of the parts of a fused matrix, in their order."""
    if kind == "gate_up":
        return dict.fromkeys(("gate", "up"), config.intermediate_size)
    return {"q": config.num_heads * config.head_dim} | dict.fromkeys("kv", config.num_kv_heads * config.head_dim)


def _taken_apart(config: ModelConfig, kind: str, array: np.ndarray, tensor: str) -> dict[str, np.ndarray]:
    """Parts of a fused kernel [out, in] or bias [out]."""
    sizes = _sizes(config, kind)
    if array.shape[:1] != (sum(sizes.values()),):
        raise UserError(f"{tensor} has shape {list(array.shape)}, the configuration needs {sum(sizes.values())} rows")
    if kind != "heads":
        ends = np.cumsum(list(sizes.values()))[:-1]
        return dict(zip(sizes, np.split(array, ends), strict=True))
    heads = array.reshape(config.num_kv_heads, -1, config.head_dim, *array.shape[1:])
    parts = {"q": heads[:, :-2], "k": heads[:, -2], "v": heads[:, -1]}
    return {part: piece.reshape(-1, *array.shape[1:]) for part, piece in parts.items()}


def _put_together(config: ModelConfig, kind: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    """The inverse of `_taken_apart`."""
    ordered = [parts[part] for part in _sizes(config, kind)]
    if kind != "heads":
        return np.concatenate(ordered)
    rest = ordered[0].shape[1:]
    heads = [part.reshape(config.num_kv_heads, -1, config.head_dim, *rest) for part in ordered]
    return np.concatenate(heads, axis=1).reshape(-1, *rest)
