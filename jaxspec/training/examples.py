"""Sources of training text: prompts or whole conversations, from JSONL files or from data sets on the hub, or several.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import UserError
from jaxspec.files import display_name, parse_json, read_text
from jaxspec.training.settings import DataConfig, TextSource
from jaxspec.weights.model import Model
from jaxspec.weights.templates import chosen_template, message_text, own_template, turn_end

SHIPPED_PROMPTS = Path(__file__).parent / "prompts.jsonl"
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_ROLES |= {"system": "system", "developer": "system"}


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt, or a conversation so far, and its answer.

    Attributes:
      turns: messages of the user and of the assistant in turn; the first and the last are the user's.
      answer: the given answer; None: the base answers.
    """

    turns: tuple[str, ...]
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class Selected:
    """A tokenized example.

    Attributes:
      text: the user's last turn.
      prompt_tokens: ids of the complete prompt, chat template included.
      answer_tokens: ids of a given answer, with its end-of-text token; None where the base answers.
    """

    text: str
    prompt_tokens: list[int]
    answer_tokens: list[int] | None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers and objects of a JSONL file, empty lines skipped; or numbers and objects of a JSON array.

    Raises:
      UserError: the file cannot be read or a line (an element) is no JSON object; names file and number.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):  # the format of ShareGPT and Alpaca
        rows = enumerate(_parse(path, 1, text), 1)
    else:
        lines = enumerate(text.split("\n"), 1)  # splitlines would cut inside JSON strings
        rows = ((number, _parse(path, number, line)) for number, line in lines if line.strip())
    for number, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        yield number, row


