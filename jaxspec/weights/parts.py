"""Parameters that the decoder holds as one and files as parts: `qkv` is q, k and v, on GPUs `gate_up` is gate and up.

Trees are flat here: arrays by path, like `layers_0/attention/qkv/kernel`.
"""

from __future__ import annotations

from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.model.blocks import holds_pairs
from jaxspec.weights.quantizing import alike

Flat = dict[str, Any]

_PAIR, _GATE, _UP = "/gate_up/", "/gate/", "/up/"


def split_parts(config: ModelConfig, params: dict) -> Flat:
    """A base's parameter tree by path as files hold it."""
    return _split_qkv(config, split_gates(flax.traverse_util.flatten_dict(params, sep="/")))


def join_parts(config: ModelConfig, flat: Flat) -> Flat:
    """A base's parameters by path as the decoder has them. Layers of which a part is missing stay as they are."""
    flat = _join_qkv(config, flat)
    return join_gates(flat) if _pairs() else flat


def is_part(config: ModelConfig, path: str) -> bool:
    """Whether a file's tensor is only a part of one of a base's parameters."""
    parts = [f"/attention/{name}/" for name in "qkv"] + ([_GATE, _UP] if _pairs() and config.gated else [])
    return any(part in path for part in parts)


def as_held(tree: dict) -> dict:
    """Layers of a base, or of a method, with gate and up as this machine's devices want them."""
    return with_joined_gates(tree) if _pairs() else tree


def _pairs() -> bool:
    return holds_pairs(jax.default_backend())


def with_split_gates(tree: dict) -> dict:
    """`split_gates` of a tree that is not flat: the form in which adapters and checkpoints are written."""
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return flax.traverse_util.unflatten_dict(split_gates(flat), sep="/")


def with_joined_gates(tree: dict) -> dict:
    """The opposite of `with_split_gates`."""
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return flax.traverse_util.unflatten_dict(join_gates(flat), sep="/")


def split_gates(flat: Flat) -> Flat:
    """Every `gate_up`, of bases and of methods' own layers, as `gate` and `up`."""
    parts = {}
    for path, array in flat.items():
        names = (_GATE, _UP) if _PAIR in path else ()
        parts |= {path.replace(_PAIR, name): array[i] for i, name in enumerate(names)} or {path: array}
    return parts


def join_gates(flat: Flat) -> Flat:
    """Every `gate` with its `up`, [in, out] each, as one `gate_up` [2, in, out]; one alone stays as it is."""
    joined, flat = {}, dict(flat)
    for gate in [path for path in flat if _GATE in path and path.replace(_GATE, _UP) in flat]:
        pair = alike([flat.pop(gate), flat.pop(gate.replace(_GATE, _UP))])
        joined[gate.replace(_GATE, _PAIR)] = jax.tree.map(_side_by_side, *pair)
    return flat | joined


def _side_by_side(*parts: Any) -> Any:
    """[in, out] each, as [2, in, out]."""
    return (jnp.stack if isinstance(parts[0], jax.Array) else np.stack)(parts)


def _split_qkv(config: ModelConfig, flat: Flat) -> Flat:
    K, Dh = config.num_kv_heads, config.head_dim
    parts = {}
    for path, array in flat.items():
        if "/qkv/" not in path:
            parts[path] = array
            continue
        heads = array.reshape(*array.shape[:-1], K, -1, Dh)
        for name, part in {"q": heads[..., :-2, :], "k": heads[..., -2, :], "v": heads[..., -1, :]}.items():
            parts[path.replace("/qkv/", f"/{name}/")] = part.reshape(*array.shape[:-1], -1)
    return parts


def _join_qkv(config: ModelConfig, flat: Flat) -> Flat:
    """Per key/value head its query heads, its key and its value side by side, as the decoder has them."""
    K, Dh = config.num_kv_heads, config.head_dim

    def together(*three: np.ndarray) -> np.ndarray:
        heads = [part.reshape(*part.shape[:-1], K, -1, Dh) for part in three]
        return np.concatenate(heads, axis=-2).reshape(*three[0].shape[:-1], -1)

    joined, flat = {}, dict(flat)
    for path in list(flat):
        names = [path.replace("/q/", f"/{name}/") for name in "qkv"]
        if "/q/" in path and all(name in flat for name in names):
            three = alike([flat.pop(name) for name in names])
            joined[path.replace("/q/", "/qkv/")] = jax.tree.map(together, *three)
    return flat | joined
