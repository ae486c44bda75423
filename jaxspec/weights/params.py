"""Loading parameters: one table, and one strict loader of named tensors from a file.

The table (path, shape) comes from the decoder itself. A file format adds only its names for these paths. The
loader takes tensors one at a time and refuses anything unknown, missing, duplicate or misshapen by name.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.model.decoder import abstract_params, param_dtype
from jaxspec.model.quantized import Quantized, is_quantized
from jaxspec.parallel.processes import host
from jaxspec.parallel.sharding import put, tree_shardings
from jaxspec.weights.parts import is_part, join_parts, split_parts
from jaxspec.weights.quantizing import is_kernel, small

_SAMPLES = 64

_NAMES = {  # of the parameters in Hugging Face files, and in GGUF files
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "lm_head": ("lm_head.weight", "output.weight"),
    "norm/scale": ("model.norm.weight", "output_norm.weight"),
    "attention_norm/scale": ("input_layernorm.weight", "attn_norm.weight"),
    "mlp_norm/scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "attention/q": ("self_attn.q_proj", "attn_q"),
    "attention/k": ("self_attn.k_proj", "attn_k"),
    "attention/v": ("self_attn.v_proj", "attn_v"),
    "attention/o": ("self_attn.o_proj", "attn_output"),
    "attention/q_norm/scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "attention/k_norm/scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp/gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp/up": ("mlp.up_proj", "ffn_up"),
    "mlp/down": ("mlp.down_proj", "ffn_down"),
    "layers": ("model.layers", "blk"),
}
HF_NAMES = {path: name for path, (name, _) in _NAMES.items()}
GGUF_NAMES = {path: name for path, (_, name) in _NAMES.items()}


def parameter_count(tree: Any) -> int:
    """Elements of all arrays, abstract ones included; of quantized kernels, the weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree, is_leaf=is_quantized))


def parameter_table(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of every parameter as files hold them, e.g. `layers_0/attention/q/kernel`: (D, H * Dh)."""
    flat = jax.eval_shape(functools.partial(split_parts, config), abstract_params(config))
    return {path: leaf.shape for path, leaf in flat.items()}


def tensor_names(config: ModelConfig, names: dict[str, str]) -> dict[str, str]:
    """The file format's name of every parameter: {tensor name: path}."""
    paths = {path: path for path in parameter_table(config)}
    if config.tie_embeddings:
        paths["lm_head"] = "embedding"
    return {_tensor_name(name, names): path for path, name in paths.items()}


def _tensor_name(path: str, names: dict[str, str]) -> str:
    layer, _, rest = path.partition("/") if path.startswith("layers_") else ("", "", path)
    prefix = f"{names['layers']}.{layer.removeprefix('layers_')}." if layer else ""
    if rest in names:
        return prefix + names[rest]
    part, _, leaf = rest.rpartition("/")
    return prefix + names[part] + {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}[leaf]


def stored_transposed(path: str) -> bool:
    """Whether files hold this parameter as [out, in] where the decoder wants [in, out]."""
    return path.endswith("kernel") or path == "lm_head"


def load_params(
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    names: dict[str, str],
    dtype: jnp.dtype,
    where: str,
    mesh: Mesh | None = None,
    form: str = "",
    own: Callable[[str], Quantized | None] = lambda name: None,
) -> tuple[dict, str]:
    """The parameter tree from a stream of named tensors, and the fingerprint of the base.

    Args:
      config: shapes.
      tensors: (name, array) pairs as the file holds them.
      names: HF_NAMES or GGUF_NAMES.
      dtype: dtype of the parameters; norms stay float32.
      where: the file or folder, for messages.
      mesh: the parameters are divided over it, and no more than a layer is held whole; None: they go to one device.
      form: of the kernels, one of `GROUPS`; empty: as `dtype` says.
      own: the numbers and groups of a tensor [in, out], by its name, where they stay as the file holds them.

    Raises:
      UserError: a tensor is unknown, missing, duplicate or has the wrong shape, or no whole groups; names the tensor.
    """
    table, expected = parameter_table(config), tensor_names(config, names)
    params: dict[str, jax.Array] = {}
    waiting: dict[str, np.ndarray] = {}  # parts of a parameter, until all are there
    digests: dict[str, str] = {}
    for name, array in tensors:
        if name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == names["lm_head"]):
            continue  # a buffer of old checkpoints; a second copy of tied embeddings
        tensor, shape = f"{where}: tensor {name!r}", list(array.shape)
        if name not in expected:
            raise UserError(f"{where}: unknown tensor {name!r} {shape}; the configuration has no such weight")
        path = expected[name]
        if path in digests:
            raise UserError(f"{tensor} occurs twice")
        wanted = list(table[path][::-1] if stored_transposed(path) else table[path])
        if shape != wanted:
            raise UserError(f"{tensor} has shape {shape}, the configuration needs {wanted}")
        array = array.T if stored_transposed(path) else array
        digests[path] = tensor_digest(array)
        kept = own(name) if is_kernel(path) else None  # else a copy: files may be mapped into memory
        waiting[path] = np.array(array, param_dtype(path, dtype), order="C") if kept is None else kept
        waiting = join_parts(config, waiting)
        for whole in [path for path in waiting if not is_part(config, path)]:
            params[whole] = _placed(small(waiting.pop(whole), whole, form, where), whole, mesh)
    missing = [name for name, path in expected.items() if path not in digests]
    if missing:
        raise UserError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    return flax.traverse_util.unflatten_dict(params, sep="/"), fingerprint(config, digests)


def _placed(array: np.ndarray | Quantized, path: str, mesh: Mesh | None) -> jax.Array | Quantized:
    """A parameter on its device, or on those of a mesh.

    There it waits for the copy, until which the host would hold the array.
    """
    if mesh is None:
        return jax.device_put(array)  # several times as fast as `jnp.asarray`
    tree = {path: array}
    return jax.block_until_ready(put(tree, tree_shardings(mesh, tree))[path])


def tensor_digest(array: np.ndarray | jax.Array | Quantized) -> str:
    """A hash of a few evenly spaced elements, rounded to bfloat16 so that the stored precision does not matter."""
    array = array.dense(array.dtype) if is_quantized(array) else array
    count = array.size
    index = np.unravel_index(np.linspace(0, count - 1, min(count, _SAMPLES)).astype(int), array.shape)
    return hashlib.sha256(host(array[index]).astype(ml_dtypes.bfloat16).tobytes()).hexdigest()


def fingerprint(config: ModelConfig, digests: dict[str, str]) -> str:
    """16 hex digits that name a base: its shapes and a sample of every tensor."""
    shape = f"{config.num_layers} {config.hidden_size} {config.vocab_size} {config.rope_theta} {config.rope_scaling}"
    text = shape + "".join(f"{path} {digests[path]}" for path in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tuned_fingerprint(config: ModelConfig, params: dict, before: str) -> str:
    """The fingerprint of a base that was tuned from one of fingerprint `before`.

    Beside quantized kernels corrections stay: there it names `before` and them.
    """
    if not any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        return params_fingerprint(config, params)
    flat = jax.tree.leaves_with_path(params)
    digests = {jax.tree_util.keystr(path, simple=True, separator="/"): tensor_digest(leaf) for path, leaf in flat}
    return fingerprint(config, digests | {"before": before})


def params_fingerprint(config: ModelConfig, params: dict) -> str:
    """The fingerprint of parameters that are already in memory."""
    digests = {}
    for name, tree in params.items():  # a layer at a time: parts are copies
        digests |= {path: tensor_digest(leaf) for path, leaf in split_parts(config, {name: tree}).items()}
    return fingerprint(config, digests)
