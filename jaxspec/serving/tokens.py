"""Tokens of prompts and texts of tokens, as the paths /tokenize and /detokenize of vLLM give them."""

from __future__ import annotations

from typing import Any

from jaxspec.serving.chat import parse_chat
from jaxspec.serving.fields import ApiError, Fields, read_json
from jaxspec.serving.messages import encode_chat
from jaxspec.weights.model import Model

_COMMON = {"model", "add_special_tokens", "return_token_strs"}
_TEXT = _COMMON | {"prompt"}
_CHAT = _COMMON | {"messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt"}


def parse_tokens(body: bytes) -> tuple[Fields, bool]:
    """Fields of a request for tokens, and whether it is of a chat. Raises ApiError for unknown fields."""
    content = read_json(body)
    chat = "messages" in content
    return Fields(content, _CHAT if chat else _TEXT), chat


def tokenize(fields: Fields, chat: bool, model: Model) -> dict[str, Any]:
    """Number, ids and if asked for names of the tokens of a text or of a chat. Raises ApiError as `parse_tokens`."""
    special = fields.flag("add_special_tokens", not chat)
    if chat:
        if special:
            raise ApiError(400, "add_special_tokens: a chat template has its own", "add_special_tokens")
        asked = parse_chat(fields)
        opens = {"add_generation_prompt": fields.flag("add_generation_prompt", True)}
        ids = encode_chat(model, asked.with_variables(opens))
    else:
        prompt = fields.take("prompt", str, "a string")
        if prompt is None:
            raise ApiError(400, "prompt is missing; or give messages", "prompt")
        ids = model.encode(prompt, chat=False) if special else model.encode_plain(prompt)
    named = fields.flag("return_token_strs")
    return {
        "count": len(ids),
        "tokens": ids,
        "token_strs": model.tokenizer.convert_ids_to_tokens(ids) if named else None,
    }


def detokenize(body: bytes, model: Model) -> tuple[Fields, dict[str, Any]]:
    """The fields of a request for the text of tokens, and the text, special tokens included. Raises ApiError."""
    fields = Fields(read_json(body), {"model", "tokens"})
    ids = fields.take("tokens", list, "a list of token ids")
    if ids is None:
        raise ApiError(400, "tokens is missing", "tokens")
    size = model.config.vocab_size
    if not all(type(i) is int and 0 <= i < size for i in ids):
        raise ApiError(400, f"tokens must be ids from 0 to {size - 1}", "tokens")
    return fields, {"prompt": model.tokenizer.decode(ids)}
