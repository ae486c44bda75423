"""What the published forms of EAGLE-3 share in reading: tensors, and which layers it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Interpretation
from jaxspec.drafters.published.imported import make_adapter
from jaxspec.drafters.published.layers import layer_ids, layer_tensors
from jaxspec.drafters.published.vocabulary import EMBEDDING, HEAD, base_embedding, read_vocabulary
from jaxspec.errors import UserError
from jaxspec.methods import Eagle
from jaxspec.weights.model import Model
from jaxspec.weights.parts import Flat, join_parts

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_NORMS = {  # of the layer, by our names
    "embedding_norm": "input_layernorm",
    "layer/attention_norm": "hidden_norm",
    "layer/mlp_norm": "post_attention_layernorm",
}


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
        return {"": reads_checked(folder, default, layers)}
    where = f"{folder.config_file}: " if folder else ""
    layer_ids(f"{where}eagle_aux_hidden_state_layer_ids", ids)
    entered, left = tuple(ids), tuple(i + 1 for i in ids)
    if entered == default:
        return {"": reads_checked(folder, entered, layers)}
    if left == default and usual != "input":
        return {"": reads_checked(folder, left, layers)}
    meanings = {f"layer ids {ids} are of inputs": entered, f"layer ids {ids} are of outputs": left}
    possible = {meaning: reads for meaning, reads in meanings.items() if min(reads) >= 0 and max(reads) <= layers}
    if not possible or (usual == "input" and left != default):
        return {"": reads_checked(folder, entered, layers)}
    return possible if len(possible) > 1 else {"": next(iter(possible.values()))}


def reads_checked(folder: PublishedFolder | None, reads: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The layers before which states are read, of `layers`. Raises UserError for two alike, or beyond the base's."""
    if len({*reads}) < len(reads) or not 0 <= min(reads) <= max(reads) <= layers:
        raise UserError(
            f"{folder.path}: it reads layers {list(reads)!r:.60}, and the base has {layers}: made for another base"
        )
    return reads


def read_eagle(folder: PublishedFolder, model: Model, form: str, said: Described) -> list[Interpretation]:
    """The drafter that a folder holds, for every combination of what its config.json can mean.

    Raises UserError for a tensor that is missing, misshapen or unknown.
    """
    frequent = read_vocabulary(folder, said.draft_vocabulary, model.config.vocab_size)
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
            trainable = flax.traverse_util.unflatten_dict(join_parts(said.shapes, flat), sep="/")
            adapter = make_adapter(folder, model, form, method, trainable, frequent=frequent)
            readings.append(Interpretation("; ".join(filter(None, (layers, meaning))), adapter))
    return readings


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
    tensors = layer_tensors(c, 2 * c.hidden_size).items()
    named = {
        f"{layer}{name}": (f"layer/{path}" if path.startswith("mlp/") else f"layer/attention/{path}", shape)
        for path, (name, shape) in tensors
    }
    return named | {f"{layer}{name}.weight": (f"{path}/scale", (c.hidden_size,)) for path, name in _NORMS.items()}


def _own_embedding(folder: PublishedFolder, model: Model) -> np.ndarray | None:
    """Embeddings [V, D] of its own; None where the file has none, or the base's."""
    if folder.shape(EMBEDDING) is None:
        return None
    tensor = folder.take(EMBEDDING, (model.config.vocab_size, model.config.hidden_size))
    ours = base_embedding(model).astype(tensor.dtype)
    return None if np.array_equal(ours, tensor) else tensor.astype(np.float32)
