"""What the published forms of DFlash share: layers of Qwen3's shape, taps, and what is the base's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.drafters.published.dflash_heads import read_heads
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Interpretation
from jaxspec.drafters.published.imported import check_plain, make_adapter
from jaxspec.drafters.published.layers import layer_tensors
from jaxspec.drafters.published.vocabulary import EMBEDDING, HEAD, base_embedding, base_head, is_copy, read_vocabulary
from jaxspec.errors import UserError
from jaxspec.methods import DFlash
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model
from jaxspec.weights.parts import Flat, join_parts

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # of a layer, by our names
_FUSED = "self_attn.qkv_proj"
DFLASH2_KEYS = {  # what files have beside DFlash, and its settings here
    "conv_kernel_size": "convolution",
    "conv_group_size": "convolution_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_width",
}


@dataclasses.dataclass(frozen=True)
class DescribedBlocks:
    """What a config.json says of a DFlash drafter.

    Attributes:
      shapes: of its layers, and how many there are.
      block: rows of a block.
      tapped: hidden states before which layers of the base it reads, in the order of `fc`.
      mask_token: id.
      sample_from_anchor: the anchor's row predicts, too.
      draft_vocabulary: V', tokens that it drafts.
      heads: settings of `DFlash` for what DSpark and DFlash 2 have beside it.
    """

    shapes: ModelConfig
    block: int
    tapped: tuple[int, ...]
    mask_token: int
    sample_from_anchor: bool
    draft_vocabulary: int
    heads: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def check_taps(where: str, ids: Any, tapped: Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers before which states are read.

    Args:
      where: the file and the key, for messages.
      ids: what the file has.
      tapped: the same as layers before which states are read.
      layers: L, of the base.

    Raises:
      UserError: layers that the base lacks, twice the same, or states after the last layer: forms take these behind the
        base's last norm, or drop them.
    """
    if len({*tapped}) < len(tapped) or not 0 <= min(tapped) <= max(tapped) <= layers:
        raise UserError(f"{where} {ids!r:.60} is not for a base of {layers} layers: made for another one")
    if max(tapped) == layers:
        raise UserError(f"{where} {ids!r:.60} reads states after the base's last layer, which is not supported")
    return tuple(tapped)


def check_plain_embedding(model: Model) -> None:
    """Raise UserError for a base whose embeddings are scaled: forms differ in whether a drafter's are."""
    if model.config.embedding_scale != 1:
        raise UserError(f"dflash: {model.name!r} scales its embeddings, which no published form of dflash says")


def check_plain_logits(method: DFlash, model: Model, form: str) -> None:
    """Raise UserError for a base that scales or caps its logits, where something is added to those of a drafter.

    Here that is done as the base does it, and published code scales and caps none.
    """
    if method.along_paths:
        check_plain(model, form)


def dflash2_settings(keys: Keys, block: int, tokens: int) -> dict[str, int]:
    """Settings of `DFlash` for what makes a drafter one of DFlash 2.

    Args:
      keys: that say it.
      block: rows of a block.
      tokens: V, of the base.

    Raises:
      UserError: a key without a number, or with one that is too large.
    """
    most = {"conv_kernel_size": block, "selector_top_k": tokens}
    return {setting: keys.count(key, most.get(key, 10**5)) for key, setting in DFLASH2_KEYS.items()}


def dflash2_keys(method: DFlash) -> dict[str, int]:
    """The opposite. Raises UserError for a drafter that has one half of DFlash 2, or DSpark's heads beside it."""
    for name in ("convolution", "selector_rank"):
        if not getattr(method, name):
            raise UserError(f"dflash: published forms of DFlash 2 have convolution and selector_rank, and {name} is 0")
    for name, off in (("markov_rank", 0), ("confidence_head", "none")):
        if getattr(method, name) != off:
            raise UserError(f"dflash: no published form has {name} beside convolution and selector_rank")
    return {key: getattr(method, setting) for key, setting in DFLASH2_KEYS.items()}


