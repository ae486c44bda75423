"""What a request must be answered, if it is certain."""

from __future__ import annotations

import dataclasses

from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.serving.chat import Chat
from jaxspec.serving.messages import encode_chat
from jaxspec.serving.protocol import Asked, Prompt, parse
from jaxspec.weights.model import Model


def certain_texts(path: str, body: bytes, model: Model, max_length: int) -> list[str] | None:
    """The text of each choice, as decoding alone writes it; None for what is sampled with no seed given.

    Prompt and answer have `max_length` tokens at most.
    """
    asked = parse(body, path.endswith("chat/completions"), 100)
    if asked.seed is None and asked.sampling.temperature:
        return None
    return [_text(asked, prompt, i, model, max_length) for prompt in asked.prompts for i in range(asked.n)]


def _text(asked: Asked, prompt: Prompt, choice: int, model: Model, max_length: int) -> str:
    """The text of a choice, up to the first text that stops it."""
    ids = encode_chat(model, prompt) if isinstance(prompt, Chat) else prompt
    ids = model.encode(ids, chat=False) if isinstance(ids, str) else ids
    base = dataclasses.replace(model, eos=()) if asked.ignore_eos else model
    length = max_length - len(ids) if asked.max_tokens is None else asked.max_tokens
    text = ""
    if length:
        settings = {"sampling": asked.sampling, "seed": (asked.seed or 0) + choice}
        text = generate(autoregressive(base), [ids], length, **settings)[0].text
    ends = [text.index(stop) for stop in asked.stop if stop in text]
    echo = (prompt if isinstance(prompt, str) else model.decode(ids)) if asked.echo else ""
    return echo + text[: min(ends, default=len(text))]
