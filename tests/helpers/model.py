"""Tiny random models, and the files that hold them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import flax.traverse_util
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.model.attention import Context
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.weights.gguf_families import FAMILIES
from jaxspec.weights.params import (
    HF_NAMES,
    parameter_table,
    stored_transposed,
    tensor_names,
)
from jaxspec.weights.parts import join_parts, split_parts


def tiny_config(**changes) -> ModelConfig:
    """Grouped queries, and heads whose joint width is not the model's, so that no two axes can be confused."""
    shapes = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2)
    return ModelConfig(**(shapes | dict(head_dim=16, max_positions=64) | changes))


# every family, with contexts and windows shorter than the sequences of the tests
VARIANTS = {
    "llama": tiny_config(),
    "llama3": tiny_config(tie_embeddings=True, max_positions=512, rope_scaling=RopeScaling("llama3", 8.0, 64)),
    "linear": tiny_config(tie_embeddings=True, rope_scaling=RopeScaling("linear", 4.0)),
    "dynamic": tiny_config(max_positions=20, rope_scaling=RopeScaling("dynamic", 2.0, 10)),
    "mistral": tiny_config(sliding_window=5),
    "qwen2": tiny_config(tie_embeddings=True, qkv_bias=True, rms_norm_eps=1e-6, rope_theta=1e6),
    "qwen2_window": tiny_config(qkv_bias=True, sliding_window=5, first_window_layer=1),
    "qwen3": tiny_config(head_norms=True, rms_norm_eps=1e-6, rope_theta=1e6),
}


@functools.cache
def random_params(config: ModelConfig, seed: int = 0) -> dict:
    """Float32 parameters from numpy's generator: the same wherever the test runs."""
    rng = np.random.default_rng(seed)
    params = {}
    for path, shape in sorted(parameter_table(config).items()):
        noise = rng.standard_normal(shape)
        if path.endswith("scale"):
            noise = 1 + 0.2 * noise
        elif path.endswith("kernel"):
            noise *= (2.0 if "/q/" in path or "/k/" in path else 1.0) * shape[0] ** -0.5
        params[path] = noise.astype(np.float32)
    return jax.tree.map(jnp.asarray, flax.traverse_util.unflatten_dict(join_parts(config, params), sep="/"))


def random_base(config: ModelConfig, seed: int = 0) -> Base:
    """A decoder bound to random parameters."""
    return Base(random_params(config, seed), Decoder(config))


def random_tokens(shape: tuple[int, ...], seed: int = 0, vocab_size: int = 48) -> np.ndarray:
    """Token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


# compiled without optimisation: these tests wait for the compiler, not for its code
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@quick_jit
def plain(base: Base, tokens: jax.Array) -> jax.Array:
    """Logits [B, T, V] of the plain forward pass."""
    return base.decoder.apply({"params": base.params}, tokens)


def logits_of(config: ModelConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one text [T]."""
    return np.asarray(plain(Base(params, Decoder(config)), tokens[None])[0])


def log_probabilities(model, ids):
    """Of every token but the first, by the plain forward pass, [T - 1, V]."""
    padded = np.zeros((1, 64), np.int32)  # of one length: a program for all texts
    padded[0, : len(ids)] = ids
    return np.asarray(jax.nn.log_softmax(plain(model.base, padded)))[0, : len(ids) - 1]


@functools.partial(quick_jit, static_argnames="layers")
def run_layers(base: Base, x: jax.Array, context: Context, layers: tuple[int, int] | None = None) -> tuple:
    """`Base.rows`, compiled."""
    return base.rows(x, context, layers)


def named_tensors(config: ModelConfig, params: dict, names: dict[str, str] = HF_NAMES) -> Iterator[tuple]:
    """(name, array) pairs as a file holds them."""
    flat = split_parts(config, params)
    for name, path in tensor_names(config, names).items():
        array = np.asarray(flat[path])
        yield name, np.ascontiguousarray(array.T if stored_transposed(path) else array)


def assert_same_params(a: dict, b: dict) -> None:
    """The same tree, the same values, the same dtypes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def split_shards(folder: Path, count: int) -> None:
    """Deal the tensors of model.safetensors out to `count` shards with an index."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        part = f"model-{i + 1:05}-of-{count:05}.safetensors"
        mine = dict(list(tensors.items())[i::count])
        safetensors.numpy.save_file(mine, folder / part)
        weight_map |= dict.fromkeys(mine, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# a byte-level BPE: all bytes, a few merges, then control tokens and one user-defined token
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "123 4"]
CONTROL = ["<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
TOKENS = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), *CONTROL, USER_DEFINED]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: the two halves of a head become neighbouring pairs."""
    half = array.shape[0] // heads // 2
    order = [h * 2 * half + part * half + i for h in range(heads) for i in range(half) for part in range(2)]
    return array[order]


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    """Metadata of the byte-level BPE above."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index(CONTROL[0]))
    writer.add_eos_token_id(TOKENS.index(CONTROL[1]))
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path,
    config: ModelConfig,
    params: dict,
    tokenizer=add_byte_level_tokenizer,
    quantization: gguf.GGMLQuantizationType | None = None,
    tensors_per_part: int = 0,
    **metadata: str | float | bool | list,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it.

    Args:
      path: where to.
      config: shapes; with norms around the halves the architecture is gemma3, with `head_norms` qwen3, with `qkv_bias`
        qwen2, else llama.
      params: the parameters.
      tokenizer: adds the tokenizer's metadata to the writer.
      quantization: type of the matrices; default float32.
      tensors_per_part: the file is split into parts, NAME-00001-of-00003.gguf and so on; 0: it is one.
      metadata: further keys, dots written as double underscores.
    """
    architecture = "qwen3" if config.head_norms else "qwen2" if config.qkv_bias else "llama"
    architecture = "gemma3" if config.norms == "around" else architecture
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    scaling = config.rope_scaling
    if scaling and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling and scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    tokenizer(writer)
    for key, value in metadata.items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add = kinds[type(value)]
        add(key.replace("__", "."), value)
    for name, array in named_tensors(config, params, FAMILIES[architecture].published.names):
        if architecture == "llama" and ".attn_q." in name:
            array = permute(array, config.num_heads)
        if architecture == "llama" and ".attn_k." in name:
            array = permute(array, config.num_kv_heads)
        if quantization is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_divisors(config: ModelConfig) -> np.ndarray:
    """rope_freqs.weight: what each frequency is divided by, by cases on the wavelength as the LLaMA 3.1 code has it."""
    s, divisors = config.rope_scaling, []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * config.rope_theta ** (i / config.head_dim)
        if wavelength < s.original_max_positions / s.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > s.original_max_positions / s.low_freq_factor:
            divisors.append(s.factor)
        else:
            turns = s.original_max_positions / wavelength
            smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / s.factor + smooth))
    return np.array(divisors, np.float32)
