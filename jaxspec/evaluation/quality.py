"""How good answers are, where the question says what a good answer is. No judge models.

Lossless decoding cannot change these figures; they are for what may: typical acceptance, rejection sampling (another
text of the same distribution), a fine-tuned base.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import UserError

Row = dict[str, Any]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_SECONDS, _BYTES = 10, 2**30  # what generated code may take
_PASSED = 86  # exit code; code that exits by itself has another
_GUARD = """
import resource, runpy, sys
seconds, size = map(int, sys.argv[1:])
for kind, value in (("CPU", seconds), ("AS", size), ("FSIZE", 2**20), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (value, value))
runpy.run_path("answer.py", run_name="answer")
"""


def rouge(answer: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L, F measures without stemming.

    Raises:
      UserError: the library is not installed.
    """
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise UserError("summaries are compared by ROUGE; install it with: pip install rouge-score==0.1.2") from None
    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scores = rouge_scorer.RougeScorer(list(kinds)).score(reference, answer)
    return {name: scores[kind].fmeasure for kind, name in kinds.items()}


def last_number(text: str) -> float | None:
    """The last number of a text, commas between thousands left out; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def solved(answer: str, solution: str) -> bool:
    """Whether an answer to a GSM8K question ends in the number behind `####` of its solution."""
    wanted, found = last_number(solution.rpartition("####")[2]), last_number(answer)
    return found is not None and wanted is not None and math.isclose(found, wanted)


def extract_code(answer: str, prompt: str) -> str:
    """The program of an answer to a HumanEval question: its first code block, or all of it behind the prompt."""
    block = _CODE.search(answer)
    code = block[1] if block else answer
    defines = re.search(r"^def ", code, re.MULTILINE)
    return f"{prompt}\n{code}" if defines else prompt + code  # a prompt holds imports; a bare body goes on with it


def passes(program: str, test: str, entry_point: str) -> bool:
    """Run generated code with its test in a process of its own, within limits of time, memory and files.

    It runs in an empty folder and without this process's environment. That stops accidents, not attacks: on machines
    that hold secrets run such benchmarks in a container.
    """
    whole = f"{program}\n\n{test}\n\ncheck({entry_point})\nraise SystemExit({_PASSED})\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "answer.py").write_text(whole, encoding="utf-8")
        command = [sys.executable, "-I", "-c", _GUARD, str(_SECONDS), str(_BYTES)]
        try:
            done = subprocess.run(
                command, cwd=folder, env={"PATH": os.defpath}, timeout=_SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == _PASSED


def pass_at(k: int, tries: int, right: int) -> float:
    """The chance that one of k answers passes, estimated without bias from how many of `tries` answers did."""
    if tries < k:
        return float("nan")
    return 1 - math.comb(tries - right, k) / math.comb(tries, k)


def _summary(column: str) -> Callable[[Sequence[str], Row], dict[str, float]]:
    def score(answers: Sequence[str], row: Row) -> dict[str, float]:
        scores = [rouge(answer, row[column]) for answer in answers]
        return {name: float(np.mean([score[name] for score in scores])) for name in scores[0]}

    return score


def _solved(answers: Sequence[str], row: Row) -> dict[str, float]:
    return {"solved": float(np.mean([solved(answer, row["answer"]) for answer in answers]))}


def _programs(answers: Sequence[str], row: Row) -> dict[str, float]:
    right = sum(passes(extract_code(a, row["prompt"]), row["test"], row["entry_point"]) for a in answers)
    return {f"pass@{k}": pass_at(k, len(answers), right) for k in (1, 10) if k <= len(answers)}


_SCORES = {"cnn_dm": _summary("highlights"), "xsum": _summary("summary"), "gsm8k": _solved, "humaneval": _programs}


def quality(category: str, answers: Sequence[str], row: Row) -> dict[str, float]:
    """Scores of the answers that several runs gave to one question, by name; empty for a category without any.

    Args:
      category: of the question.
      answers: texts, one per run.
      row: the line of the question file.
    """
    return _SCORES[category](answers, row) if category in _SCORES else {}
