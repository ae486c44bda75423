"""Question files of every format, and fair choices from them."""

import json
from collections import Counter

import pytest

from jaxspec.bench.quality import quality
from jaxspec.bench.questions import MT_BENCH, Question, group_of, read_questions, stratified
from jaxspec.errors import UserError

HUMANEVAL_X = {
    "task_id": "Python/3", "prompt": "def g():\n    return 1\n\n\ndef f(x):\n",
    "test": "def check(f):\n    assert f(2) == 3\n\ncheck(f)\n",
    "declaration": "def g():\n    return 1\n\n\ndef f(x):\n", "canonical_solution": "    return x + g()\n",
    "example_test": "def check(f):\n    assert f(1) == 2\n\ncheck(f)\n",
}  # fmt: skip


def write(folder, *rows):
    file = folder / "questions.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    "row, category, said, name",
    [
        (
            {"question_id": 82, "category": "writing", "turns": ["Write.", "Again."]},
            "writing",
            ("Write.", "Again."),
            82,
        ),
        ({"task_id": "H/0", "prompt": "def f():", "test": "t", "entry_point": "f"}, "humaneval", "def f():", "H/0"),
        ({"id": "x1", "article": "Long text.", "highlights": "Text."}, "cnn_dm", "Long text.", "x1"),
        ({"document": "Long text.", "summary": "Text."}, "xsum", "Long text.", "line 1"),
        ({"question": "2 + 2?", "answer": "#### 4"}, "gsm8k", ("2 + 2?",), "line 1"),
        ({"question": "Who?", "answer": "Nobody."}, "questions", ("Who?",), "line 1"),
        ({"prompt": "Hello."}, "prompts", ("Hello.",), "line 1"),
    ],
)
def test_every_format_is_known_by_its_columns(tmp_path, row, category, said, name):
    [question] = read_questions(write(tmp_path, row))
    assert (question.category, question.id, question.data) == (category, name, "questions.jsonl")
    assert question.turns == said if isinstance(said, tuple) else said in question.turns[0]
    assert question.row == row
    assert group_of(question.category) == ("mt_bench" if category == "writing" else category)


@pytest.mark.parametrize(
    "rows, message",
    [
        ((), "holds no questions"),
        (({"text": "a"},), "questions.jsonl:1: columns text are of no known format"),
        (({"prompt": "a"}, "{not json"), "questions.jsonl:2: not JSON"),
        (({"prompt": "a"}, {"prompt": " "}), "questions.jsonl:2: prompt must be text that is not empty"),
        (({"category": "qa", "turns": "a"},), "turns must be text"),
        (({"article": None, "highlights": "a"},), "article must be text"),
        (({"question": "a", "answer": 4},), "answer must be text"),
        (({"document": "a", "summary": None},), "summary must be text"),
        (({"id": [1], "prompt": "a"},), "id must be a number or a text, got [1]"),
        (({**HUMANEVAL_X, "declaration": "int f() {", "task_id": "CPP/3"},), ":1: only the Python questions"),
        (({**HUMANEVAL_X, "declaration": None},), "declaration must be text"),
        (({"id": 3, "prompt": "a"}, {"id": 3, "prompt": "b"}), "questions.jsonl:2: question 3 occurs twice"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, rows, message):
    with pytest.raises(UserError) as error:
        read_questions(write(tmp_path, *rows))
    assert message in str(error.value)


def test_a_question_without_an_id_is_named_by_its_line(tmp_path):
    file = write(tmp_path, {"id": None, "prompt": "a"}, {"id": 1, "prompt": "b"}, {"prompt": "{c}"})
    assert [q.id for q in read_questions(file)] == ["line 1", 1, "line 3"]
    assert read_questions(file)[2].turns == ("{c}",)


def test_humaneval_x_is_humaneval_in_python(tmp_path):
    file = write(tmp_path, HUMANEVAL_X)
    [question] = read_questions(file, "bita")
    assert (question.id, question.kind, question.category) == ("Python/3", "humaneval", "humaneval")
    assert question.turns == (f"Complete the following python code\n{HUMANEVAL_X['prompt']}",)
    assert quality("humaneval", [HUMANEVAL_X["canonical_solution"]], question.row) == {"pass@1": 1}
    assert quality("humaneval", ["    return x"], question.row) == {"pass@1": 0}


def test_the_papers_wordings(tmp_path):
    xsum = write(tmp_path, {"document": "Long {text}.", "summary": "Short."})
    assert read_questions(xsum, "space")[0].turns == (
        "Document: Long {text}.\n Based on the previous text, provide a brief single summary",
    )
    assert read_questions(xsum, "amphista")[0].turns == ("Article:Long {text}.\nSummary:",)
    assert read_questions(xsum, "bita")[0].turns == (
        "Document: Long {text}.\nBased on the previous text, provide a brief single summary:",
    )
    plain = write(tmp_path, {"prompt": "Why?"})
    assert read_questions(plain, "space")[0].turns == ("Why?",)


def test_examples_ahead_of_questions(tmp_path):
    """Hidden Transfer 4.2: one question with its answer, which is asked no more."""
    rows = [{"question": f"{i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(3)]
    questions = read_questions(write(tmp_path, *rows), shots=1)
    assert [q.id for q in questions] == ["line 2", "line 3"]
    assert questions[1].turns == ("0 + 1?\n\nIt is 1.\n#### 1\n\n2 + 1?",)
    with pytest.raises(UserError, match="holds no questions"):
        read_questions(write(tmp_path, *rows), shots=3)
    with pytest.raises(UserError, match="no answers to show"):
        read_questions(write(tmp_path, {"prompt": "Why?"}), shots=1)


@pytest.mark.parametrize("columns", [("document", "summary"), ("article", "highlights")])
def test_an_example_has_the_form_of_a_papers_wording(tmp_path, columns):
    """Hidden Transfer 4.2: the file's first article and its summary, which are not asked for."""
    rows = [dict(zip(columns, (f"Long {i}.", f"Short {i}."), strict=True)) for i in range(2)]
    [question] = read_questions(write(tmp_path, *rows), "hidden_transfer", shots=1)
    assert question.turns == ("Article: Long 0.\nSummary: Short 0.\nArticle: Long 1.\nSummary:",)
    assert question.id == "line 2"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        read_questions(tmp_path / "nowhere.jsonl")


def test_a_choice_takes_as_many_of_every_group_and_grows_without_changing():
    categories = ["qa"] * 20 + ["rag"] * 10 + ["writing"] * 4 + ["math"] * 4 + ["translation"] * 2
    questions = [Question("f", i, category, ("a",), "turns", {}) for i, category in enumerate(categories)]
    chosen = stratified(questions, 12)
    assert Counter(group_of(q.category) for q in chosen) == {"qa": 3, "rag": 3, "mt_bench": 4, "translation": 2}
    assert {q.category for q in chosen if q.category in MT_BENCH} == {"writing", "math"}
    assert [q.id for q in chosen] == sorted(q.id for q in chosen)
    assert {q.id for q in stratified(questions, 7)} < {q.id for q in chosen}
    assert stratified(questions, 0) == stratified(questions, 99) == questions
