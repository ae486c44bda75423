"""Sources of training text: prompts or whole conversations, from JSONL files or from data sets on the hub.

{"prompt": "..."}                                            the base answers
{"instruction": "...", "output": "..."}                      with data.answer-column: that is the answer
{"instruction": "...", "input": "...", ...}                  with data.context-column: the prompt is both
{"messages": [{"role": "user", "content": "..."}, ...]}      every turn of the assistant is an answer, or with
                                                             data.regenerate what the base says in its place
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import DataConfig
from jaxspec.errors import UserError
from jaxspec.weights.load import Model

SHIPPED_PROMPTS = Path(__file__).parent / "prompts.jsonl"
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt, or a conversation so far, and its answer.

    Attributes:
      turns: of the user and of the base, the user's first and last.
      answer: the given one; None: the base answers.
    """

    turns: tuple[str, ...]
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class Selected:
    """A tokenized example.

    Attributes:
      text: the user's last turn.
      prompt_tokens: ids of the whole prompt, chat template included.
      answer_tokens: ids of a given answer and of its end; None where the base answers.
    """

    text: str
    prompt_tokens: list[int]
    answer_tokens: list[int] | None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers and objects of a JSONL file, empty lines skipped; or numbers and objects of a JSON array.

    Raises:
      UserError: the file cannot be read or a line (an element) is no JSON object; names file and number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if text.lstrip().startswith("["):  # as ShareGPT and Alpaca are published
        rows = enumerate(_parse(path, 1, text), 1)
    else:
        lines = enumerate(text.split("\n"), 1)  # splitlines would cut inside JSON strings
        rows = ((number, _parse(path, number, line)) for number, line in lines if line.strip())
    for number, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        yield number, row


