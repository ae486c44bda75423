"""Training text: the base's greedy answers to prompts, generated once and cached on disk; or given answers.

A method learns to predict its base, so the base writes the training text (BiTA 3.3, PPD 4.3.2). The cache is a JSONL
file; an interrupted run continues after its last complete line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from jaxspec.config import DataConfig, TextSource
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.files import drop_half_line, locked, read_whole_lines
from jaxspec.generation.generate import generate_many
from jaxspec.parallel.processes import as_leader, check_alike, is_leader, leader_in
from jaxspec.progress import Progress
from jaxspec.training.examples import SHIPPED_PROMPTS, Selected
from jaxspec.weights.load import Model

MOST_DRAFTS = 32768  # tokens whose order by frequency goes with an adapter
_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class AnsweredPrompt:
    """One training sequence.

    Attributes:
      prompt_tokens: ids of the prompt, chat template included.
      answer_tokens: ids of the answer, the base's or a given one, with the end-of-text token if it has one.
    """

    prompt_tokens: list[int]
    answer_tokens: list[int]


def cache_file(model: Model, data: DataConfig, limit: int) -> Path:
    """The cache file of the base's answers of at most `limit` tokens: one per base, prompts and settings of answers."""
    keys = [_key(source, data, limit) for source in data.text_sources]
    shares = repr([(key, float(source.weight)) for key, source in zip(keys, data.text_sources, strict=True)])
    key = keys[0] if len(keys) == 1 else _digest(shares.encode())
    return Path(data.cache) / f"{model.fingerprint}-{key}.jsonl"


def _key(source: TextSource, data: DataConfig, limit: int) -> str:
    """A key for the answers to one source: its prompts, and the settings that answers depend on."""
    file = Path(source.prompts) if source.prompts else SHIPPED_PROMPTS
    content = file.read_bytes() if file.is_file() else source.prompts.encode()
    split = source.split if source.split != TextSource.split else ""
    named = {"context_column": source.context_column, "regenerate": source.regenerate, "split": split}
    named |= {"templates": data.templates}
    shaping = (
        *(source.column, data.held_out_seed, data.max_prompt_tokens, data.chat, limit),
        *filter(None, (source.answer_column, data.template)),
        *(setting for setting in named.items() if setting[1]),
    )
    return _digest(content + repr(shaping).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def prepare_answers(
    model: Model, data: DataConfig, prompts: Sequence[Selected]
) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt]]:
    """Held-out and training answers to `select_prompts`: given ones, or cached ones and the missing ones generated now.

    Raises:
      UserError: the cache cannot be written, or another run is writing it.
    """
    numbered = dict(enumerate(prompts))
    held_out = {i: numbered.pop(i) for i in range(data.held_out)}
    try:
        return (
            _answers(model, data, held_out, data.held_out_tokens, "held-out answers"),
            _answers(model, data, numbered, data.max_answer_tokens, "training answers"),
        )
    except OSError as error:
        raise UserError(f"{data.cache}: answers cannot be cached there ({error.strerror})") from None


def _answers(
    model: Model, data: DataConfig, prompts: dict[int, Selected], limit: int, label: str
) -> list[AnsweredPrompt]:
    """Answers to numbered prompts, in order, cut at the limit."""
    given = [p for p in prompts.values() if p.answer_tokens is not None]
    if given:
        if cut := sum(len(p.answer_tokens) > limit for p in given):
            print(f"cut at {limit} tokens: {cut} of {len(given)} answers", file=sys.stderr)
        return [AnsweredPrompt(p.prompt_tokens, p.answer_tokens[:limit]) for p in given]
    path = cache_file(model, data, limit)
    done = _cached(path, prompts)
    if len(done) < len(prompts):
        with _opened(path) as file:
            done = _cached(path, prompts)  # another run may have added to them
            missing = {i: prompt for i, prompt in prompts.items() if i not in done}
            began, generated = time.monotonic(), 0
            with Progress(label, len(prompts), "answers", len(done)) as progress:
                for i, answer in _make(model, data, missing, limit):
                    done[i] = answer
                    row = {"index": i, "prompt": prompts[i].text, "answer": model.decode(answer.answer_tokens)}
                    file.write(json.dumps(row | dataclasses.asdict(answer), ensure_ascii=False) + "\n")
                    file.flush()
                    generated += len(answer.answer_tokens)
                    progress.update(len(done), f"{generated / (time.monotonic() - began):.0f} tokens/s")
    return [done[i] for i in prompts]


def _cached(path: Path, prompts: dict[int, Selected]) -> dict[int, AnsweredPrompt]:
    """Cached answers by index, without those that belong to another prompt because `held_out` has changed."""
    rows = read_whole_lines(path, ("index", "prompt_tokens", "answer_tokens"))
    answers = {row["index"]: AnsweredPrompt(row["prompt_tokens"], row["answer_tokens"]) for row in rows}
    done = {i: answers[i] for i, p in prompts.items() if i in answers and answers[i].prompt_tokens == p.prompt_tokens}
    check_alike(json.dumps(sorted(done)).encode(), str(path.parent))
    return done


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The cache, open for new answers and locked against other runs; only the first process writes to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"{path}: another run is making these answers; start this one when it is done"
    with leader_in(locked(path.with_name(f".{path.name}.lock"), refusal)):
        as_leader(functools.partial(drop_half_line, path))  # left by an interrupted run
        with (path if is_leader() else Path(os.devnull)).open("a", encoding="utf-8") as file:
            yield file


def _make(
    model: Model, data: DataConfig, missing: dict[int, Selected], limit: int
) -> Iterator[tuple[int, AnsweredPrompt]]:
    """The base's answers to numbered prompts, as they are finished."""
    plain, numbers = autoregressive(model), list(missing)
    for first in range(0, len(numbers), _BLOCK):
        # prompts of similar length are prefilled together, to pad little
        block = sorted(numbers[first : first + _BLOCK], key=lambda i: len(missing[i].prompt_tokens))
        ids = [missing[i].prompt_tokens for i in block]
        for at, tokens in generate_many(plain, ids, limit, batch_size=data.batch_size):
            yield block[at], AnsweredPrompt(ids[at], tokens)


def frequent_tokens(answers: Sequence[AnsweredPrompt], vocab_size: int) -> np.ndarray:
    """Token ids by how often answers hold them, [at most MOST_DRAFTS] int32.

    Tokens that do not occur follow by id: tokenizers number frequent ones first.
    """
    tokens = np.fromiter(itertools.chain.from_iterable(answer.answer_tokens for answer in answers), int)
    counts = np.bincount(tokens, minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:MOST_DRAFTS].astype(np.int32)
