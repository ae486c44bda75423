"""Tensors of DFlash 2 and DSpark that stand beside DFlash's: convolutions, selector, Markov and confidence heads."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.methods import DFlash
from jaxspec.parallel.processes import host
from jaxspec.weights.parts import Flat

MARKOV_COLUMNS = "markov_head.markov_w2.weight"  # a row for every token that is drafted


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of a file: its name and shape there, and whether it is [out, in], which is [in, out] here."""

    name: str
    shape: tuple[int, ...]
    turned: bool = False


def read_heads(folder: PublishedFolder, method: DFlash, width: int, tokens: int) -> Flat:
    """The tensors by our names, float32, for a base of so many tokens. Raises UserError for one that does not fit."""
    flat = {}
    for path, tensor in _tensors(method, width, tokens).items():
        array = folder.take(tensor.name, tensor.shape).astype(np.float32)
        flat[path] = array.T if tensor.turned else array
    return flat


def write_heads(flat: Flat, method: DFlash, width: int, tokens: int) -> dict[str, np.ndarray]:
    """The tensors by published names, of a trainable by path."""
    arrays = {tensor: host(flat[path]) for path, tensor in _tensors(method, width, tokens).items()}
    return {tensor.name: array.T if tensor.turned else array for tensor, array in arrays.items()}


def _tensors(method: DFlash, D: int, tokens: int) -> dict[str, _Tensor]:
    """By our paths."""
    drafted, r, s, taps = method.vocabulary or tokens, method.markov_rank, method.selector_rank, method.convolution
    tensors = {}
    if taps:
        for i in range(method.layers):
            for part in ("attention_conv", "mlp_conv"):
                ours, theirs = f"layer{i + 1}/{part}", f"layers.{i}.{part}"
                tensors[f"{ours}/weights"] = _Tensor(f"{theirs}.base_kernel", (2, taps, D))
                changes = (2 * taps * (D // method.convolution_group), D)
                tensors[f"{ours}/kernel"] = _Tensor(f"{theirs}.kernel_projection.weight", changes, True)
    if r:
        tensors["markov/before/table"] = _Tensor("markov_head.markov_w1.weight", (tokens, r))
        tensors["markov/after/kernel"] = _Tensor(MARKOV_COLUMNS, (drafted, r), True)
    if s:
        tensors["selector/before"] = _Tensor("candidate_selector.predecessor_codebook", (tokens, s))
        tensors["selector/candidate"] = _Tensor("candidate_selector.successor_codebook", (drafted, s))
        tensors["selector/state/kernel"] = _Tensor("candidate_selector.hidden_projection.weight", (s, D), True)
    if method.confidence_head != "none":
        read = D + r * (method.confidence_head == "markov")
        tensors["confidence/kernel"] = _Tensor("confidence_head.proj.weight", (1, read), True)
        tensors["confidence/bias"] = _Tensor("confidence_head.proj.bias", (1,))
    return tensors
