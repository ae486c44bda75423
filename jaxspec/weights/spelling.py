"""Texts of single tokens: their own bytes, of which a character may need several tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxspec.weights.pieces import byte_letters

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling:
    """The bytes that tokens stand for. What decoders do to whole texts is not done to single tokens.

    Args:
      tokenizer: the tokenizer.

    Attributes:
      special: ids of special tokens, which texts leave out.
      strips: whether a text loses the space that its first token begins with, as with sentencepiece.
      has_bytes: whether there are tokens of single bytes, for what has no token of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()  # of which the tokenizer names only some as special ones
        self.special = frozenset([*tokenizer.all_special_ids, *(token for token, about in added if about.special)])
        parts = list(_decoders(tokenizer))
        kinds = {part["type"] for part in parts}
        self._by_byte, self.has_bytes = "ByteLevel" in kinds, "ByteFallback" in kinds
        replaced = [(part["pattern"].get("String"), part["content"]) for part in parts if part["type"] == "Replace"]
        replaced += [(part["replacement"], " ") for part in parts if part["type"] == "Metaspace"]
        self._replaced = [(old, new) for old, new in replaced if old]
        self._has_decoder = bool(kinds)  # else the tokenizer decodes each token
        cut = any(part["type"] == "Strip" and part["content"] == " " and part["start"] for part in parts)
        self.strips = cut or any(part.get("prepend_scheme", "never") != "never" for part in parts)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the server
    def bytes(self, token: int) -> bytes:
        """The bytes of a token, b"" for an id that the tokenizer does not know."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if not self._has_decoder:
            return self._tokenizer.decode([token]).encode()
        if self._by_byte:
            known = _byte_of()
            return bytes(known[c] for c in name) if all(c in known for c in name) else name.encode()
        if self.has_bytes and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            name = name.replace(old, new)
        return name.encode()

    def shown(self, token: int, first: bool) -> bytes:
        """The bytes of a token within a text, or as the `first` one with text."""
        own = self.bytes(token)
        return own[1:] if first and self.strips and own.startswith(b" ") and token not in self.special else own

    def text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out, with U+FFFD for bytes that are no character."""
        text = b"".join(self.bytes(token) for token in tokens if token not in self.special).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text

    def first_space(self, tokens: Sequence[int]) -> str:
        """The space that a text of these tokens loses at its beginning, or nothing."""
        first = next((token for token in tokens if token not in self.special), None)
        return " " if self.strips and first is not None and self.bytes(first).startswith(b" ") else ""


def readable(own: bytes) -> str:
    r"""Bytes as text, or where they are no whole characters as `bytes:\xf0\x9f`."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _decoders(tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """The settings of a tokenizer's decoder, step by step; none where it has no such decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        waiting = part.get("decoders", []) + waiting
        yield part


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of byte-level tokens stands for."""
    return {letter: byte for byte, letter in enumerate(byte_letters())}
