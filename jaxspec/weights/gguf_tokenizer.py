"""The tokenizer that the metadata of a GGUF file describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxspec.errors import UserError, first_line
from jaxspec.weights.pieces import DIGIT_TRIPLES, SINGLE_DIGITS, all_merges, as_sentencepiece, split_by

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format
_SPECIAL = ("bos", "eos", "eot", "eom", "unknown")
Get = Callable[..., Any]  # of a key, and of a default


def build_tokenizer(get: Get, where: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a file, with its chat template.

    Args:
      get: a value of the metadata by its key, and a default for one that is missing.
      where: the file, for messages.

    Raises:
      UserError: a tokenizer model or pre-tokenizer that is not known here, or tokens that do not fit each other.
    """
    tokens, kind = _texts(get, "tokens", where), get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise UserError(f"{where}: tokenizer model {kind!r:.60} is not supported; supported: gpt2, llama")
    special = {name: _token_id(get, name, tokens, where) for name in _SPECIAL}
    tokenizer = build(tokens, get, where)
    types = get("tokenizer.ggml.token_type") or [0] * len(tokens)
    if not isinstance(types, list):
        raise UserError(f"{where}: tokenizer.ggml.token_type must be a list of numbers, got {types!r:.60}")
    if len(types) != len(tokens):
        raise UserError(f"{where}: {len(tokens)} tokens, and tokenizer.ggml.token_type is of {len(types)}")
    types = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, type in types if type == _CONTROL])
    tokenizer.add_tokens([AddedToken(token) for token, type in types if type == _USER_DEFINED])
    bos, eos, unknown = (None if special[name] is None else tokens[special[name]] for name in ("bos", "eos", "unknown"))
    usual = kind == "llama" or get("tokenizer.ggml.pre") == "llama-bpe"  # LLaMA, up to 2 and from 3 on
    if bos is not None and get("tokenizer.ggml.add_bos_token", usual):
        begin = [(bos, special["bos"])]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
        chat_template=get("tokenizer.chat_template"),
    )


def _texts(get: Get, name: str, where: str) -> list[str]:
    """A list of texts in the metadata. Raises UserError for anything else."""
    texts = get(f"tokenizer.ggml.{name}", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: tokenizer.ggml.{name} must be a list of texts, got {texts!r:.60}")
    return texts


def _token_id(get: Get, name: str, tokens: list[str], where: str) -> int | None:
    """The id of a special token; None where there is none. Raises UserError for one outside the vocabulary."""
    number = get(f"tokenizer.ggml.{name}_token_id")
    if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
        raise UserError(f"{where}: special token {number!r:.60} ({name}) is outside the vocabulary of {len(tokens)}")
    return number


def _byte_level_bpe(tokens: list[str], get: Get, where: str) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in _texts(get, "merges", where)]
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
    if not isinstance(pre, str) or pre not in steps:
        raise UserError(f"{where}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(steps)}")
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(ids, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # of the library: a merge of no two tokens, or to none
        raise UserError(f"{where}: tokenizer.ggml.merges do not fit its tokens: {first_line(error)}") from None
    tokenizer = Tokenizer(model)
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
