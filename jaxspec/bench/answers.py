"""Answers on disk: lines of JSON in Spec-Bench's own format, with more fields beside."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.questions import Question
from jaxspec.decoding.divergence import Divergence
from jaxspec.decoding.generate import Generation
from jaxspec.files import read_whole_lines, write_atomically

_FIELDS = ("question_id", "category", "choices", "data", "batch")


def accept_lengths(answer: Generation) -> list[int]:
    """Tokens that every step emitted: those it accepted, and the bonus unless the answer ended before it."""
    lengths, count = [], 0
    for drafted in answer.drafted[1:]:  # prefill emitted the first
        count += 1
        if not drafted:
            lengths, count = [*lengths, count], 0
    return [*lengths, count] if count else lengths


class Answers:
    """The answer files of one output folder: `answers/run_<n>/<way>.jsonl`.

    Args:
      folder: of the benchmark.
      ways: names.
    """

    def __init__(self, folder: Path, ways: Sequence[str]):
        self._folder, self._ways = folder, ways

    def file(self, way: str, run: int) -> Path:
        """Where the answers of one way and run are."""
        return self._folder / "answers" / f"run_{run}" / (re.sub(r"[^\w.,=@-]", "-", way) + ".jsonl")

    def read(self, run: int) -> dict[str, list[dict[str, Any]]]:
        """The rows of every way, of the batches that every way has answered.

        Raises:
          UserError: a damaged line before the last one, which a kill may have cut.
        """
        rows = {way: read_whole_lines(self.file(way, run), _FIELDS) for way in self._ways}
        done = set.intersection(*({_key(row) for row in found} for found in rows.values()))
        whole = lambda row: {tuple(key) for key in row["batch"]} <= done  # noqa: E731
        return {way: [row for row in found if whole(row)] for way, found in rows.items()}

    def restore(self, run: int) -> set[tuple[str, int | str]]:
        """The questions that every way has answered; anything else in the files, left by a kill, is removed."""
        found = self.read(run)
        for way, rows in found.items():
            file = self.file(way, run)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "".join(_line(row) for row in rows).encode())
        return {_key(row) for row in next(iter(found.values()))}

    def append(self, way: str, run: int, rows: Sequence[dict[str, Any]]) -> None:
        """Add answers."""
        with self.file(way, run).open("a", encoding="utf-8") as file:
            file.writelines(_line(row) for row in rows)


def _key(row: dict[str, Any]) -> tuple[str, int | str]:
    return row["data"], row["question_id"]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def answer_row(
    model_id: str,
    batch: Sequence[Question],
    question: Question,
    turns: Sequence[Generation],
    parted: Sequence[Divergence | None],
) -> dict[str, Any]:
    """A line of an answer file.

    Args:
      model_id: of base and method.
      batch: the questions answered together; times are those of all of them.
      question: the one of this line.
      turns: its answers.
      parted: per turn, where they part from autoregressive decoding's; no entry behind the first that does.
    """
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [turn.steps for turn in turns],
        "new_tokens": [turn.new_tokens for turn in turns],
        "wall_time": [turn.prefill_seconds + turn.decode_seconds for turn in turns],
        "accept_lengths": [length for turn in turns for length in accept_lengths(turn)],
        "decode_seconds": [turn.decode_seconds for turn in turns],
        "offered": [turn.offered for turn in turns],
        "accepted": [turn.accepted for turn in turns],
        "divergence": [parting and parting.as_json() for parting in parted],
    }
    return {
        "question_id": question.id,
        "category": question.category,
        "answer_id": hashlib.sha256(f"{model_id}{question.data}{question.id}{time.time()}".encode()).hexdigest()[:22],
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
        "data": question.data,
        "batch": [[q.data, q.id] for q in batch],
    }
