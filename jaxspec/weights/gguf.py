"""GGUF files: metadata, dequantized weights, and the tokenizer built from the metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor, dequantize
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.model.quantized import Quantized
from jaxspec.weights.gguf_families import FAMILIES
from jaxspec.weights.gguf_metadata import read_metadata
from jaxspec.weights.gguf_parts import read_parts
from jaxspec.weights.gguf_tokenizer import build_tokenizer
from jaxspec.weights.params import load_params
from jaxspec.weights.quantizing import keeps


class GGUFFile:
    """An opened GGUF file, with its other parts where it is one of several.

    Raises:
      UserError: a file cannot be read or is truncated, a part is missing, or the decoder lacks the architecture.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fields, self._stored = read_parts(path)
        self._by_name = {tensor.name: tensor for tensor in self._stored}
        self.architecture = self.get("general.architecture")
        if self.architecture not in FAMILIES:
            supported = ", ".join(FAMILIES)
            raise UserError(f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: {supported}")

    def get(self, key: str, default: object = None) -> object:
        """A metadata value, or `default` where the file has none."""
        return self._fields[key].contents() if key in self._fields else default

    def _required(self, key: str) -> object:
        value = self.get(key)
        if value is None:
            raise UserError(f"{self.path}: metadata key {key} is missing")
        return value

    def config(self) -> ModelConfig:
        """The shapes of the model. Raises UserError for metadata that are missing, impossible or not read."""
        prefix = f"{self.architecture}."
        content = {key: self.get(key) for key in self._fields if key.startswith(prefix)}
        vocab_size = len(self._required("tokenizer.ggml.tokens"))
        return read_metadata(self.architecture, content, self._by_name, vocab_size, str(self.path))

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for tensor in self._stored:
            try:
                array = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise UserError(f"{self.path}: tensor {tensor.name!r}: quantization {kind} is not supported") from None
            yield tensor.name, array.reshape(tuple(int(n) for n in tensor.shape[::-1]))

    def load(self, dtype: jnp.dtype, mesh: Mesh | None = None, form: str = "") -> tuple[ModelConfig, dict, str]:
        """Config, parameters and fingerprint; weights are dequantized tensor by tensor.

        With a `form`, see `load_params`, tensors of as many bits keep the numbers and groups that the file holds.
        """
        config, where, published = self.config(), str(self.path), FAMILIES[self.architecture].published

        def own(name: str) -> Quantized | None:
            whole = published.whole(name)

            def rows(x: np.ndarray) -> np.ndarray:
                return dict(published.read(config, [(whole, x)], where))[name]

            kernel = _own_groups(self._by_name[whole], rows, dtype) if form else None
            return kernel if kernel is not None and keeps(kernel, form) else None

        tensors = published.read(config, self._tensors(), where)
        params, fingerprint = load_params(config, tensors, published.names, dtype, where, mesh, form, own)
        return config, params, fingerprint

    def eos_tokens(self) -> tuple[int, ...]:
        """Ids that end a text, a turn or a message."""
        ids = (self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer with its chat template. Raises UserError as `build_tokenizer`."""
        return build_tokenizer(self.get, str(self.path))


_GROUP = 32  # weights of a block, in all formats here
_BLOCKS = {  # float16 numbers, the scale and perhaps a minimum, then whole numbers, two in a byte where uint8
    GGMLQuantizationType.Q4_0: (1, np.uint8),
    GGMLQuantizationType.Q4_1: (2, np.uint8),
    GGMLQuantizationType.Q8_0: (1, np.int8),
}


def _own_groups(tensor: ReaderTensor, rows: Callable[[np.ndarray], np.ndarray], dtype: jnp.dtype) -> Quantized | None:
    """A tensor [out, in] as the file holds it, [in, out]; None for other formats, and for vectors.

    `rows` takes those that are wanted, in their order.
    """
    if tensor.tensor_type not in _BLOCKS or len(tensor.shape) != 2:
        return None
    count, kind = _BLOCKS[tensor.tensor_type]
    width, height = (int(n) for n in tensor.shape)
    blocks = rows(tensor.data.reshape(height, width // _GROUP, -1))  # [out, G, bytes]
    factors = np.ascontiguousarray(blocks[..., : 2 * count]).view(np.float16)  # [out, G, 1 or 2]
    numbers = np.ascontiguousarray(blocks[..., 2 * count :]).view(kind).reshape(len(blocks), -1)
    values, scales, *minima = (np.ascontiguousarray(x.T) for x in (numbers, *np.moveaxis(factors, -1, 0)))
    return Quantized(values, scales, *minima, kind=jnp.dtype(dtype).name)
