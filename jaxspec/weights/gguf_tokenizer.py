"""The tokenizer that the metadata of a GGUF file describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxspec.errors import UserError
from jaxspec.weights.pieces import DIGIT_TRIPLES, SINGLE_DIGITS, all_merges, as_sentencepiece, split_by

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format
Get = Callable[..., Any]  # of a key, and of a default


def build_tokenizer(get: Get, where: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a file, with its chat template.

    Args:
      get: a value of the metadata by its key, and a default for one that is missing.
      where: the file, for messages.

    Raises:
      UserError: a tokenizer model or pre-tokenizer that is not known here, or tokens that do not fit each other.
    """
    tokens, kind = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}.get(kind)
    if build is None:
        raise UserError(f"{where}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    tokenizer = build(tokens, get, where)
    types = get("tokenizer.ggml.token_type") or [0] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{where}: {len(tokens)} tokens, and tokenizer.ggml.token_type is of {len(types)}")
    types = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, type in types if type == _CONTROL])
    tokenizer.add_tokens([AddedToken(token) for token, type in types if type == _USER_DEFINED])
    ids = [get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown")]
    if outside := [number for number in ids if number is not None and not 0 <= number < len(tokens)]:
        raise UserError(f"{where}: special token {outside[0]} is outside the vocabulary of {len(tokens)}")
    bos, eos, unknown = (None if number is None else tokens[number] for number in ids)
    usual = kind == "llama" or get("tokenizer.ggml.pre") == "llama-bpe"  # LLaMA, up to 2 and from 3 on
    if bos is not None and get("tokenizer.ggml.add_bos_token", usual):
        begin = [(bos, ids[0])]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
        chat_template=get("tokenizer.chat_template"),
    )


def _byte_level_bpe(tokens: list[str], get: Get, where: str) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in get("tokenizer.ggml.merges", [])]
    pre = get("tokenizer.ggml.pre", "default")
    steps = {
        "default": [pre_tokenizers.ByteLevel(False)],
        "gpt-2": [pre_tokenizers.ByteLevel(False)],
        "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)],
        "refact": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)],  # Granite's
        "llama-bpe": split_by(DIGIT_TRIPLES),
        "dbrx": split_by(DIGIT_TRIPLES),  # Phi-4's and OLMo 2's
        "qwen2": split_by(SINGLE_DIGITS),
    }
    if pre not in steps:
        raise UserError(f"{where}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(steps)}")
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(tokens: list[str], get: Get, where: str) -> Tokenizer:
    """LLaMA-2's tokenizer: the merges follow from the pieces, in the order of their ids."""
    ids = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(ids, all_merges(ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return as_sentencepiece(model, (), get("tokenizer.ggml.add_space_prefix", True))
