"""Scores against references worked out by hand, and generated code that misbehaves."""

import importlib.util
import itertools
import sys
import tempfile
import textwrap
import time

import pytest

from jaxspec.bench.programs import check_runner, extract_code, passes
from jaxspec.bench.quality import pass_at, quality, rouge, score_answers, solved, stated_number
from jaxspec.bench.questions import Question
from jaxspec.errors import UserError
from jaxspec.files import read_whole_lines

PROMPT = 'import math\n\n\ndef area(r):\n    """Of a circle."""\n'
TEST = "def check(f):\n    assert abs(f(2) - 12.566) < 1e-2\n"
RIGHT = "    return math.pi * r * r\n"


def test_rouge_by_hand():
    found = rouge("a cat sat on a mat", "the cat sat on the mat")
    assert found == pytest.approx({"ROUGE-1": 4 / 6, "ROUGE-2": 2 / 5, "ROUGE-L": 4 / 6})
    assert rouge("cat mat", "mat cat")["ROUGE-L"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 1,234.5 dollars.", 1234.5),
        ("It is -7.", -7),
        ("The answer is **$12**.\n\n1. Add.\n2. Done.", 12),
        ("18-5", 5),
        ("The answer is 12 x 3 = 36 dollars. Or 5?", 36),
        ("so 2 + 2 = 4.", 4),
        ("The answer is 5 = 2 + 3.", 5),
        ("The answer is: 7, not 8.", 7),
        ("The answer is that 3 friends get 12 apples each.", 12),
        ("The answer is $\\boxed{1,200.5}$.\n(7 words)", 1200.5),
        ("none", None),
    ],
)
def test_the_stated_number_decides(text, number):
    assert stated_number(text) == number


def test_a_sum_is_solved_by_its_number():
    assert solved("2 + 2 = 4, so 4.", "so 2 + 2 = <<2+2=4>>4\n#### 4") and not solved("5 or so", "#### 4")
    assert solved("1,000", "#### 1000") and not solved("", "#### 4")


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is:\n```python\n{PROMPT}{RIGHT}```\nThat is all.",
        f"```\ndef area(r):\n{RIGHT}```",
        RIGHT,
        f"```python\n{RIGHT}```",
        f"```python\n{PROMPT}{RIGHT}",  # cut off behind the code
        textwrap.indent(f"```python\n{PROMPT}{RIGHT}\n```\n", "   "),
        f"```bash\npip install it\n```\nThen:\n```python3\nx = 1\n```\nand\n```python\ndef area(r):\n{RIGHT}```",
    ],
    ids=["whole", "without-imports", "body", "body-in-block", "open-block", "indented", "other-blocks"],
)
def test_code_is_found_and_passes(answer):
    assert passes(extract_code(answer, PROMPT, "area"), TEST, "area")


@pytest.mark.parametrize(
    "body",
    [
        "return 0",
        "raise SystemExit(0)",
        "return (",
        "import os; os._exit(0)",
        "x = bytearray(2 * 2**30); return math.pi * r * r",
        "open('f', 'wb').write(bytes(2 * 2**20)); return math.pi * r * r",
    ],
    ids=["wrong", "exit", "syntax", "hard-exit", "memory", "file-size"],
)
def test_bad_code_fails(body):
    assert not passes(f"{PROMPT}    {body}\n", TEST, "area")


def test_code_that_never_ends_is_stopped_with_all_that_it_started(tmp_path):
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(2); open({str(alive)!r}, 'w')"
    body = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])\n    while True: pass\n"
    assert not passes(f"{PROMPT}    {body}", TEST, "area", seconds=1)
    time.sleep(2)
    assert not alive.exists()


def test_code_works_in_a_folder_that_goes_away(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    body = "open('left.txt', 'w').write('x'); import os; assert 'SECRET' not in os.environ; return math.pi * r * r"
    monkeypatch.setenv("SECRET", "1")
    assert passes(f"{PROMPT}    {body}\n", TEST, "area") and not list(tmp_path.iterdir())


def test_a_machine_that_runs_nothing_is_found_out(monkeypatch):
    check_runner()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="programs cannot be run here"):
        check_runner()


def test_pass_at_k_counts_all_choices():
    tries, right, k = 6, 2, 3
    every = list(itertools.combinations(range(tries), k))
    assert pass_at(k, tries, right) == pytest.approx(sum(min(c) < right for c in every) / len(every))
    assert pass_at(1, 4, 1) == 0.25 and pass_at(2, 2, 0) == 0


def test_scores_by_kind():
    assert quality("gsm8k", ["4", "5"], {"answer": "#### 4"}) == {"solved": 0.5}
    assert quality("xsum", ["one two"], {"summary": "one two"})["ROUGE-2"] == 1
    code = {"prompt": PROMPT, "test": TEST, "entry_point": "area"}
    assert quality("humaneval", [RIGHT, "    return 0\n"], code) == {"pass@1": 0.5}
    assert quality("turns", ["x"], {}) == {}


def test_code_runs_only_when_asked_and_scores_are_kept(monkeypatch, tmp_path):
    code = {"prompt": PROMPT, "test": TEST, "entry_point": "area"}
    questions = [
        Question("h", 1, "humaneval", ("q",), "humaneval", code),
        Question("g", 2, "gsm8k", ("q",), "gsm8k", {"answer": "#### 4"}),
        Question("x", 3, "xsum", ("q",), "xsum", {"summary": "one two"}),
    ]
    talks = {"ppd": {("h", 1): [[RIGHT]], ("g", 2): [["5", "4"]], ("x", 3): [["one"]]}}
    file, said = tmp_path / "scores.jsonl", []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    score_answers(talks, questions, file, False, said.append)
    assert [row["kind"] for row in read_whole_lines(file)] == ["gsm8k"]
    assert "--run-code" in said[0] and "pip install rouge-score" in said[1]
    monkeypatch.undo()
    with file.open("a") as out:
        out.write('{"way": "ppd", "da')  # cut by a kill
    score_answers(talks, questions, file, True, said.append)
    assert [row["kind"] for row in read_whole_lines(file)] == ["gsm8k", "humaneval", "xsum"]
    assert read_whole_lines(file)[1]["scores"] == {"pass@1": 1.0}
    before = file.read_text()
    score_answers(talks, questions, file, True, said.append)
    assert file.read_text() == before