def read_dflash(folder: PublishedFolder, model: Model, form: str, said: DescribedBlocks) -> list[Interpretation]:
    """The drafter that a folder holds. Raises UserError for a tensor that is missing, misshapen or unknown."""
    check_plain_embedding(model)
    if said.mask_token >= model.config.vocab_size:
        raise UserError(
            f"{folder.config_file}: mask_token_id {said.mask_token} is no token of {model.name!r}, which has "
            f"{model.config.vocab_size}"
        )
    frequent = read_vocabulary(folder, said.draft_vocabulary, model.config.vocab_size)
    _check_bases_own(folder, model, np.arange(model.config.vocab_size) if frequent is None else frequent)
    method = DFlash(
        block=said.block,
        layers=said.shapes.num_layers,
        tapped=tuple(sorted(said.tapped)),
        sample_from_anchor=said.sample_from_anchor,
        from_newest=False,
        even=False,
        mask_token=said.mask_token,
        shapes=said.shapes,
        start="random",
        vocabulary=0 if frequent is None else len(frequent),
        **said.heads,
    )
    check_plain_logits(method, model, form)
    if method.convolution and said.shapes.hidden_size % method.convolution_group:
        raise UserError(
            f"{folder.config_file}: conv_group_size {method.convolution_group} does not divide the width "
            f"{said.shapes.hidden_size}"
        )
    flat = _read_tensors(folder, said)
    flat |= read_heads(folder, method, said.shapes.hidden_size, said.shapes.vocab_size)
    trainable = flax.traverse_util.unflatten_dict(join_parts(said.shapes, flat), sep="/")
    return [Interpretation("", make_adapter(folder, model, form, method, trainable, frequent=frequent))]


def _check_bases_own(folder: PublishedFolder, model: Model, ids: np.ndarray) -> None:
    """Raise UserError for copies of the base's embeddings and projection that are another base's, or have learned."""
    for name, count, ours in ((EMBEDDING, model.config.vocab_size, base_embedding), (HEAD, len(ids), base_head)):
        if folder.shape(name) is None:
            continue
        theirs = folder.take(name, (count, model.config.hidden_size)).astype(np.float32)
        weights = ours(model) if name == EMBEDDING else ours(model, ids)
        if not is_copy(theirs, weights, model):
            raise UserError(
                f"{folder.path}: tensor {name!r} is not that of {model.name!r}: made for another base, or trained, "
                "which dflash does not support"
            )


def _read_tensors(folder: PublishedFolder, said: DescribedBlocks) -> Flat:
    """The tensors by our names, float32."""
    D, n, flat = said.shapes.hidden_size, len(said.tapped), {}
    for number in range(said.shapes.num_layers):
        layer = _read_layer(folder, said.shapes, f"layers.{number}.")
        flat |= {f"layer{number + 1}/{path}": array for path, array in layer.items()}
    fuse = folder.take("fc.weight", (D, n * D)).astype(np.float32).T.reshape(n, D, D)
    order = [said.tapped.index(layer) for layer in sorted(said.tapped, reverse=True)]  # ours begins with the highest
    flat["fuse/kernel"] = fuse[order].reshape(n * D, D)
    flat["fuse_norm/scale"] = folder.take("hidden_norm.weight", (D,)).astype(np.float32)
    flat["norm/scale"] = folder.take("norm.weight", (D,)).astype(np.float32)
    return flat


def _read_layer(folder: PublishedFolder, c: ModelConfig, prefix: str) -> Flat:
    """A layer by our names: queries, and keys with values of every head beside each other."""
    parts = _fused(folder, c, prefix)
    for path, (name, shape) in layer_tensors(c, c.hidden_size).items():
        tensor = parts[path] if path in parts else folder.take(prefix + name, shape).astype(np.float32)
        parts[path] = tensor.T if tensor.ndim == 2 else tensor
    for leaf in ("kernel", "bias") if c.qkv_bias else ("kernel",):
        pair = [parts.pop(f"{name}/{leaf}") for name in "kv"]
        heads = [x.reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim) for x in pair]
        parts[f"kv/{leaf}"] = np.stack(heads, axis=-2).reshape(*pair[0].shape[:-1], -1)
    norms = {f"{path}/scale": f"{prefix}{name}.weight" for path, name in NORMS.items()}
    return parts | {path: folder.take(name, (c.hidden_size,)).astype(np.float32) for path, name in norms.items()}


def _fused(folder: PublishedFolder, c: ModelConfig, prefix: str) -> Flat:
    """Queries, keys and values that are one tensor there, as three; nothing where they are not."""
    parts, keys = {}, c.num_kv_heads * c.head_dim
    cuts = [c.num_heads * c.head_dim, c.num_heads * c.head_dim + keys]
    for suffix, leaf, rest in (("weight", "kernel", (c.hidden_size,)), ("bias", "bias", ())):
        name = f"{prefix}{_FUSED}.{suffix}"
        if folder.shape(name) is not None:
            three = np.split(folder.take(name, (cuts[1] + keys, *rest)).astype(np.float32), cuts)
            parts |= {f"{part}/{leaf}": array for part, array in zip("qkv", three, strict=True)}
    return parts
