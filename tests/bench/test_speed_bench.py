"""SPEED-Bench: its files, its placeholders, and its figures."""

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxspec.bench.questions import group_of, read_questions
from jaxspec.bench.report import write_bench_report
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.errors import UserError
from jaxspec.methods import Medusa
from tests.helpers.bench import config_of, run
from tests.helpers.files import write_jsonl

MARKER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def question(number, category="coding", turns=("Sort a list.",), **changes):
    """A row as published."""
    row = {"question_id": f"{number:032x}", "category": category, "sub_category": None, "turns": list(turns)}
    row |= {"source": "somewhere", "src_id": str(number), "difficulty": None, "multiturn": len(turns) > 1}
    return row | changes


ROWS = [
    question(1, turns=("Write a loop.", "And another.")),
    question(2, "multilingual", ("把这句话翻译成英文",), sub_category="zh"),
    question(3, "writing", ("Write a poem.",), difficulty="easy"),
]


@pytest.fixture(params=["parquet", "jsonl", "prepared"])
def split(request, tmp_path):
    """A file of ROWS: parquet as published, the same rows as JSONL, or as the benchmark's script writes them."""
    if request.param == "parquet":
        file = tmp_path / "test-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
        return file
    rows = ROWS
    if request.param == "prepared":
        rows = [row | {"messages": [{"role": "user", "content": turn} for turn in row["turns"]]} for row in ROWS]
        for row in rows:
            del row["turns"]
    return write_jsonl(tmp_path / "qualitative.jsonl", rows)


def test_a_split_is_read_in_every_form(split):
    questions = read_questions(split)
    assert [q.turns for q in questions] == [tuple(row["turns"]) for row in ROWS]
    assert [q.id for q in questions] == [row["question_id"] for row in ROWS]
    assert [q.row["sub_category"] for q in questions] == [None, "zh", None]
    # MT-Bench has a category `writing`, too, which is another one
    assert [group_of(q.category) for q in questions] == ["speed/coding", "speed/multilingual", "speed/writing"]


@pytest.mark.parametrize("turns", [[], None, [""], [MARKER], [f"{MARKER}\n\nSummarize: {{article}}"], ["Hi", MARKER]])
def test_placeholders_are_refused_by_name_or_left_out(tmp_path, turns):
    waiting = question(0xABC, turns=()) | {"turns": turns}
    file = write_jsonl(tmp_path / "qualitative.jsonl", [*ROWS, waiting])
    with pytest.raises(UserError, match=r"1 of 4 questions are placeholders.* 0*abc; give .*--skip-placeholders"):
        read_questions(file)
    assert len(read_questions(file, skip_placeholders=True)) == 3


def test_a_file_of_placeholders_alone_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "throughput_1k.jsonl", [question(n, turns=(MARKER,)) for n in range(20)])
    for skip in (False, True):
        with pytest.raises(UserError, match=r"20 of 20 questions .* and 12 more; give the file that it writes$"):
            read_questions(file, skip_placeholders=skip)


def test_messages_must_be_the_users(tmp_path):
    rows = [question(1, messages=[{"role": "system", "content": "Be brief."}])]
    del rows[0]["turns"]
    with pytest.raises(UserError, match=r"q\.jsonl:1: expected messages of the user alone, found .*Be brief"):
        read_questions(write_jsonl(tmp_path / "q.jsonl", rows))


@pytest.mark.parametrize("content", [b"", b"PAR1 and something else", None])
def test_what_is_no_parquet_file_is_named(tmp_path, content):
    file = tmp_path / "split.parquet"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"split\.parquet: (not a parquet file|cannot be read)"):
        read_questions(file)


@pytest.mark.slow
def test_length_rate_and_conditional_acceptance_by_category(model, tmp_path, quickly):
    """Of multilingual prompts, too, and with a draft vocabulary that lacks their tokens: the text stays the same."""
    method, ids = Medusa(), np.arange(257, dtype=np.int32)
    trainable = method.init(jax.random.key(0), model.base)
    info = {"accuracy": [[0.3]] * 4, "tree": [[0]]}
    save_adapter(tmp_path / "medusa", Adapter(method, trainable, model.fingerprint, info, ids))
    write_jsonl(tmp_path / "questions.jsonl", ROWS)
    ways = ["medusa tree=chain:3", "medusa tree=chain:3 vocabulary=128"]
    results = run(config_of(tmp_path, *ways), model, tmp_path / "bench")
    assert list(results.figures) == ["autoregressive", *ways]
    for way in ways:
        figures = results.figures[way]
        assert list(figures) == ["all", "speed/coding", "speed/multilingual", "speed/writing"]
        assert figures["all"].identical == figures["all"].answers == 4
        choices = [row["choices"][0] for row in results.rows[way][0]]
        accepted, drafted = (
            np.sum([np.sum(choice[name]) for choice in choices]) for name in ("accepted", "candidates")
        )
        assert 0 < drafted <= 3 * sum(sum(choice["decoding_steps"]) for choice in choices)
        assert figures["all"].acceptance_rate == accepted / drafted
    text = write_bench_report(results, tmp_path / "bench").read_text()
    table = text.split("## SPEED-Bench")[1].split("##")[0]
    assert "| category | method | questions | length | rate | position 1 |" in table
    found = results.figures[ways[0]]["speed/multilingual"]
    numbers = f"| 1 | {found.tokens_per_step:.2f} | {found.acceptance_rate:.3f} | {found.acceptance[0]:.3f} |"
    assert f"| multilingual | {ways[0]} {numbers}" in table
