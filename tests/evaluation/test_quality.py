"""Scores against references worked out by hand, and generated code that misbehaves."""

import itertools
import sys

import pytest

from jaxspec.errors import UserError
from jaxspec.evaluation.quality import extract_code, last_number, pass_at, passes, quality, rouge, solved

PROMPT = 'import math\n\n\ndef area(r):\n    """Of a circle."""\n'
TEST = "def check(f):\n    assert abs(f(2) - 12.566) < 1e-2\n"
RIGHT = "    return math.pi * r * r\n"


def test_rouge_by_hand():
    found = rouge("a cat sat on a mat", "the cat sat on the mat")
    assert found == pytest.approx({"ROUGE-1": 4 / 6, "ROUGE-2": 2 / 5, "ROUGE-L": 4 / 6})
    assert rouge("cat mat", "mat cat")["ROUGE-L"] == pytest.approx(1 / 2)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(UserError, match="pip install rouge-score"):
        rouge("a", "b")


def test_the_last_number_decides():
    assert last_number("first 3, then 1,234.5 dollars.") == 1234.5 and last_number("It is -7.") == -7
    assert last_number("none") is None
    assert solved("2 + 2 = 4, so 4.", "so 2 + 2 = <<2+2=4>>4\n#### 4") and not solved("5 or so", "#### 4")
    assert solved("1,000", "#### 1000") and not solved("", "#### 4")


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is:\n```python\n{PROMPT}{RIGHT}```\nThat is all.",
        f"```\ndef area(r):\n{RIGHT}```",
        RIGHT,
        f"```python\n{PROMPT}{RIGHT}",  # cut off behind the code
    ],
    ids=["whole", "without-imports", "body", "open-block"],
)
def test_code_is_found_and_passes(answer):
    assert passes(extract_code(answer, PROMPT), TEST, "area")


@pytest.mark.parametrize(
    "body",
    ["return 0", "raise SystemExit(0)", "return (", "[0] * 10**10", "import os; os._exit(0)"],
    ids=["wrong", "exit", "syntax", "memory", "hard-exit"],
)
def test_bad_code_fails(body):
    assert not passes(f"{PROMPT}    {body}\n", TEST, "area")


def test_code_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("jaxspec.evaluation.quality._SECONDS", 1)
    assert not passes(PROMPT + "    while True: pass\n", TEST, "area")


def test_code_leaves_nothing_behind(tmp_path):
    program = f"{PROMPT}    open('left.txt', 'w').write('x'); return math.pi * r * r\n"
    assert passes(program, TEST, "area") and not list(tmp_path.iterdir())


def test_pass_at_k_counts_all_choices():
    tries, right, k = 6, 2, 3
    every = list(itertools.combinations(range(tries), k))
    assert pass_at(k, tries, right) == pytest.approx(sum(min(c) < right for c in every) / len(every))
    assert pass_at(1, 4, 1) == 0.25 and pass_at(2, 2, 0) == 0


def test_scores_by_category():
    assert quality("gsm8k", ["4", "5"], {"answer": "#### 4"}) == {"solved": 0.5}
    assert quality("xsum", ["one two"], {"summary": "one two"})["ROUGE-2"] == 1
    code = {"prompt": PROMPT, "test": TEST, "entry_point": "area"}
    assert quality("humaneval", [RIGHT, "    return 0\n"], code) == {"pass@1": 0.5}
    assert quality("qa", ["x"], {}) == {}
