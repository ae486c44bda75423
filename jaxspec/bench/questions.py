"""Benchmark questions from files: Spec-Bench, SPEED-Bench, GSM8K, HumanEval(-X), CNN/DailyMail, XSum, or prompts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import speed_bench
from jaxspec.bench.rows import read_rows
from jaxspec.errors import UserError

MT_BENCH = {  # categories and the temperatures that MT-Bench samples them at
    "writing": 0.7, "roleplay": 0.7, "reasoning": 0.0, "math": 0.0, "coding": 0.0, "extraction": 0.0, "stem": 0.1,
    "humanities": 0.1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      data: name of the file.
      id: identifier, unique in the file.
      category: category in the file, those of SPEED-Bench with its name; the kind of file where it has no categories.
      turns: the user's messages, turn by turn.
      kind: kind of file, which decides how an answer can be scored.
      row: the complete line of the file, with the reference or test of a good answer; for HumanEval-X also the
        `entry_point`.
    """

    data: str
    id: int | str
    category: str
    turns: tuple[str, ...]
    kind: str
    row: dict[str, Any]


def group_of(category: str) -> str:
    """The group of a category in results: MT-Bench's categories form one, every other category its own."""
    return "mt_bench" if category in MT_BENCH else category


WORDINGS = {  # what stands around a question, by kind of file; {} where a wording has nothing of its own to say
    "plain": {
        "humaneval": "Complete this Python function. Answer with the whole function in one code block.\n\n{}",
        "cnn_dm": "Summarize this article in a few sentences.\n\n{}",
        "xsum": "Summarize this article in one sentence.\n\n{}",
    },
    "space": {  # SPACE, A.2
        "humaneval": (
            "Complete the following python code. Do not give any explanation or testing examples, just complete the "
            "code.\n {}"
        ),
        "xsum": "Document: {}\n Based on the previous text, provide a brief single summary",
    },
    "bita": {  # BiTA's released evaluation; the paper prints none
        "humaneval": "Complete the following python code\n{}",
        "xsum": "Document: {}\nBased on the previous text, provide a brief single summary:",
    },
    "amphista": {kind: "Article:{}\nSummary:" for kind in ("cnn_dm", "xsum")},  # Amphista, A.2.1
    # Hidden Transfer, 4.2, asks as Draft & Verify (Zhang et al., 2023) does, whose released code has this; it also
    # takes line breaks out of the example's answer
    "hidden_transfer": {kind: "Article: {}\nSummary:" for kind in ("cnn_dm", "xsum")},
}
_ANSWERED = {"hidden_transfer": " {}\n"}  # what stands around the answer of an example, instead of blank lines


@dataclasses.dataclass(frozen=True)
class _Format:
    """A kind of question file: its distinctive columns, the column that is asked, and those to score an answer by."""

    kind: str
    columns: tuple[str, ...]
    asked: str
    reference: tuple[str, ...] = ()


_FORMATS = (
    _Format("speed_bench", speed_bench.COLUMNS, "turns"),
    _Format("turns", ("turns", "category"), "turns"),
    _Format("humaneval", ("task_id", "prompt", "test", "entry_point"), "prompt", ("test", "entry_point")),
    _Format("humaneval", ("task_id", "prompt", "declaration", "test"), "prompt", ("test", "declaration")),  # -X
    _Format("cnn_dm", ("article", "highlights"), "article", ("highlights",)),
    _Format("xsum", ("document", "summary"), "document", ("summary",)),
    _Format("gsm8k", ("question", "answer"), "question", ("answer",)),
    _Format("prompts", ("prompt",), "prompt"),
)
_IDS = ("question_id", "task_id", "id")


