"""Tokenizers of checkpoints that came with code of their own, built from their files; none of that code is run."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizerFast

from jaxspec.errors import UserError
from jaxspec.files import read_json
from jaxspec.weights.pieces import SINGLE_DIGITS, Pieces, ranked_bytes, read_tiktoken

_ROLES = ("system", "user", "assistant", "observation")
_CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *(f"<|{role}|>" for role in _ROLES))
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def remote_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a folder by the published class that tokenizer_config.json names.

    A tokenizer.json says all that such a class does. None for what came without code of its own.

    Raises:
      UserError: a class that is not among the known ones, or a file that is missing or is another one.
    """
    file = folder / "tokenizer_config.json"
    content = read_json(file) if file.exists() else {}
    kind, own_code = str(content.get("tokenizer_class")), content.get("auto_map")
    if kind not in _CLASSES and not own_code:
        return None
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    if kind not in _CLASSES:
        known = ", ".join(_CLASSES)
        raise UserError(
            f"{file}: tokenizer_class {kind!r:.80} comes with code of its own, which is not run; known are {known}, or "
            "bring a tokenizer.json"
        )
    name, build = _CLASSES[kind]
    if not (folder / name).exists():
        raise UserError(f"{folder}: {name} is missing, from which the tokenizer is made")
    tokenizer, names = build(folder / name, content)
    template = folder / "chat_template.jinja"  # where transformers writes it today
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text("utf-8") if template.exists() else content.get("chat_template"),
        **names,
    )


def _internlm(file: Path, content: dict) -> tuple[Tokenizer, dict[str, str]]:
    """Texts begin with <s>."""
    tokenizer = Pieces.read(file).tokenizer(_added(file, content))
    if content.get("add_bos_token", True):
        _begin_with(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _chatglm(file: Path, content: dict) -> tuple[Tokenizer, dict[str, str]]:
    """Texts begin with [gMASK] and sop, which come with the roles behind the pieces."""
    pieces = Pieces.read(file)
    behind = {
        len(pieces.names) + i: AddedToken(token, special=True, normalized=False) for i, token in enumerate(_CHATGLM)
    }
    tokenizer = pieces.tokenizer(behind)
    _begin_with(tokenizer, "[gMASK]", "sop")
    return tokenizer, {"eos_token": "</s>", "unk_token": "<unk>"}


def _qwen(file: Path, content: dict) -> tuple[Tokenizer, dict[str, str]]:
    """Nothing is put before a text."""
    tokenizer = ranked_bytes(read_tiktoken(file), SINGLE_DIGITS, _QWEN)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer, {"eos_token": "<|endoftext|>"}


_CLASSES = {  # by the class's name, the file that it reads, and how it is built from that
    "InternLMTokenizer": ("tokenizer.model", _internlm),
    "InternLM2Tokenizer": ("tokenizer.model", _internlm),
    "InternLM2TokenizerFast": ("tokenizer.model", _internlm),
    "ChatGLMTokenizer": ("tokenizer.model", _chatglm),
    "QWenTokenizer": ("qwen.tiktoken", _qwen),
}


def _added(file: Path, content: dict) -> dict[int, AddedToken]:
    """Tokens that tokenizer_config.json puts in the place of pieces, or behind them."""
    added = {}
    try:
        for i, token in (content.get("added_tokens_decoder") or {}).items():
            added[int(i)] = AddedToken(token["content"], special=bool(token.get("special")), normalized=False)
    except (AttributeError, KeyError, TypeError, ValueError):
        where = file.with_name("tokenizer_config.json")
        raise UserError(f"{where}: added_tokens_decoder must be tokens by id, each with its content") from None
    return added


def _begin_with(tokenizer: Tokenizer, *tokens: str) -> None:
    begin, ids = " ".join(tokens), [(token, tokenizer.token_to_id(token)) for token in tokens]
    tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A $B:1", ids)
