"""Answers on disk: lines of JSON in Spec-Bench's own format, with more fields."""

from __future__ import annotations

import collections
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.questions import Question
from jaxspec.errors import UserError
from jaxspec.files import read_whole_lines, write_atomically
from jaxspec.generation.divergence import Divergence
from jaxspec.generation.generate import Generation

Row = dict[str, Any]
_FIELDS = ("question_id", "category", "choices", "data", "batch")


def accept_lengths(answer: Generation) -> list[int]:
    """Number of tokens that each step emitted: accepted ones, and the bonus unless the answer ended before it."""
    lengths, count = [], 0
    for drafted in answer.drafted[1:]:  # prefill emitted the first
        count += 1
        if not drafted:
            lengths, count = [*lengths, count], 0
    return [*lengths, count] if count else lengths


class Answers:
    """The answer files of a benchmark: `answers/run_<n>/<way>.jsonl` in its folder.

    Args:
      folder: the benchmark's folder.
      ways: names of the ways to decode.
    """

    def __init__(self, folder: Path, ways: Sequence[str]):
        self._folder, self._ways = folder, ways
        names = collections.Counter(self.file(way, 0).name for way in ways)
        if alike := [name for name, count in names.items() if count > 1]:
            raise UserError(
                f"several runs would write {alike[0]}: rename the adapter or the draft model of one of them"
            )

    def file(self, way: str, run: int) -> Path:
        """The file with the answers of one way and run."""
        return self._folder / "answers" / f"run_{run}" / (re.sub(r"[^\w.,=-]", "-", way) + ".jsonl")

    def read(self, run: int) -> dict[str, list[Row]]:
        """The rows of every way, for the batches that all ways have answered.

        Raises:
          UserError: a damaged line before the last one, which a kill may have cut.
        """
        rows = {way: read_whole_lines(self.file(way, run), _FIELDS) for way in self._ways}
        done = set.intersection(*({question_of(row) for row in found} for found in rows.values()))
        return {way: [row for row in found if done.issuperset(map(tuple, row["batch"]))] for way, found in rows.items()}

    def restore(self, run: int) -> set[tuple[str, int | str]]:
        """The questions that all ways have answered; other lines, which an interrupted run left, are removed."""
        found = self.read(run)
        for way, rows in found.items():
            file = self.file(way, run)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "".join(map(_line, rows)).encode())
        return {question_of(row) for row in next(iter(found.values()))}

    def append(self, way: str, run: int, rows: Sequence[Row]) -> None:
        """Add answers."""
        with self.file(way, run).open("a", encoding="utf-8") as file:
            file.writelines(map(_line, rows))


def question_of(row: Row) -> tuple[str, int | str]:
    """File and id of the question that a row answers."""
    return row["data"], row["question_id"]


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def answer_row(
    model_id: str,
    batch: Sequence[Question],
    question: Question,
    turns: Sequence[Generation],
    divergences: Sequence[Divergence | None],
) -> Row:
    """A line of an answer file.

    Args:
      model_id: names base and method.
      batch: the questions answered together, whose times are the same.
      question: the one that this line answers.
      turns: its answers, turn by turn.
      divergences: for each turn, where the answer differs from autoregressive decoding's; none after the first
        difference.
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
        "candidates": [turn.candidates for turn in turns],
        "divergence": [found and found.as_json() for found in divergences],
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
