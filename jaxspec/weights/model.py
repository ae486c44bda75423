"""A base that is loaded: its decoder, its weights in every layout, and how text becomes tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError
from jaxspec.model.base import Base
from jaxspec.model.blocks import least_rows
from jaxspec.model.decoder import Decoder
from jaxspec.model.quantized import form_of, is_quantized
from jaxspec.parallel.sharding import mesh_of
from jaxspec.weights.layouts import Copies, Layouts, block_for, in_blocks, kernels_by_shape, read_layouts
from jaxspec.weights.spelling import Spelling
from jaxspec.weights.templates import chosen_template, own_template


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A base: what it is, its weights, and how text becomes tokens.

    Attributes:
      name: as the user gave it.
      config: shapes and constants.
      params: the frozen parameters, a nested dict.
      fingerprint: names these weights; an adapter remembers the fingerprint of its base.
      eos: ids that end a text, whichever of its files or its tokenizer's chat template says so; empty: only the length
        does.
      tokenizer: None for a model without one (tests).
      exact: compute in float32 with weights in bfloat16 (see `product`).
    """

    name: str
    config: ModelConfig
    params: dict
    fingerprint: str
    eos: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    exact: bool = False
    _bases: dict[tuple[int, ...], Base] = dataclasses.field(default_factory=dict, init=False)  # by `base_for`'s blocks
    _copies: Copies = dataclasses.field(default_factory=dict, init=False)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The Flax module that `params` belong to."""
        return Decoder(self.config, exact=self.exact, least_rows=least_rows(jax.default_backend()))

    @functools.cached_property
    def base(self) -> Base:
        """Decoder and parameters as loaded: for many rows at once, as in training and with large trees or batches."""
        return Base(self.params, self.decoder)

    @functools.cached_property
    def on_one_cpu(self) -> bool:
        """Whether the layout of its kernels matters."""
        return jax.default_backend() == "cpu" and mesh_of(self.params) is None

    @functools.cached_property
    def layouts(self) -> Layouts:
        """The layouts that `jaxspec tune` has measured on this machine."""
        return read_layouts(self.precision)

    def block_for(self, rows: int, shape: tuple[int, int]) -> int:
        """Columns per block of a kernel [in, out] that is fastest with that many rows; 0 for a plain one."""
        return block_for(self.layouts, rows, shape) if self.on_one_cpu else 0

    def base_for(self, rows: int) -> Base:
        """The base for passes of that many rows, of a whole batch together, every kernel in its fastest layout.

        A kernel is copied once for each layout but the plain one; where all are plain it is `base`.
        """
        blocks = {shape: self.block_for(rows, shape) for shape in self._shapes}
        key = tuple(blocks.values())
        if key not in self._bases:
            params = in_blocks(self.params, blocks.__getitem__, made=self._copies)
            self._bases[key] = self.base if params is self.params else Base(params, self.decoder)
        return self._bases[key]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, int]]:
        return list(kernels_by_shape(self.params))

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the weights (norms are float32), or that which quantized ones stand in for."""
        return self.params["lm_head"].dtype

    @property
    def loaded_dtype(self) -> str:
        """The one of `DTYPES` that it was loaded in."""
        return "exact" if self.exact else str(self.dtype)

    @functools.cached_property
    def weights(self) -> str:
        """The forms of its kernels, as `quantized.form_of` names them, joined by +; empty where all are floats."""
        kernels = jax.tree.leaves(self.params, is_leaf=is_quantized)
        return "+".join(sorted({form_of(kernel) for kernel in kernels} - {""}))

    @property
    def precision(self) -> str:
        """What it was loaded in, `loaded_dtype` and `weights`: what was measured with one does not hold for others."""
        return f"{self.loaded_dtype} {self.weights}".rstrip()

    def encode(self, prompt: str | Sequence[str], chat: bool = True, template: str = "") -> list[int]:
        """Token ids of a prompt, or of a conversation: turns of the user and of the base, the user's first and last.

        They come inside the chat template where `chat` and the tokenizer has one, else with blank lines between.
        Another `template`, as `load_model` takes it, takes the place of the tokenizer's.
        Raises UserError for a template that makes no sense and for text that is no valid Unicode: bytes of another
        encoding, or JSON's half pairs.
        """
        turns = [prompt] if isinstance(prompt, str) else prompt
        for turn in turns:
            _check_unicode(turn)
        written = chosen_template(template, self.tokenizer) if template else own_template(self.tokenizer)
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return self.encode_messages(messages, written if chat else None)

    def encode_messages(self, messages: Sequence[dict[str, Any]], template: str | None, **settings: Any) -> list[int]:
        """Token ids of messages, role and content of each: inside a chat template, or with blank lines between.

        `settings` are of `apply_chat_template`. A template that refuses them raises what it likes.
        """
        settings = {"add_generation_prompt": True} | settings
        if template:
            ids = self.tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False, **settings)
        else:
            ids = self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return _begun_once(_begun_once(ids, [self.tokenizer.bos_token_id]), self._begin)

    @functools.cached_property
    def _begin(self) -> list[int]:
        """Special tokens that the tokenizer puts before a text: of ChatGLM's two."""
        known = self.tokenizer.added_tokens_decoder
        return [i for i in self.tokenizer.encode("") if i in known and known[i].special]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text of any length as it is, without special tokens. Raises UserError as `encode`."""
        _check_unicode(text)
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, tokens: list[int], continues: bool = False) -> str:
        """Text of token ids, special tokens left out, with U+FFFD for bytes that are no character.

        With `continues` they continue other text, so that their leading space is kept.

        Decoders with tokens of single bytes write U+FFFD for all bytes next to one that is wrong, those of whole
        characters, too: then the text of some tokens would not be the beginning of that of more tokens.
        """
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        text = self.spelling.text(tokens) if "\ufffd" in text and self.spelling.has_bytes else text
        return self.spelling.first_space(tokens) + text if continues else text

    @functools.cached_property
    def spelling(self) -> Spelling:
        """Bytes and texts of single tokens."""
        return Spelling(self.tokenizer)


def _begun_once(ids: list[int], begin: list[int]) -> list[int]:
    """Without the tokenizer's beginning where the text, or its template, begins with one of its own."""
    while begin and ids[: 2 * len(begin)] == 2 * begin:
        ids = ids[len(begin) :]
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text[:40]!r}: not valid Unicode; give it in UTF-8") from None
