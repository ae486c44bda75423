"""Prompts as texts or ids, checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError
from jaxspec.weights.model import Model


class TooLong(UserError):
    """A prompt that leaves no room for its answer.

    Args:
      message: the sentence for people.
      length: tokens of the prompt.
    """

    def __init__(self, message: str, length: int):
        super().__init__(message)
        self.length = length


def pad_tokens(sequences: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, width] int32, padded on the right with 0, and their lengths [B] int32."""
    tokens = np.zeros((len(sequences), width), np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in sequences], np.int32)


def encode_prompts(
    model: Model, prompts: Sequence[str | Sequence[int]], max_new_tokens: int, chat: bool, max_length: int | None
) -> list[list[int]]:
    """Token ids of prompts, all of them checked before anything is decoded.

    Args:
      model: the base.
      prompts: texts, or ids.
      max_new_tokens: room to leave behind each.
      chat: wrap texts in the chat template, where the tokenizer has one.
      max_length: longest prompt and answer together, in tokens; None: the base's context.

    Raises:
      UserError: no list, limits that make no sense, or a prompt that is empty, holds an id outside the vocabulary or
        does not fit; says which.
    """
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of prompts, got one text")
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be at least 1, got {max_new_tokens}")
    longest = model.config.max_positions if max_length is None else max_length
    if not 2 <= longest <= model.config.max_positions:
        raise UserError(f"max-length must be between 2 and the base's {model.config.max_positions}, got {longest}")
    room, encoded = longest - max_new_tokens, []
    for number, prompt in enumerate(prompts, 1):
        name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        blank = isinstance(prompt, str) and not prompt.strip()
        ids = [] if blank else model.encode(prompt, chat) if isinstance(prompt, str) else [int(i) for i in prompt]
        if not ids:
            raise UserError(f"{name} is empty")
        if not all(0 <= i < model.config.vocab_size for i in ids):
            raise UserError(f"{name} holds a token id outside the vocabulary of {model.config.vocab_size}")
        if len(ids) > room:
            told = _too_long(model, len(ids), max_new_tokens, longest)
            raise TooLong(f"{name} has {len(ids)} tokens: {told}", len(ids))
        encoded.append(ids)
    return encoded


def encode_predictions(
    drafter: Drafter, prediction: str | Sequence[str | Sequence[int] | None] | None, prompts: int
) -> list[list[int]] | None:
    """Token ids of what the user expects of the answer to each prompt, empty where nothing; None for no prediction.

    Args:
      drafter: what is to draft from it.
      prediction: one text for all prompts, or for each a text, ids or None.
      prompts: how many there are.

    Raises:
      UserError: nothing in the drafter looks it up, or it makes no sense; says which.
    """
    if prediction is None:
        return None
    if not drafter.follows_prediction:
        lookups = "add a lookup, as in --method prompt_lookup or --method medusa+suffix"
        raise UserError(f"prediction: {drafter.name} does not draft from a predicted text: {lookups}")
    each = [prediction] * prompts if isinstance(prediction, str) else list(prediction)
    if len(each) != prompts:
        raise UserError(f"prediction: give one text, or one per prompt: got {len(each)} for {prompts} prompts")
    model = drafter.model
    encoded = [model.encode_plain(one) if isinstance(one, str) else [int(i) for i in one or ()] for one in each]
    if not all(0 <= i < model.config.vocab_size for ids in encoded for i in ids):
        raise UserError(f"prediction: a token id is outside the vocabulary of {model.config.vocab_size}")
    return encoded


def pad_predictions(predictions: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Predicted texts as `Method.expect` takes them, [B, width] int32; at least two more than the longest."""
    tokens = np.full((len(predictions), width), -1, np.int32)
    for row, ids in enumerate(predictions):
        tokens[row, 1 : 1 + len(ids)] = ids
    return tokens


def _too_long(model: Model, length: int, max_new_tokens: int, longest: int) -> str:
    """The limit that a prompt of that length exceeds with its answer, and advice."""
    context = model.config.max_positions
    lower = f"lower max-new-tokens to {longest - length}" if length < longest else "shorten it"
    if longest == context:
        return f"with {max_new_tokens} new ones it exceeds the base's context of {context}; {lower}"
    more = f"raise it to {length + max_new_tokens} or " if length + max_new_tokens <= context else ""
    return f"with {max_new_tokens} new ones it exceeds max-length, {longest}; {more}{lower}"


def as_text(model: Model, prompt: str | Sequence[int]) -> str:
    """A prompt in words: ids are decoded, or listed where there is no tokenizer."""
    if isinstance(prompt, str):
        return prompt
    return model.decode(list(prompt)) if model.tokenizer else str(list(prompt))
