"""Training text: the base's own greedy answers to prompts, made once, cached on disk, resumable.

A method learns to guess what its base would say, so the base writes the training text itself (BiTA 3.3, PPD
4.3.2). The cache is a JSONL file that can be read with any tool; a killed run continues behind its last full line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxspec.config import DataConfig
from jaxspec.decoding.generate import generate_many
from jaxspec.errors import UserError
from jaxspec.methods.adapter import load_method
from jaxspec.model.load import Model

SHIPPED_PROMPTS = Path(__file__).parent / "prompts.jsonl"
MOST_DRAFTS = 32768  # tokens whose order by frequency goes with an adapter
_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Answer:
    """One training sequence.

    Attributes:
      prompt_tokens: ids of the prompt, chat template included.
      answer_tokens: ids of the base's own answer, the end-of-text token included where it came.
    """

    prompt_tokens: list[int]
    answer_tokens: list[int]


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


def select_prompts(model: Model, data: DataConfig) -> list[tuple[str, list[int]]]:
    """Texts and ids of held-out prompts, then of training prompts, in an order fixed by the seed.

    Repeated, blank and too long prompts are left out.

    Args:
      model: the base.
      data: which prompts, and how many.

    Raises:
      UserError: unreadable or too few prompts.
    """
    prompts = [p for p in dict.fromkeys(read_prompts(data.prompts, data.column)) if p.strip()]
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


def cache_file(model: Model, data: DataConfig, limit: int) -> Path:
    """Where answers are cached: one file per base, prompts, and settings that shape answers.

    Args:
      model: the base.
      data: which prompts.
      limit: where answers are cut.
    """
    source = Path(data.prompts) if data.prompts else SHIPPED_PROMPTS
    content = source.read_bytes() if source.is_file() else data.prompts.encode()
    shaping = (data.column, data.held_out_seed, data.max_prompt_tokens, data.chat, limit)
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
    model: Model, data: DataConfig, prompts: Sequence[tuple[str, list[int]]], progress: Callable[[int, int], None]
) -> tuple[list[Answer], list[Answer]]:
    """The base's answers: from the cache, and what is missing generated now.

    Args:
      model: the base.
      data: how many are held out, and where answers are cut.
      prompts: from `select_prompts`.
      progress: called with (answers done, tokens generated by this call) after each answer.

    Returns:
      Held-out answers and training answers.

    Raises:
      UserError: the cache cannot be written.
    """
    chosen = dict(enumerate(prompts))
    held_out = {i: chosen.pop(i) for i in range(data.held_out)}
    finished, generated = 0, 0

    def report(new_answers: int, new_tokens: int) -> None:
        nonlocal finished, generated
        finished, generated = finished + new_answers, generated + new_tokens
        progress(finished, generated)

    try:
        return (
            _answers(model, data, held_out, data.held_out_tokens, report),
            _answers(model, data, chosen, data.max_answer_tokens, report),
        )
    except OSError as error:
        raise UserError(f"{data.cache}: answers cannot be cached there ({error.strerror})") from None


def _answers(
    model: Model,
    data: DataConfig,
    prompts: dict[int, tuple[str, list[int]]],
    limit: int,
    report: Callable[[int, int], None],
) -> list[Answer]:
    """Answers to numbered prompts, in their order."""
    path = cache_file(model, data, limit)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {i: answer for i, answer in _read_cache(path).items() if i in prompts}
    report(len(done), 0)
    missing = [i for i in prompts if i not in done]
    plain = load_method("autoregressive", model)
    with path.open("a", encoding="utf-8") as file:
        for first in range(0, len(missing), _BLOCK):
            # prompts of like length are prefilled together, so that little is padded
            block = sorted(missing[first : first + _BLOCK], key=lambda i: len(prompts[i][1]))
            ids = [prompts[i][1] for i in block]
            for at, tokens in generate_many(model, plain, ids, limit, batch_size=data.batch_size):
                index = block[at]
                prompt, prompt_tokens = prompts[index]
                done[index] = Answer(prompt_tokens, tokens)
                row = {"index": index, "prompt": prompt, "answer": model.decode(tokens)}
                file.write(json.dumps(row | dataclasses.asdict(done[index]), ensure_ascii=False) + "\n")
                file.flush()
                report(1, len(tokens))
    return [done[i] for i in prompts]


def frequent_tokens(answers: Sequence[Answer], vocab_size: int) -> np.ndarray:
    """Token ids by how often the base itself writes them, [at most MOST_DRAFTS] int32.

    Tokens that the answers do not hold follow by their id: tokenizers number frequent ones first.
    """
    counts = np.zeros(vocab_size, int)
    for answer in answers:
        np.add.at(counts, answer.answer_tokens, 1)
    return np.argsort(-counts, kind="stable")[:MOST_DRAFTS].astype(np.int32)
