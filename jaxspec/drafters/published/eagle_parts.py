"""What the published forms of EAGLE-3 share in reading: tensors, draft vocabulary, and which layers it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import method_plan
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Interpretation
from jaxspec.errors import UserError
from jaxspec.methods import Eagle
from jaxspec.parallel.processes import host
from jaxspec.trees.plan import plan_to_json
from jaxspec.weights.families import parse_config
from jaxspec.weights.load import Model
from jaxspec.weights.parts import Flat, join_parts

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_LAYER = {  # of the layer, by our names
    **{f"layer/attention/{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"layer/attention/{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"layer/mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "embedding_norm": "input_layernorm",
    "layer/attention_norm": "hidden_norm",
    "layer/mlp_norm": "post_attention_layernorm",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
# By rank, how often the token that follows is among a drafter's best, where that was not measured: for a first tree.
_USUAL = (0.62, 0.11, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.005, 0.005)
_USUAL_DECAY = 0.93  # per distance


@dataclasses.dataclass(frozen=True)
class Described:
    """What a config.json says of an EAGLE-3 drafter.

    Attributes:
      shapes: of its layer, and the base's vocabulary.
      draft_vocabulary: V', rows of its projection.
      reads: by what they are taken to mean, the layers before which states are read, in the order of `fc`.
      norms: by what they are taken to mean, the settings of `NORMS` that are on.
      depth: how far ahead it drafts.
      layer: what names of the layer's tensors begin with.
    """

    shapes: ModelConfig
    draft_vocabulary: int
    reads: Mapping[str, tuple[int, ...]]
    norms: Mapping[str, Mapping[str, bool]]
    depth: int
    layer: str


def layer_shapes(
    folder: PublishedFolder, content: Mapping[str, Any], families: Sequence[str], where: str
) -> ModelConfig:
    """The shapes of the one layer that a config.json, or a part of it, describes.

    Raises UserError for another family than `families`, several layers, or a sliding window.
    """
    if content.get("model_type") not in families:
        known = ", ".join(families)
        raise UserError(f"{where}: model_type {content.get('model_type')!r:.60} is no layer of this form, only {known}")
    if content.get("sliding_window") is not None and content.get("use_sliding_window") is not False:
        raise UserError(f"{where}: sliding_window {content['sliding_window']!r:.60} is not supported in a drafter")
    shapes = parse_config(dict(content), where)
    if shapes.num_layers != 1:
        raise UserError(f"{where}: num_hidden_layers {shapes.num_layers} is not supported, only 1")
    if shapes.sliding_window is not None:
        raise UserError(f"{where}: layer_types with a window are not supported in a drafter")
    return dataclasses.replace(shapes, tie_embeddings=False)


def check_base(folder: PublishedFolder, shapes: ModelConfig, model: Model, target_width: int | None) -> None:
    """Raise UserError for a drafter of another base, with the sizes of both."""
    theirs = (target_width or shapes.hidden_size, shapes.vocab_size)
    ours = (model.config.hidden_size, model.config.vocab_size)
    if theirs != ours:
        raise UserError(
            f"{folder.path}: a drafter for a base of width {theirs[0]} with {theirs[1]} tokens; {model.name!r} has "
            f"width {ours[0]} and {ours[1]} tokens"
        )
    if shapes.hidden_size != model.config.hidden_size:
        raise UserError(
            f"{folder.path}: its width {shapes.hidden_size} differs from its base's {ours[0]}, which is not supported"
        )
    scaling = shapes.rope_scaling
    if scaling is not None and scaling.kind == "longrope" and scaling != model.config.rope_scaling:
        raise UserError(f"{folder.path}: longrope is supported only where the base has the same")


def layers_read(folder: PublishedFolder | None, ids: Any, layers: int, usual: str) -> dict[str, tuple[int, ...]]:
    """The layers before which states are read, by the meanings that ids of layers can have.

    There are two conventions: `output`, an id names the layer whose output is read, and `input`, the layer that it
    enters. The ids that training defaults to tell which; others are ambiguous unless `usual` says.

    Args:
      folder: for messages.
      ids: of config.json; None where it has none.
      layers: L, of the base.
      usual: the convention of the form where its ids follow one, else empty.
    """
    default = (2, layers // 2, layers - 3)
    if ids is None:
        return {"": _checked_reads(folder, default, layers)}
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(
            f"{folder.config_file}: eagle_aux_hidden_state_layer_ids must be a list of layers, got {ids!r:.60}"
        )
    entered, left = tuple(ids), tuple(i + 1 for i in ids)
    if entered == default:
        return {"": _checked_reads(folder, entered, layers)}
    if left == default and usual != "input":
        return {"": _checked_reads(folder, left, layers)}
    meanings = {f"layer ids {ids} are of inputs": entered, f"layer ids {ids} are of outputs": left}
    possible = {meaning: reads for meaning, reads in meanings.items() if min(reads) >= 0 and max(reads) <= layers}
    if not possible or (usual == "input" and left != default):
        return {"": _checked_reads(folder, entered, layers)}
    return possible if len(possible) > 1 else {"": next(iter(possible.values()))}


def _checked_reads(folder: PublishedFolder | None, reads: tuple[int, ...], layers: int) -> tuple[int, ...]:
    if len({*reads}) < len(reads) or not 0 <= min(reads) <= max(reads) <= layers:
        raise UserError(
            f"{folder.path}: it reads layers {list(reads)!r:.60}, and the base has {layers}: made for another base"
        )
    return reads


def read_eagle(folder: PublishedFolder, model: Model, form: str, said: Described) -> list[Interpretation]:
    """The drafter that a folder holds, for every combination of what its config.json can mean.

    Raises UserError for a tensor that is missing, misshapen or unknown.
    """
    frequent = _draft_vocabulary(folder, said, model.config.vocab_size)
    readings = []
    for layers, reads in said.reads.items():
        for meaning, norms in said.norms.items():
            method = Eagle(
                depth=said.depth,
                unroll=said.depth,
                reads=tuple(sorted(reads)),
                vocabulary=0 if frequent is None else len(frequent),
                own_head=True,
                shapes=said.shapes,
                start="random",
                **norms,
            )
            flat = _read_tensors(folder, said, method, reads)
            embedding = _own_embedding(folder, model)
            if embedding is not None:
                method, flat = dataclasses.replace(method, own_embedding=True), flat | {"embedding": embedding}
            folder.check_all_taken()
            trainable = flax.traverse_util.unflatten_dict(join_parts(said.shapes, flat), sep="/")
            accuracy = [[share * _USUAL_DECAY**d for share in _USUAL] for d in range(method.depth)]
            info = {
                "base": model.name,
                "draft_vocabulary": method.vocabulary,
                "tree": plan_to_json(method_plan(method, model.config, "sparse:16", accuracy)),
                "published": {"form": form, "dtype": folder.dtype()},
            }
            adapter = Adapter(method, trainable, model.fingerprint, info, frequent)
            readings.append(Interpretation("; ".join(filter(None, (layers, meaning))), adapter))
    return readings


def _draft_vocabulary(folder: PublishedFolder, said: Described, vocab_size: int) -> np.ndarray | None:
    """Ids of the tokens that it drafts, in the order of its projection; None for all. `d2t` holds offsets."""
    there = [name for name in ("d2t", "t2d") if folder.shape(name) is not None]
    count = said.draft_vocabulary
    if len(there) == 1:
        missing = "t2d" if there == ["d2t"] else "d2t"
        raise UserError(f"{folder.path}: tensor {there[0]!r} is there without {missing!r}")
    if not there:
        if count != vocab_size:
            raise UserError(f"{folder.path}: it drafts {count} of {vocab_size} tokens, and tensor 'd2t' is missing")
        return None
    ids = folder.take("d2t", (count,), whole=True).astype(np.int64) + np.arange(count)
    if len(np.unique(ids)) < count or ids.min() < 0 or ids.max() >= vocab_size:
        raise UserError(f"{folder.path}: tensor 'd2t' must lead to different tokens below {vocab_size}")
    drafted = np.flatnonzero(folder.take("t2d", (vocab_size,), whole=True))
    if not np.array_equal(np.sort(ids), drafted):
        raise UserError(f"{folder.path}: tensors 'd2t' and 't2d' name different tokens")
    return None if count == vocab_size and np.array_equal(ids, np.arange(count)) else ids.astype(np.int32)


def _read_tensors(folder: PublishedFolder, said: Described, method: Eagle, reads: tuple[int, ...]) -> Flat:
    """The tensors by our names, float32."""
    D, n, flat = said.shapes.hidden_size, len(reads), {}
    for name, (path, shape) in tensor_names(said.shapes, said.layer).items():
        tensor = folder.take(name, shape).astype(np.float32)
        flat[path] = tensor.T if tensor.ndim == 2 else tensor
    order = [reads.index(layer) for layer in sorted(reads, reverse=True)]  # ours begins with the highest
    fc = folder.take("fc.weight", (D, n * D)).astype(np.float32).T.reshape(n, D, D)
    flat["fc/kernel"] = fc[order].reshape(n * D, D)
    if method.norm_before_fc:
        norm = folder.take("input_norm.weight", (n * D,)).astype(np.float32)
        flat["input_norm/scale"] = norm.reshape(n, D)[order].reshape(-1)
    if method.fc_norm:
        norms = [folder.take(f"fc_norm.{i}.weight", (D,)).astype(np.float32) for i in range(n)]
        flat["fc_norm/scale"] = np.stack(norms)[order]
    flat["norm/scale"] = folder.take("norm.weight", (D,)).astype(np.float32)
    flat["lm_head"] = folder.take(HEAD, (said.draft_vocabulary, D)).astype(np.float32).T
    return flat


def tensor_names(c: ModelConfig, layer: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names of the layer's tensors: our path of each, and its shape there, [out, in]."""
    D, width, queries, keys = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {
        "layer/attention/q/kernel": (queries, 2 * D),
        "layer/attention/k/kernel": (keys, 2 * D),
        "layer/attention/v/kernel": (keys, 2 * D),
        "layer/attention/o/kernel": (D, queries),
        "layer/mlp/gate/kernel": (width, D),
        "layer/mlp/up/kernel": (width, D),
        "layer/mlp/down/kernel": (D, width),
        **{f"{name}/scale": (D,) for name in ("embedding_norm", "layer/attention_norm", "layer/mlp_norm")},
    }
    if c.head_norms:
        shapes |= {f"layer/attention/{name}_norm/scale": (c.head_dim,) for name in "qk"}
    biased = [f"attention/{name}" for name in "qkv"] if c.qkv_bias else []
    biased += (["attention/o"] if c.o_bias else []) + (
        [f"mlp/{n}" for n in ("gate", "up", "down")] if c.mlp_bias else []
    )
    shapes |= {f"layer/{name}/bias": shapes[f"layer/{name}/kernel"][:1] for name in biased}
    named = {}
    for path, shape in shapes.items():
        module, _, leaf = path.rpartition("/")
        named[f"{layer}{_LAYER[module]}.{_LEAVES[leaf]}"] = (path, shape)
    return named


def _own_embedding(folder: PublishedFolder, model: Model) -> np.ndarray | None:
    """Embeddings [V, D] of its own; None where the file has none, or the base's."""
    if folder.shape(EMBEDDING) is None:
        return None
    tensor = folder.take(EMBEDDING, (model.config.vocab_size, model.config.hidden_size))
    ours = base_embedding(model).astype(tensor.dtype)
    return None if np.array_equal(ours, tensor) else tensor.astype(np.float32)


def base_embedding(model: Model) -> np.ndarray:
    """The base's embeddings [V, D] as its files have them, float32."""
    x = model.base.embed(jnp.arange(model.config.vocab_size)[None])[0]
    return host(x).astype(np.float32) / np.float32(model.config.embedding_scale)
