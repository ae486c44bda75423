"""GGUF files: metadata, dequantized weights, and the tokenizer built from the metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor, dequantize
from jax.sharding import Mesh
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.errors import UserError
from jaxspec.model.quantized import Quantized
from jaxspec.model.rope import llama3_frequencies
from jaxspec.weights.gguf_families import FAMILY_KEYS, NAMES, family_fields
from jaxspec.weights.gguf_parts import read_parts
from jaxspec.weights.params import GGUF_NAMES, load_params
from jaxspec.weights.pieces import DIGIT_TRIPLES, SINGLE_DIGITS, all_merges, as_sentencepiece, split_by
from jaxspec.weights.published import in_halves
from jaxspec.weights.quantizing import keeps
from jaxspec.weights.rope_keys import BASES, FACTORS

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_DIVISORS = "rope_freqs.weight"
_REQUIRED = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
# further keys behind the architecture's name that are read, or that change nothing of what is computed
_KNOWN = {"attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"}
_KNOWN |= {"attention.sliding_window", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}
_KNOWN |= {"vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False}
_NEUTRAL |= {"attention.max_alibi_bias": 0, "attention.clamp_kqv": 0, "rope.scaling.attn_factor": 1, "logit_scale": 1}
_NEUTRAL |= {"residual_scale": 1, "embedding_scale": 1}


class GGUFFile:
    """An opened GGUF file, with its other parts where it is one of several.

    Raises:
      UserError: a file cannot be read or is truncated, a part is missing, or the decoder lacks the architecture.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fields, self._stored = read_parts(path)
        self.architecture = self.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise UserError(f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: {supported}")

    def get(self, key: str, default: object = None) -> object:
        """A metadata value, or `default` where the file has none."""
        return self._fields[key].contents() if key in self._fields else default

    def _of_model(self, key: str, default: object = None) -> object:
        """A metadata value whose key begins with the architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    def _required(self, key: str) -> object:
        value = self.get(key)
        if value is None:
            raise UserError(f"{self.path}: metadata key {key} is missing")
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        """A metadata value whose key begins with the architecture, a whole number of at least 1."""
        key = f"{self.architecture}.{key}"
        value = self._required(key) if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.path}: metadata key {key} must be a number of at least 1, got {str(value)[:80]}")
        return value

    def _number(self, key: str, default: float, least: float, most: float) -> float:
        """A metadata value whose key begins with the architecture, a number within bounds."""
        value = self._of_model(key, default)
        if not isinstance(value, int | float) or not least <= value <= most:
            told = f"{self.architecture}.{key} must be a number from {least:g} to {most:g}, got {value!s:.80}"
            raise UserError(f"{self.path}: metadata key {told}")
        return float(value)

    def config(self) -> ModelConfig:
        """The shapes of the model."""
        names = {tensor.name for tensor in self._stored}
        hidden, mlp, layers, heads, longest = map(self._count, _REQUIRED)
        if layers > len(names):
            raise UserError(f"{self.path}: {self.architecture}.block_count is {layers}, of {len(names)} tensors")
        theta = self._number("rope.freq_base", 10000.0, *BASES)
        head_dim = self._count("attention.key_length", hidden // heads)
        self._refuse_unread(head_dim)
        fields = dict(
            vocab_size=len(self._required("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=mlp,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self._count("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_positions=longest,
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta),
            rms_norm_eps=float(self._required(f"{self.architecture}.attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            head_norms="blk.0.attn_q_norm.weight" in names,
            sliding_window=self._of_model("attention.sliding_window") or None,
        )
        return ModelConfig(**fields | self._family_fields(head_dim))

    def _refuse_unread(self, head_dim: int) -> None:
        """Raise UserError for a key of the architecture that could change what is computed, and is not read."""
        usual = _NEUTRAL | {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
        known, prefix = {*_REQUIRED, *_KNOWN, *FAMILY_KEYS.get(self.architecture, ())}, f"{self.architecture}."
        for key in (name for name in self._fields if name.startswith(prefix)):
            name, value = key.removeprefix(prefix), self.get(key)
            if name not in known and (name not in usual or value != usual[name]):
                wanted = f", only {usual[name]}" if name in usual else ""
                raise UserError(f"{self.path}: metadata key {key} {value!s:.80} is not supported{wanted}")

    def _family_fields(self, head_dim: int) -> dict[str, Any]:
        try:
            return family_fields(self.architecture, self._of_model, head_dim)
        except ValueError as error:
            raise UserError(f"{self.path}: metadata key {self.architecture}.{error}") from None

    def _rope_scaling(self, theta: float) -> RopeScaling | None:
        divisors = next((tensor.data for tensor in self._stored if tensor.name == _DIVISORS), None)
        if divisors is not None:  # LLaMA 3's rule is stored as one divisor per frequency
            scaling = RopeScaling("llama3", float(np.max(divisors)), original_max_positions=8192)
            plain = theta ** -(np.arange(len(divisors)) / len(divisors))
            if not np.allclose(plain / divisors, llama3_frequencies(plain, scaling), rtol=1e-3):
                raise UserError(f"{self.path}: tensor {_DIVISORS!r} is not LLaMA 3's; load the original directory")
            return scaling
        kind = self._of_model("rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise UserError(f"{self.path}: rope scaling {kind!r} is not supported in GGUF files; supported: linear")
        key = "rope.scaling.factor" if self._of_model("rope.scaling.factor") else "rope.scale_linear"
        factor = self._number(key, 1.0, *FACTORS) if self._of_model(key) else 1.0  # 0 is none, as in llama.cpp
        return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None

    def _tensors(self, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
        for tensor in self._stored:
            if tensor.name == _DIVISORS:
                continue
            try:
                array = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise UserError(f"{self.path}: tensor {tensor.name!r}: quantization {kind} is not supported") from None
            array = array.reshape(tuple(int(n) for n in tensor.shape[::-1]))
            yield tensor.name, self._as_halves(array, tensor.name, config)

    def _as_halves(self, array: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
        """A tensor [out, ...] whose rotated heads, where it has any, are two halves each."""
        rotated = any(part in name for part in (".attn_q.", ".attn_k."))
        return in_halves(config, array) if rotated and self.architecture == "llama" else array

    def load(self, dtype: jnp.dtype, mesh: Mesh | None = None, form: str = "") -> tuple[ModelConfig, dict, str]:
        """Config, parameters and fingerprint; weights are dequantized tensor by tensor.

        With a `form`, see `load_params`, tensors of as many bits keep the numbers and groups that the file holds.
        """
        config, stored = self.config(), {tensor.name: tensor for tensor in self._stored}

        def own(name: str) -> Quantized | None:
            kernel = _own_groups(stored[name], lambda x: self._as_halves(x, name, config), dtype) if form else None
            return kernel if kernel is not None and keeps(kernel, form) else None

        names, where = NAMES.get(self.architecture, GGUF_NAMES), str(self.path)
        params, fingerprint = load_params(config, self._tensors(config), names, dtype, where, mesh, form, own)
        return config, params, fingerprint

    def eos_tokens(self) -> tuple[int, ...]:
        """Ids that end a text, a turn or a message."""
        ids = (self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer with its chat template.

        Raises:
          UserError: a tokenizer model or pre-tokenizer that is not known here.
        """
        tokens, kind = self.get("tokenizer.ggml.tokens"), self.get("tokenizer.ggml.model")
        build = {"gpt2": self._byte_level_bpe, "llama": self._sentencepiece_bpe}.get(kind)
        if build is None:
            raise UserError(f"{self.path}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")
        tokenizer = build(tokens)
        types = self.get("tokenizer.ggml.token_type") or [0] * len(tokens)
        if len(types) != len(tokens):
            raise UserError(f"{self.path}: {len(tokens)} tokens, and tokenizer.ggml.token_type is of {len(types)}")
        types = list(zip(tokens, types, strict=True))
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token, type in types if type == _CONTROL])
        tokenizer.add_tokens([AddedToken(token) for token, type in types if type == _USER_DEFINED])
        ids = [self.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown")]
        if outside := [number for number in ids if number is not None and not 0 <= number < len(tokens)]:
            raise UserError(f"{self.path}: special token {outside[0]} is outside the vocabulary of {len(tokens)}")
        bos, eos, unknown = (None if number is None else tokens[number] for number in ids)
        usual = kind == "llama" or self.get("tokenizer.ggml.pre") == "llama-bpe"  # LLaMA, up to 2 and from 3 on
        if bos is not None and self.get("tokenizer.ggml.add_bos_token", usual):
            begin = [(bos, ids[0])]
            tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", begin)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=bos,
            eos_token=eos,
            unk_token=unknown,
            clean_up_tokenization_spaces=False,
            chat_template=self.get("tokenizer.chat_template"),
        )

    def _byte_level_bpe(self, tokens: list[str]) -> Tokenizer:
        merges = [tuple(m.split(" ", 1)) for m in self.get("tokenizer.ggml.merges", [])]
        pre = self.get("tokenizer.ggml.pre", "default")
        steps = {
            "default": [pre_tokenizers.ByteLevel(False)],
            "gpt-2": [pre_tokenizers.ByteLevel(False)],
            "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)],
            "llama-bpe": split_by(DIGIT_TRIPLES),
            "qwen2": split_by(SINGLE_DIGITS),
        }
        if pre not in steps:
            raise UserError(f"{self.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(steps)}")
        ids = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps[pre])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece_bpe(self, tokens: list[str]) -> Tokenizer:
        """LLaMA-2's tokenizer: the merges follow from the pieces, in the order of their ids."""
        ids = {token: i for i, token in enumerate(tokens)}
        unknown = tokens[self.get("tokenizer.ggml.unknown_token_id", 0)]
        model = models.BPE(ids, all_merges(ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        return as_sentencepiece(model, (), self.get("tokenizer.ggml.add_space_prefix", True))


_GROUP = 32  # weights of a block, in all formats here
_BLOCKS = {  # float16 numbers, the scale and perhaps a minimum, then whole numbers, two in a byte where uint8
    GGMLQuantizationType.Q4_0: (1, np.uint8),
    GGMLQuantizationType.Q4_1: (2, np.uint8),
    GGMLQuantizationType.Q8_0: (1, np.int8),
}


def _own_groups(
    tensor: ReaderTensor, ordered: Callable[[np.ndarray], np.ndarray], dtype: jnp.dtype
) -> Quantized | None:
    """A tensor [out, in] as the file holds it, [in, out]; None for other formats, and for vectors.

    `ordered` puts its rows in order.
    """
    if tensor.tensor_type not in _BLOCKS or len(tensor.shape) != 2:
        return None
    count, kind = _BLOCKS[tensor.tensor_type]
    columns, rows = int(tensor.shape[1]), int(tensor.shape[0])
    blocks = ordered(tensor.data.reshape(columns, rows // _GROUP, -1))  # [out, G, bytes]
    factors = np.ascontiguousarray(blocks[..., : 2 * count]).view(np.float16)  # [out, G, 1 or 2]
    numbers = np.ascontiguousarray(blocks[..., 2 * count :]).view(kind).reshape(columns, -1)
    values, scales, *minima = (np.ascontiguousarray(x.T) for x in (numbers, *np.moveaxis(factors, -1, 0)))
    return Quantized(values, scales, *minima, kind=jnp.dtype(dtype).name)
