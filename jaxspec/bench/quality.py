"""Quality of answers, for questions that come with a reference or a test. No judge models.

Lossless decoding cannot change these figures; typical acceptance, rejection sampling (another text of the same
distribution) and a fine-tuned base may.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.programs import check_runner, extract_code, passes
from jaxspec.bench.questions import Question
from jaxspec.files import drop_half_line, read_whole_lines
from jaxspec.progress import Progress

Row = dict[str, Any]
Talks = dict[tuple[str, int | str], list[list[str]]]  # by file and id of a question, run by run: answers turn by turn
SCORED = ("way", "data", "question_id", "kind", "scores")  # of a line of scores.jsonl
_ANSWER = re.compile(r"(?:####|answer is)(.*?)(?:[.!?]\s|\n|$)", re.IGNORECASE)  # up to the end of the sentence
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


def rouge(answer: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L, F measures without stemming. Raises ImportError without the package rouge-score."""
    from rouge_score import rouge_scorer  # an extra: only summaries need it

    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scores = rouge_scorer.RougeScorer(list(kinds)).score(reference, answer)
    return {name: scores[kind].fmeasure for kind, name in kinds.items()}


def stated_number(text: str) -> float | None:
    """The number that a text states as its answer, else its last one; None where there is none."""
    stated = [sentence for sentence in _ANSWER.findall(text) if _NUMBER.search(sentence)]
    found = [_stated(sentence) for sentence in stated] or _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _stated(sentence: str) -> str:
    """The number that a sentence states: at the end of its equation, at its beginning, or its last one."""
    numbers, result = _NUMBER.findall(sentence), _NUMBER.findall(sentence.rpartition("=")[2])
    if len(result) == 1:
        return result[0]
    begins = not re.search(r"\w", sentence[: _NUMBER.search(sentence).start()])
    return numbers[0] if begins else numbers[-1]


def solved(answer: str, solution: str) -> bool:
    """Whether an answer to a GSM8K question states the number after `####` of its solution."""
    wanted, found = stated_number(solution), stated_number(answer)
    return found is not None and wanted is not None and math.isclose(found, wanted)


def pass_at(k: int, tries: int, right: int) -> float:
    """Unbiased estimate of the chance that one of k answers passes, from `tries` >= k answers."""
    return 1 - math.comb(tries - right, k) / math.comb(tries, k)


def _summary(column: str, answers: Sequence[str], row: Row) -> dict[str, float]:
    scores = [rouge(answer, row[column]) for answer in answers]
    return {name: float(np.mean([score[name] for score in scores])) for name in scores[0]}


def _solved(answers: Sequence[str], row: Row) -> dict[str, float]:
    return {"solved": float(np.mean([solved(answer, row["answer"]) for answer in answers]))}


def _programs(answers: Sequence[str], row: Row) -> dict[str, float]:
    entry = row["entry_point"]
    right = sum(passes(extract_code(a, row["prompt"], entry), row["test"], entry) for a in answers)
    return {f"pass@{k}": pass_at(k, len(answers), right) for k in (1, 10) if k <= len(answers)}


_SCORES = {kind: partial(_summary, column) for kind, column in (("cnn_dm", "highlights"), ("xsum", "summary"))}
_SCORES |= {"gsm8k": _solved, "humaneval": _programs}


def quality(kind: str, answers: Sequence[str], row: Row) -> dict[str, float]:
    """Scores of the answers that several runs gave to one question, by name; empty for a kind without any.

    Args:
      kind: kind of question.
      answers: texts, one per run.
      row: the question's line in its file.
    """
    return _SCORES[kind](answers, row) if kind in _SCORES else {}


def score_answers(
    talks: dict[str, Talks], questions: Sequence[Question], file: Path, run_code: bool, say: Callable[[str], None]
) -> None:
    """Score the last turns that can be scored and have no score yet; a line of `file` per way and question.

    Args:
      talks: the answers of every way.
      questions: the questions.
      file: scores.jsonl.
      run_code: run the programs that answers to HumanEval hold.
      say: called with a line about each kind of question that is left out.
    """
    kept = read_whole_lines(file, SCORED)
    drop_half_line(file)
    known = {(row["way"], row["data"], row["question_id"]) for row in kept}
    kinds = _scorable(questions, run_code, say)
    asked = [question for question in questions if question.kind in kinds]
    todo = [(way, q) for way in talks for q in asked if (way, q.data, q.id) not in known]
    if any(question.kind == "humaneval" for _, question in todo):
        check_runner()
    with Progress("scores", len(todo), "answers") as progress, file.open("a", encoding="utf-8") as out:
        for number, (way, question) in enumerate(todo, 1):
            answers = [turns[-1] for turns in talks[way][question.data, question.id]]
            row = {"way": way, "data": question.data, "question_id": question.id, "kind": question.kind}
            out.write(json.dumps(row | {"scores": quality(question.kind, answers, question.row)}) + "\n")
            out.flush()  # a kill loses no score
            progress.update(number)


def _scorable(questions: Sequence[Question], run_code: bool, say: Callable[[str], None]) -> set[str]:
    """The kinds of questions that can be scored here."""
    kinds = {question.kind for question in questions} & set(_SCORES)
    if "humaneval" in kinds and not run_code:
        say("HumanEval is not scored: --run-code runs the programs that the answers hold")
        kinds.remove("humaneval")
    if kinds & {"cnn_dm", "xsum"} and not importlib.util.find_spec("rouge_score"):
        say("summaries are not scored; install ROUGE with: pip install rouge-score==0.1.2")
        kinds -= {"cnn_dm", "xsum"}
    return kinds
