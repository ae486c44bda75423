"""What training text is made from: prompts, or whole conversations, from JSONL files or `datasets` on the hub.

{"prompt": "..."}                                            the base answers
{"instruction": "...", "output": "..."}                      with data.answer-column: that is the answer
{"messages": [{"role": "user", "content": "..."}, ...]}      every turn of the assistant is an answer
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import DataConfig
from jaxspec.errors import UserError
from jaxspec.model.load import Model

SHIPPED_PROMPTS = Path(__file__).parent / "prompts.jsonl"
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Example:
    """What is said, and what there is to answer.

    Attributes:
      turns: of the user and of the base, the user's first and last.
      answer: what a data set has the base say; None: it says what it says.
    """

    turns: tuple[str, ...]
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class Selected:
    """An example that is used.

    Attributes:
      text: the user's last turn.
      prompt_tokens: ids of the whole prompt, chat template included.
      answer_tokens: ids of a given answer and of its end; None where the base answers.
    """

    text: str
    prompt_tokens: list[int]
    answer_tokens: list[int] | None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers and objects of a JSONL file; empty lines are skipped.

    Raises:
      UserError: the file cannot be read or a line is no JSON object; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut inside JSON strings
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        yield number, row


def read_prompts(source: str, column: str = "prompt") -> list[str]:
    """Prompts from a JSONL file, or from the train split of a `datasets` hub dataset.

    Args:
      source: a path, a hub name, or empty for the set that ships with the project.
      column: name of the field that holds the prompt.

    Raises:
      UserError: nothing there, a malformed line, or no text in that column.
    """
    prompts = []
    for where, row in _read_rows(source):
        if not isinstance(row.get(column), str):
            raise UserError(f"{where}: no text in column {column!r}; columns: {', '.join(row)}")
        prompts.append(row[column])
    return prompts


def read_examples(data: DataConfig) -> list[Example]:
    """All examples of a source, in its order.

    Raises:
      UserError: as `read_prompts`, or a conversation that cannot be read.
    """
    return [example for where, row in _read_rows(data.prompts) for example in _examples(where, row, data)]


def _read_rows(source: str) -> list[tuple[str, dict[str, Any]]]:
    """Every row with the place it is at."""
    path = Path(source) if source else SHIPPED_PROMPTS
    rows = [(f"{path}:{number}", row) for number, row in read_jsonl(path)] if path.is_file() else _read_hub(source)
    if not rows:
        raise UserError(f"{source or path}: holds no prompts")
    return rows


def _read_hub(name: str) -> list[tuple[str, dict[str, Any]]]:
    import datasets  # slow to import, and only this case needs it

    try:
        split = datasets.load_dataset(name, split="train")
    except Exception as error:  # network, name, format: all end here
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"prompts {name!r}: no such file, and not a dataset on the hub ({reason})") from None
    return [(f"dataset {name!r}, row {number}", row) for number, row in enumerate(split)]


def _examples(where: str, row: dict[str, Any], data: DataConfig) -> Iterable[Example]:
    said = row.get(data.column)
    if isinstance(said, list):
        return _conversation(where, said)
    for column in (data.column, data.answer_column):
        if column and not isinstance(row.get(column), str):
            raise UserError(f"{where}: no text in column {column!r}; columns: {', '.join(row)}")
    return [Example((said,), row[data.answer_column] if data.answer_column else None)]


def _conversation(where: str, messages: list) -> Iterator[Example]:
    """An example for every turn of the assistant; a system message goes before the user's first words."""
    system, turns = "", []
    for message in messages:
        role, text = _message(where, message)
        if role == "system" and not turns:
            system = f"{text}\n\n"
            continue
        if role != ("user", "assistant")[len(turns) % 2]:
            raise UserError(f"{where}: turns of user and assistant must alternate, the user's first; found {role}")
        if role == "assistant":
            yield Example(tuple(turns), text)
        turns.append(text if turns else system + text)


def _message(where: str, message: Any) -> tuple[str, str]:
    """Role and text of a message, {"role", "content"} or {"from", "value"}."""
    fields = message if isinstance(message, dict) else {}
    role, text = (fields.get(new, fields.get(old)) for new, old in (("role", "from"), ("content", "value")))
    if role not in _ROLES or not isinstance(text, str):
        shown = json.dumps(message, ensure_ascii=False)[:80]
        raise UserError(f"{where}: expected a message with a role ({', '.join(_ROLES)}) and a content, found {shown}")
    return _ROLES[role], text


def select_prompts(model: Model, data: DataConfig) -> list[Selected]:
    """Held-out examples, then training examples, in an order fixed by the seed.

    Those that are repeated, blank or whose prompt is too long are left out.

    Args:
      model: the base.
      data: which, and how many.

    Raises:
      UserError: unreadable or too few.
    """
    examples = [e for e in dict.fromkeys(read_examples(data)) if e.turns[-1].strip() and e.answer != ""]
    order = np.random.default_rng(data.held_out_seed).permutation(len(examples))
    chosen = []
    for index in order:
        example = examples[index]
        ids = model.encode(example.turns, data.chat)
        if 0 < len(ids) <= data.max_prompt_tokens:
            chosen.append(Selected(example.turns[-1], ids, _answer_tokens(model, example)))
        if len(chosen) == data.held_out + data.answers:
            break
    if len(chosen) <= data.held_out:
        raise UserError(
            f"{len(chosen)} prompts of at most {data.max_prompt_tokens} tokens are not enough to hold out "
            f"{data.held_out} and train on the rest; give more prompts or lower data.held-out"
        )
    return chosen


def _answer_tokens(model: Model, example: Example) -> list[int] | None:
    if example.answer is None:
        return None
    return [*model.tokenizer.encode(example.answer, add_special_tokens=False), *model.eos[:1]]