def _parse(path: Path, number: int, text: str) -> Any:
    """Parse JSON that begins in that line of a file."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number + error.lineno - 1}: not JSON ({error.msg}: column {error.colno})") from None
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON that can be read ({error})") from None


def read_prompts(source: str, column: str = "prompt") -> list[str]:
    """Prompts from a column of a JSONL file, or of the train split of a data set on the hub.

    `source` is as in `DataConfig.prompts`. Raises UserError for a source that cannot be read, a malformed line, or a
    row without text in that column; names the row.
    """
    return [_prompt(where, row, column) for where, row in _read_rows(source)]


def read_examples(source: TextSource) -> list[Example]:
    """All examples of a source, in the source's order.

    Raises:
      UserError: as `read_prompts`, a conversation that cannot be read, or two origins of answers.
    """
    if source.regenerate and source.answer_column:
        raise UserError(
            f"data.regenerate has the base answer, data.answer-column {source.answer_column!r} gives answers: set one "
            f"for {source.prompts!r}"
        )
    rows = _read_rows(source.prompts, source.split)
    return [example for where, row in rows for example in _examples(where, row, source)]


def _read_rows(source: str, split: str = "train") -> list[tuple[str, dict[str, Any]]]:
    """Every row, with its place in the source, for messages."""
    path = Path(source) if source else SHIPPED_PROMPTS
    if path.is_file() and split != TextSource.split:
        raise UserError(f"data.split {split!r}: {path} is a file, which has no splits")
    if path.is_file():
        rows = [(f"{path}:{number}", row) for number, row in read_jsonl(path)]
    elif path.suffix in (".jsonl", ".json"):
        raise UserError(f"prompts {source!r}: no such file")
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


def _examples(where: str, row: dict[str, Any], source: TextSource) -> Iterable[Example]:
    said = row.get(source.column)
    if isinstance(said, list):
        return _conversation(where, said, source.regenerate)
    parts = [row_text(where, row, source.column)]
    if source.context_column and row.get(source.context_column, "") is not None:
        parts.append(row_text(where, row, source.context_column))
    answer = row_text(where, row, source.answer_column) if source.answer_column else None
    return [Example(("\n\n".join(filter(str.strip, parts)),), answer)]


def _prompt(where: str, row: dict[str, Any], column: str) -> str:
    """A text that can be answered."""
    text = row_text(where, row, column)
    if not text.strip():
        raise UserError(f"{where}: the prompt in column {column!r} is empty; remove that row")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: not valid Unicode in column {column!r}") from None
    return text


def row_text(where: str, row: dict[str, Any], column: str) -> str:
    """The text in a column. Raises UserError where there is none; `where` names the row."""
    if column not in row:
        raise UserError(f"{where}: no column {column!r}, name one of those there are: {', '.join(row)}")
    if not isinstance(row[column], str):
        raise UserError(f"{where}: column {column!r} must hold a text, got {json.dumps(row[column], default=str)[:80]}")
    return row[column]


def _conversation(where: str, messages: list, regenerate: bool) -> Iterator[Example]:
    """One example per turn of the assistant, or with `regenerate` per turn of the user."""
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
    """Role and text of a message, {"role", "content"} or {"from", "value"}; a text may come in parts."""
    fields = message if isinstance(message, dict) else {}
    role, text = (fields.get(new, fields.get(old)) for new, old in (("role", "from"), ("content", "value")))
    text = message_text(text)
    if not isinstance(role, str) or text is None:
        raise UserError(f"{where}: expected a message with a role and a content of text, found {str(message)[:80]}")
    return _ROLES.get(role, role), text


def select_prompts(model: Model, data: DataConfig) -> list[Selected]:
    """Held-out examples, then training examples, in an order fixed by the seed.

    Repeated and blank examples and those with too long a prompt are left out. Examples that begin alike are all held
    out or all trained on. Both parts of a mixture have the same shares.

    Raises:
      UserError: unreadable or too few, or some of them with an answer and some without.
    """
    too_long: list[Selected] = []
    queues = [_in_order(model, data, groups, too_long) for groups in _read_groups(data.text_sources)]
    weights = [source.weight for source in data.text_sources]
    held_out = _mix(queues, weights, data.held_out)
    chosen = _mix(queues, weights, data.answers)
    if too_long:
        print(f"left out, more than {data.max_prompt_tokens} tokens: {len(too_long)} prompts", file=sys.stderr)
    if len(queues) > 1:
        numbers = [number for number, _ in chosen]
        named = (f"{numbers.count(i)} from {source.prompts!r}" for i, source in enumerate(data.text_sources))
        print(f"mixture: {', '.join(named)}", file=sys.stderr)
    if len(held_out) < data.held_out or not chosen:
        raise UserError(
            f"{len(held_out)} prompts of at most {data.max_prompt_tokens} tokens are not enough to hold out "
            f"{data.held_out} and train on the rest; give more prompts or lower --data.held-out"
        )
    return [selected for _, selected in held_out + chosen]


def check_files(data: DataConfig) -> None:
    """Raise UserError for a file of a mixture that is not there, before anything large is read."""
    for number, source in enumerate(data.mixture):
        is_file = source.prompts.endswith((".json", ".jsonl"))
        if is_file and source in data.text_sources and not Path(source.prompts).is_file():
            raise UserError(
                f"{source.prompts}: no such file; put it there, or do without it: --data.mixture.{number}.weight 0"
            )


def _read_groups(sources: Sequence[TextSource]) -> list[list[list[Example]]]:
    """Groups of examples that begin alike, by source; examples of several sources belong to the first one."""
    groups: dict[str, tuple[int, dict[Example, None]]] = {}
    for number, source in enumerate(sources):
        for example in read_examples(source):
            if example.turns[-1].strip() and example.answer != "":
                owner, group = groups.setdefault(example.turns[0], (number, {}))
                if owner == number:
                    group[example] = None
    if len({example.answer is None for _, group in groups.values() for example in group}) > 1:
        names = ", ".join(source.prompts for source in sources)
        raise UserError(f"{names}: some rows have a conversation or an answer and some a prompt alone; give one kind")
    return [[list(group) for owner, group in groups.values() if owner == number] for number in range(len(sources))]


def _in_order(
    model: Model, data: DataConfig, groups: list[list[Example]], too_long: list[Selected]
) -> Iterator[list[Selected]]:
    """Groups in an order fixed by the seed, every example under every template, without those that are too long."""
    templates = data.templates if data.chat and data.templates else ("",)
    for index in np.random.default_rng(data.held_out_seed).permutation(len(groups)):
        selected = [_select(model, data, example, name) for example in groups[index] for name in templates]
        too_long += [s for s in selected if len(s.prompt_tokens) > data.max_prompt_tokens]
        yield [s for s in selected if 0 < len(s.prompt_tokens) <= data.max_prompt_tokens]


def _mix(
    queues: Sequence[Iterator[list[Selected]]], weights: Sequence[float], count: int
) -> list[tuple[int, Selected]]:
    """The next `count` examples, with the numbers of their queues: always from the queue furthest behind its share.

    No queue gives more than its share: when one runs out, there are fewer examples, and none is repeated.
    """
    shares = [count * weight / sum(weights) for weight in weights]
    waiting, taken, chosen = set(range(len(queues))), [0] * len(queues), []
    while waiting := {number for number in waiting if taken[number] < shares[number]}:
        number = min(waiting, key=lambda number: (taken[number] / weights[number], number))
        if (group := next(queues[number], None)) is None:
            waiting.remove(number)
        else:
            taken[number] += len(group)
            chosen += [(number, selected) for selected in group]
    return chosen[:count]


def unseen_prompts(model: Model, trained_on: Mapping[str, Any], source: str, column: str = "prompt") -> list[str]:
    """Prompts that an adapter was not trained on: the held-out ones if this was its source, else all of `read_prompts`.

    Each held-out prompt occurs once, however many templates or answers it has.

    Args:
      model: the base.
      trained_on: settings of the adapter's training data, as its file holds them under `data`.
      source: source of prompts, as in `read_prompts`.
      column: name of the field that holds the prompt.

    Raises:
      UserError: as `read_prompts` and `select_prompts`, or the source is one of a mixture, whose held-out prompts
        depend on all its sources.
    """
    name, mixture = display_name(source), trained_on.get("mixture") or ()
    if name in (part["prompts"] for part in mixture):
        raise UserError(f"{source}: the adapter was trained on a mixture that has it; give prompts it has not seen")
    if mixture or trained_on.get("prompts") != name:
        return read_prompts(source, column)
    names = {field.name for field in dataclasses.fields(DataConfig)} - {"prompts", "cache"}
    data = DataConfig(source, **{name: value for name, value in trained_on.items() if name in names})
    return list(dict.fromkeys(selected.text for selected in select_prompts(model, data)[: data.held_out]))


def _select(model: Model, data: DataConfig, example: Example, template: str) -> Selected:
    """Tokenize an example; without a chat template a blank line comes before a given answer."""
    *turns, last = example.turns
    if example.answer is None:
        return Selected(last, model.encode(example.turns, data.chat, template), None)
    own = own_template(model.tokenizer)
    written = (chosen_template(template, model.tokenizer) if template else own) if data.chat else None
    prompt = model.encode([*turns, last if written else f"{last}\n\n"], data.chat, template)
    ends = turn_end(model.tokenizer, written) if written else None, model.tokenizer.eos_token_id, *model.eos
    end = [i for i in ends if i in model.eos][:1]  # a turn's, unlike other ends of text
    return Selected(last, prompt, [*model.encode_plain(example.answer), *end])
