"""A benchmark that was stopped, or is asked for more, is resumed; one of other settings is left alone."""

import dataclasses
import json
import shutil

import pytest

import jaxspec.bench.run
import jaxspec.cli.bench
from jaxspec.bench.answers import Answers
from jaxspec.bench.report import write_bench_report
from jaxspec.bench.results import load_results
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError
from jaxspec.files import exclusive
from tests.helpers.bench import config_of, run, texts_of
from tests.helpers.files import change_json, read_jsonl, write_jsonl


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of a finished benchmark."""
    return shutil.copytree(finished[0], tmp_path / "bench")


def test_a_killed_benchmark_resumes_where_it_stopped(files, model, finished, folder):
    answers = Answers(folder, ["autoregressive", "ppd tree=chain:2", "medusa"])
    file = answers.file("medusa", 1)
    lines = file.read_bytes().splitlines(keepends=True)
    torn = lines[-2][: lines[-2].index(b'"turns"') + 12] + "é".encode()[:1]  # in the middle of a letter
    file.write_bytes(b"".join(lines[:-2]) + torn)  # one answer missing, one cut
    kept = json.loads(lines[0])["answer_id"]
    assert len(answers.read(1)["ppd tree=chain:2"]) == 2
    assert "**Unfinished: 2 of 4 answers are there.**" in write_bench_report(load_results(folder), folder).read_text()
    change_json(folder / "memory.json", peak_bytes=10**15)
    assert run(config_of(files), model, folder).memory["peak_bytes"] == 10**15
    again = read_jsonl(file)
    assert sorted(row["question_id"] for row in again) == [1, 2, 3, 4] and again[0]["answer_id"] == kept
    assert texts_of(folder, "medusa") == texts_of(finished[0], "medusa")
    file.write_bytes(b"{broken\n" + file.read_bytes())
    with pytest.raises(UserError, match=r"medusa\.jsonl:1: damaged"):
        load_results(folder)
    file.write_text('{"question_id": 1}\n')
    with pytest.raises(UserError, match=r"medusa\.jsonl:1: damaged \(no category\)"):
        load_results(folder)


def test_a_larger_limit_asks_more_questions(files, model, finished, tmp_path):
    """What was answered stays; a smaller limit, or other questions, are another benchmark."""
    folder, config = tmp_path / "bench", config_of(files, "autoregressive", "autoregressive", limit=2)
    run(config, model, folder)
    file = Answers(folder, []).file("autoregressive", 1)
    first = file.read_text()
    assert first.count("\n") == 2
    results = run(dataclasses.replace(config, limit=3), model, folder)
    assert file.read_text().startswith(first) and file.read_text().count("\n") == 3
    assert (results.setting["settings"]["limit"], results.setting["questions"]) == (3, 3)
    assert "Unfinished" not in write_bench_report(results, folder).read_text()
    others = tmp_path / "questions.jsonl"
    others.write_text((files / "questions.jsonl").read_text().replace("?", "!"))
    for changes, difference in (
        ({}, "limit 3, not 2"),
        ({"limit": 0, "max_new_tokens": 9}, "max-new-tokens 8, not 9"),
        ({"limit": 0, "data": str(others)}, "other questions"),
    ):
        with pytest.raises(UserError, match=rf"holds another benchmark \({difference}\)"):
            run(dataclasses.replace(config, **changes), model, folder)
    setting = (folder / "bench.json").read_text()
    with exclusive(folder), pytest.raises(UserError, match="another process is writing there"):
        run(dataclasses.replace(config, limit=0), model, folder)
    assert (folder / "bench.json").read_text() == setting
    (folder / "perplexity.json").write_text('{"autoregressive": 1.5, "autoregressive again": 1.5}')  # of three
    run(dataclasses.replace(config, limit=0), model, folder)
    assert texts_of(folder, "autoregressive") == texts_of(finished[0], "autoregressive")
    assert not (folder / "perplexity.json").exists()


def test_runs_whose_files_would_be_one_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"several runs would write draft_model-draft=owner-m\.jsonl"):
        Answers(tmp_path, ["draft_model draft=owner/m", "draft_model draft=owner-m"])


@pytest.mark.slow
def test_batches_are_whole_and_do_not_grow(files, model, tmp_path):
    config = config_of(files, "autoregressive", batch_size=2, limit=4)
    run(config, model, tmp_path)
    answers = Answers(tmp_path, ["autoregressive"])
    rows = read_jsonl(answers.file("autoregressive", 1))
    assert [len(row["batch"]) for row in rows if row["category"] in ("writing", "math")] == [2, 2]
    write_jsonl(answers.file("autoregressive", 1), [row for row in rows if row["category"] != "math"])
    assert {row["category"] for row in answers.read(1)["autoregressive"]} == {"qa", "rag"}
    with pytest.raises(UserError, match="holds 4 questions, in batches that more questions would change"):
        run(dataclasses.replace(config, limit=0), model, tmp_path)


def test_ctrl_c_keeps_what_is_finished(files, model, tmp_path, monkeypatch, capsys):
    """And says how to resume."""
    ask, asked = jaxspec.bench.run.ask, []

    def interrupted(*args):
        if asked:
            raise KeyboardInterrupt
        asked.append(ask(*args))

    monkeypatch.setattr(jaxspec.bench.run, "ask", interrupted)
    monkeypatch.setattr(jaxspec.cli.bench, "load_base", lambda name, dtype, mesh, template, weights: model)
    config = config_of(files, "medusa")
    args = ["--run", *config.runs, "--data", config.data, "--max-new-tokens", "8", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["jaxspec bench", "compare", *args])
    with pytest.raises(SystemExit) as stop:
        run_main(jaxspec.cli.bench.main)
    error = capsys.readouterr().err
    assert stop.value.code == 130 and f"the answers so far are in {tmp_path}: the same command resumes" in error
    read = Answers(tmp_path, ["autoregressive", "medusa"]).read(1)
    assert {way: len(rows) for way, rows in read.items()} == {"autoregressive": 1, "medusa": 1}


def test_a_folder_with_other_results_is_left_alone(files, model, folder, tmp_path):
    before = (folder / "bench.json").read_text()
    with pytest.raises(UserError, match=r"holds another benchmark \(max-new-tokens 8, not 9\)"):
        run(config_of(files, max_new_tokens=9), model, folder)
    assert (folder / "bench.json").read_text() == before
    (folder / "bench.json").write_text("{}")
    with pytest.raises(UserError, match="model is missing"):
        run(config_of(files), model, folder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        run(config_of(files), model, tmp_path / "notes.txt")
    with pytest.raises(UserError, match="holds other files"):
        run(config_of(files), model, tmp_path)


def test_answers_of_other_code_are_reported_but_not_added_to(files, model, folder):
    change_json(folder / "bench.json", code="older")
    run(config_of(files), model, folder)
    file = Answers(folder, []).file("medusa", 1)
    write_jsonl(file, read_jsonl(file)[:-1])
    with pytest.raises(UserError, match=r"holds answers of another version of the code \(older\): resume with that"):
        run(config_of(files), model, folder)
