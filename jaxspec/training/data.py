"""Training text: the base's own greedy answers to prompts, made once, cached on disk, resumable.

A method learns to guess what its base would say, so the base writes the training text itself (BiTA 3.3, PPD
4.3.2). The cache is a JSONL file that can be read with any tool; a killed run continues behind its last full line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxspec.config import DataConfig
from jaxspec.decoding.generate import generate_many
from jaxspec.errors import UserError
from jaxspec.methods.adapter import load_method
from jaxspec.model.load import Model

SHIPPED_PROMPTS = Path(__file__).parent / "prompts.jsonl"
_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Answer:
    """One training sequence.

    Attributes:
      prompt_tokens: ids of the prompt, chat template included.
      answer_tokens: ids of the base's greedy answer, the end-of-text token included where it came.
    """

    prompt_tokens: list[int]
    answer_tokens: list[int]


def read_jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers and objects of a JSONL file; empty lines are skipped.

    Raises:
      UserError: the file cannot be read or a line is no JSON object; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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
      UserError: nothing there, a malformed line, or no such column.
    """
    path = Path(source) if source else SHIPPED_PROMPTS
    if path.is_file():
        prompts = []
        for number, row in read_jsonl(path):
            if not isinstance(row.get(column), str):
                raise UserError(f"{path}:{number}: no text in column {column!r}; columns: {', '.join(row)}")
            prompts.append(row[column])
    else:
        prompts = _read_hub(source, column)
    prompts = [p for p in dict.fromkeys(prompts) if p.strip()]
    if not prompts:
        raise UserError(f"{source or path}: holds no prompts")
    return prompts


def _read_hub(name: str, column: str) -> list[str]:
    import datasets  # slow to import, and only this case needs it

    try:
        split = datasets.load_dataset(name, split="train")
    except Exception as error:  # network, name, format: all end here
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"prompts {name!r}: no such file, and not a dataset on the hub ({reason})") from None
    if column not in split.column_names:
        raise UserError(f"dataset {name!r} has no column {column!r}; columns: {', '.join(split.column_names)}")
    return [str(text) for text in split[column]]


def _select(model: Model, data: DataConfig) -> list[tuple[str, list[int]]]:
    """Held-out prompts first, then training prompts, in an order fixed by the seed; too long ones left out."""
    prompts = read_prompts(data.prompts, data.column)
    order = np.random.default_rng(data.held_out_seed).permutation(len(prompts))
    chosen = []
    for index in order:
        ids = model.encode(prompts[index], data.chat)
        if 0 < len(ids) <= data.max_prompt_tokens:
            chosen.append((prompts[index], ids))
        if len(chosen) == data.held_out + data.answers:
            break
    if len(chosen) <= data.held_out:
        raise UserError(
            f"{len(chosen)} prompts of at most {data.max_prompt_tokens} tokens are not enough to hold out "
            f"{data.held_out} and train on the rest; give more prompts or lower data.held-out"
        )
    return chosen


def cache_file(model: Model, data: DataConfig) -> Path:
    """Where the answers to a prompt set are cached: one file per base, prompts and settings that shape answers."""
    source = Path(data.prompts) if data.prompts else SHIPPED_PROMPTS
    content = source.read_bytes() if source.is_file() else data.prompts.encode()
    shaping = (data.column, data.held_out_seed, data.max_prompt_tokens, data.max_answer_tokens, data.chat)
    key = hashlib.sha256(content + repr(shaping).encode()).hexdigest()[:12]
    return Path(data.cache) / f"{model.fingerprint}-{key}.jsonl"


def _read_cache(path: Path) -> dict[int, Answer]:
    """Answers cached so far, by index. A last line cut short by a kill is dropped from the file."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return {row["index"]: Answer(row["prompt_tokens"], row["answer_tokens"]) for _, row in read_jsonl(path)}


def prepare_answers(
    model: Model, data: DataConfig, progress: Callable[[int, int, int], None]
) -> tuple[list[Answer], list[Answer]]:
    """The base's answers: from the cache, and what is missing generated now.

    Args:
      model: the base.
      data: which prompts, how many, how long.
      progress: called with (answers done, answers in all, tokens generated by this call).

    Returns:
      Held-out answers and training answers.

    Raises:
      UserError: unreadable or too few prompts.
    """
    chosen, path = _select(model, data), cache_file(model, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _read_cache(path)
    missing = [i for i in range(len(chosen)) if i not in done]
    plain, generated = load_method("autoregressive", model), 0
    with path.open("a", encoding="utf-8") as file:
        for first in range(0, len(missing), _BLOCK):
            # prompts of like length are prefilled together, so that little is padded
            block = sorted(missing[first : first + _BLOCK], key=lambda i: len(chosen[i][1]))
            ids = [chosen[i][1] for i in block]
            for at, tokens in generate_many(model, plain, ids, data.max_answer_tokens, batch_size=data.batch_size):
                prompt, prompt_tokens = chosen[block[at]]
                done[block[at]] = Answer(prompt_tokens, tokens)
                row = {"index": block[at], "prompt": prompt, "answer": model.decode(tokens)}
                file.write(json.dumps(row | dataclasses.asdict(done[block[at]]), ensure_ascii=False) + "\n")
                file.flush()
                generated += len(tokens)
                progress(len(done), len(chosen), generated)
    answers = [done[i] for i in range(len(chosen))]
    return answers[: data.held_out], answers[data.held_out :]