def read_questions(
    path: str | Path, wording: str = "plain", shots: int = 0, skip_placeholders: bool = False
) -> list[Question]:
    """All questions of a file; its columns decide the format.

    Args:
      path: the file.
      wording: a key of `WORDINGS`.
      shots: number of the file's first rows that are not asked, but shown with their answers in front of every
        question (Hidden Transfer 4.2 shows one).
      skip_placeholders: leave out questions of SPEED-Bench whose texts are still to be filled in.

    Raises:
      UserError: no such file, a malformed line, unknown columns, a turn that is no text, an id twice, placeholders, or
        no questions.
    """
    path, questions, seen = Path(path), [], set()
    for number, row in speed_bench.prepared(path, read_rows(path), skip_placeholders):
        question = _question(row, path, number, WORDINGS[wording])
        if question.id in seen:
            raise UserError(f"{path}:{number}: question {question.id!r} occurs twice")
        seen.add(question.id)
        questions.append(question)
    around = _ANSWERED.get(wording, "\n\n{}\n\n")
    shown = "".join(_with_answer(question, around) for question in questions[:shots])
    asked = [dataclasses.replace(q, turns=(shown + q.turns[0], *q.turns[1:])) for q in questions[shots:]]
    if not asked:
        raise UserError(f"{path}: holds no questions")
    return asked


def _question(row: dict[str, Any], path: Path, number: int, wording: dict[str, str]) -> Question:
    """The question of one line. Raises UserError naming file and line."""
    where, format = f"{path}:{number}", _format_of(row)
    if format is None:
        known = "; ".join(", ".join(f.columns) for f in _FORMATS)
        raise UserError(f"{where}: columns {', '.join(row)} are of no known format; formats have: {known}")
    turns = row[format.asked] if format.asked == "turns" else [row[format.asked]]
    for column, texts in ((format.asked, turns), *((name, [row[name]]) for name in format.reference)):
        if not (isinstance(texts, list) and texts and all(isinstance(t, str) and t.strip() for t in texts)):
            raise UserError(f"{where}: {column} must be text that is not empty, got {row[column]!r}")
    name = next((row[column] for column in _IDS if row.get(column) is not None), f"line {number}")
    if not isinstance(name, int | str):
        raise UserError(f"{where}: a question's id must be a number or a text, got {name!r}")
    kind = "questions" if format.kind == "gsm8k" and "####" not in row["answer"] else format.kind
    if "declaration" in format.columns:
        row = row | {"entry_point": _entry_point(row, where)}
    around = wording.get(kind, "{}")
    said = tuple(around.replace("{}", turn) for turn in turns)
    category = str(row.get("category") or kind)
    if kind == "speed_bench":
        category = speed_bench.PREFIX + category  # it has MT-Bench's names for questions of its own
    return Question(path.name, name, category, said, kind, row)


def _format_of(row: dict[str, Any]) -> _Format | None:
    return next((format for format in _FORMATS if set(format.columns) <= set(row)), None)


def _entry_point(row: dict[str, Any], where: str) -> str:
    """The name of the function that a HumanEval-X question asks for: the last one declared, after its helpers."""
    declared = re.findall(r"^def (\w+)", row["declaration"], re.MULTILINE)
    if not declared:
        raise UserError(f"{where}: only the Python questions of HumanEval-X are supported, not {row['task_id']!r}")
    return declared[-1]


def _with_answer(question: Question, around: str) -> str:
    """A question with its answer in `around`, as an example. Raises UserError for a question without an answer."""
    reference = _format_of(question.row).reference
    if len(reference) != 1:
        raise UserError(f"{question.data}: questions of this kind have no answers to show as examples")
    return question.turns[0] + around.replace("{}", question.row[reference[0]])


def stratified(questions: Sequence[Question], limit: int) -> list[Question]:
    """At most `limit` questions, the same number from every category where there are enough, in their order.

    Args:
      questions: the questions to choose from.
      limit: number of questions; 0 keeps all. A smaller choice is part of every larger one.
    """
    if not limit or limit >= len(questions):
        return list(questions)
    shuffled = np.random.default_rng(0).permutation(len(questions))
    groups: dict[str, dict[str, list[int]]] = {}
    for index in shuffled:
        question = questions[index]
        groups.setdefault(group_of(question.category), {}).setdefault(question.category, []).append(int(index))
    mixed = [_round_robin([group[name] for name in sorted(group)]) for _, group in sorted(groups.items())]
    return [questions[index] for index in sorted(_round_robin(mixed)[:limit])]


def _round_robin(lists: Sequence[list[int]]) -> list[int]:
    """The first of every list, then the second of every list, and so on."""
    return [value for values in itertools.zip_longest(*lists) for value in values if value is not None]