def _parse(path: Path, number: int, text: str) -> Any:
    """JSON that begins in that line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number + error.lineno - 1}: not JSON ({error.msg})") from None


def read_prompts(source: str, column: str = "prompt") -> list[str]:
    """Prompts from a column of a JSONL file, or of the train split of a data set on the hub.

    `source` is as `DataConfig.prompts`. Raises UserError: nothing there, a malformed line, no text in that column.
    """
    return [_text(where, row, column) for where, row in _read_rows(source)]


def read_examples(data: DataConfig) -> list[Example]:
    """All examples of a source, in its order.

    Raises:
      UserError: as `read_prompts`, a conversation that cannot be read, or two sources of answers.
    """
    if data.regenerate and data.answer_column:
        raise UserError(
            f"data.regenerate has the base answer, data.answer-column {data.answer_column!r} gives answers: set one"
        )
    return [example for where, row in _read_rows(data.prompts, data.split) for example in _examples(where, row, data)]


def _read_rows(source: str, split: str = "train") -> list[tuple[str, dict[str, Any]]]:
    """Every row, with its place for messages."""
    path = Path(source) if source else SHIPPED_PROMPTS
    if path.is_file() and split != DataConfig.split:
        raise UserError(f"data.split {split!r}: {path} is a file, which has no splits")
    if path.is_file():
        rows = [(f"{path}:{number}", row) for number, row in read_jsonl(path)]
    else:
        rows = _read_hub(source, split)
    if not rows:
        raise UserError(f"{source or path}: holds no prompts")
    return rows


def _read_hub(source: str, split: str) -> list[tuple[str, dict[str, Any]]]:
    import datasets  # slow to import, and only this case needs it

    name, _, config = source.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # network, name, config, split, format: all end here
        reason = " ".join(str(error).split("\n")[:2])  # the second line of a missing config lists those there are
        raise UserError(
            f"prompts {source!r}: no such file, and could not be loaded from the hub as owner/name:config with split "
            f"{split!r} ({reason})"
        ) from None
    return [(f"dataset {source!r}, row {number}", row) for number, row in enumerate(rows)]


def _examples(where: str, row: dict[str, Any], data: DataConfig) -> Iterable[Example]:
    said = row.get(data.column)
    if isinstance(said, list):
        return _conversation(where, said, data.regenerate)
    parts = [_text(where, row, data.column)]
    if data.context_column and row.get(data.context_column, "") is not None:
        parts.append(_text(where, row, data.context_column))
    answer = _text(where, row, data.answer_column) if data.answer_column else None
    return [Example(("\n\n".join(filter(str.strip, parts)),), answer)]


def _text(where: str, row: dict[str, Any], column: str) -> str:
    if not isinstance(row.get(column), str):
        raise UserError(f"{where}: no text in column {column!r}; columns: {', '.join(row)}")
    return row[column]


def _conversation(where: str, messages: list, regenerate: bool) -> Iterator[Example]:
    """An example per turn of the assistant, or with `regenerate` per turn of the user."""
    system, turns = "", []
    for role, text in (_message(where, message) for message in messages):
        if not turns and role != "user":
            system += f"{text}\n\n" if role == "system" else ""
            continue
        if role != ("user", "assistant")[len(turns) % 2]:
            return
        if role == "assistant" and not regenerate:
            yield Example(tuple(turns), text)
        turns.append(text if turns else system + text)
        if role == "user" and regenerate:
            yield Example(tuple(turns))


def _message(where: str, message: Any) -> tuple[str, str]:
    """Role and text of a message, {"role", "content"} or {"from", "value"}."""
    fields = message if isinstance(message, dict) else {}
    role, text = (fields.get(new, fields.get(old)) for new, old in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or not isinstance(text, str):
        raise UserError(f"{where}: expected a message with a role and a content, found {str(message)[:80]}")
    return _ROLES.get(role, role), text


def select_prompts(model: Model, data: DataConfig) -> list[Selected]:
    """Held-out examples, then training examples, in an order fixed by the seed.

    Repeated and blank ones and those with too long a prompt are left out. Those that begin alike are on one side.

    Raises:
      UserError: unreadable or too few, or some of them with an answer and some without.
    """
    examples = [e for e in dict.fromkeys(read_examples(data)) if e.turns[-1].strip() and e.answer != ""]
    if len({example.answer is None for example in examples}) > 1:
        raise UserError(f"{data.prompts}: some rows hold a conversation and some a prompt alone; give one kind")
    alike: dict[str, list[Example]] = {}  # by how the conversation begins
    for example in examples:
        alike.setdefault(example.turns[0], []).append(example)
    groups, held_out, chosen, left_out = list(alike.values()), [], [], 0
    for index in np.random.default_rng(data.held_out_seed).permutation(len(groups)):
        side = held_out if len(held_out) < data.held_out else chosen
        selected = [_select(model, data, example) for example in groups[index]]
        side += [s for s in selected if 0 < len(s.prompt_tokens) <= data.max_prompt_tokens]
        left_out += sum(len(s.prompt_tokens) > data.max_prompt_tokens for s in selected)
        if len(chosen) >= data.answers:
            break
    if left_out:
        print(f"left out, more than {data.max_prompt_tokens} tokens: {left_out} prompts", file=sys.stderr)
    if not chosen:
        raise UserError(
            f"{len(held_out)} prompts of at most {data.max_prompt_tokens} tokens are not enough to hold out "
            f"{data.held_out} and train on the rest; give more prompts or lower data.held-out"
        )
    return held_out[: data.held_out] + chosen[: data.answers]


def unseen_prompts(model: Model, trained_on: Mapping[str, Any], source: str, column: str = "prompt") -> list[str]:
    """Prompts that an adapter was not trained on: those held out if this was its source, else all of `read_prompts`.

    Args:
      model: the base.
      trained_on: settings of the adapter's training data, as its file holds them under `data`.
      source: of prompts, as `read_prompts` takes it.
      column: name of the field that holds the prompt.

    Raises:
      UserError: as `read_prompts` and `select_prompts`.
    """
    if trained_on.get("prompts") != Path(source).name:  # both are empty for the set that ships
        return read_prompts(source, column)
    known = {field.name for field in dataclasses.fields(DataConfig)} - {"prompts", "cache"}
    data = DataConfig(source, **{name: value for name, value in trained_on.items() if name in known})
    return [selected.text for selected in select_prompts(model, data)[: data.held_out]]


def _select(model: Model, data: DataConfig, example: Example) -> Selected:
    """Tokenize an example; without a chat template a blank line comes before a given answer."""
    *turns, last = example.turns
    if example.answer is None:
        return Selected(last, model.encode(example.turns, data.chat), None)
    templated = data.chat and model.tokenizer.chat_template
    prompt = model.encode([*turns, last if templated else f"{last}\n\n"], data.chat)
    own = model.tokenizer.eos_token_id  # which in a chat model ends a turn, unlike other ends of text
    end = [own] if own in model.eos else model.eos[:1]
    return Selected(last, prompt, [*model.tokenizer.encode(example.answer, add_special_tokens=False), *end])
