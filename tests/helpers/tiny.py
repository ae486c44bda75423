"""A tiny random base and prompts for it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxspec.config import MeshConfig, ModelConfig
from jaxspec.model.decoder import Decoder
from jaxspec.parallel.sharding import make_mesh, put, tree_shardings
from jaxspec.weights.model import Model
from jaxspec.weights.params import params_fingerprint

TINY = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    tie_embeddings=False,
)
TINY_TEXT = dataclasses.replace(TINY, vocab_size=257)  # a token per byte, and the end of text


def make_tiny(config: ModelConfig = TINY, eos: tuple[int, ...] = (5,), seed: int = 0) -> Model:
    """A random model whose logits are wide enough apart that float32 rounding decides nothing."""
    params = Decoder(config).init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    return Model("tiny", config, params, params_fingerprint(config, params), eos)


def on_mesh(model: Model, config: MeshConfig) -> Model:
    """The model divided over virtual devices."""
    return dataclasses.replace(model, params=put(model.params, tree_shardings(make_mesh(config), model.params)))


def make_prompts(count: int, vocab_size: int = 16, seed: int = 0) -> list[list[int]]:
    """Prompts of unequal lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(1, 20)).tolist() for _ in range(count)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end-of-text token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    return wrapped


def make_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with "▁" for spaces, bytes for the rest, and a beginning token: LLaMA-2's kind, with as many tokens."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(128, 256)), *letters, "▁"]
    merges = [("▁", letter) for letter in "abcdefghijklmnopqrstuvwxyz"] + [("h", "e"), ("l", "l")]
    pieces += ["".join(pair) for pair in merges]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def make_text_model(seed: int = 0, **changes: Any) -> Model:
    """A tiny random model with a byte tokenizer; `changes` to its shapes."""
    tokenizer = make_tokenizer()
    config = dataclasses.replace(TINY_TEXT, **changes)
    return dataclasses.replace(make_tiny(config, (tokenizer.eos_token_id,), seed), tokenizer=tokenizer)


# Roles, tools and their calls, each written as it comes.
_CHAT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@functools.cache
def make_chat_model(**changes: Any) -> Model:
    """The tiny text model with a chat template that writes all that clients send."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _CHAT
    return dataclasses.replace(make_text_model(**changes), tokenizer=tokenizer)


def with_fewer_tokens(model: Model, size: int) -> Model:
    """The model without the last tokens of its vocabulary; nothing ends its texts."""
    params = model.params | {"lm_head": model.params["lm_head"][:, :size]}
    if "embedding" in params:
        params["embedding"] = params["embedding"][:size]
    config = dataclasses.replace(model.config, vocab_size=size)
    return dataclasses.replace(model, config=config, params=params, fingerprint="fewer", eos=())
