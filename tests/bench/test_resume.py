"""A benchmark that was stopped, or is asked for more, goes on; one of other settings is left alone."""

import dataclasses
import json
import shutil

import pytest

import bench
import jaxspec.bench.run
from jaxspec.bench.answers import Answers
from jaxspec.bench.report import load_results, write_bench_report
from jaxspec.bench.run import run_bench
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError
from jaxspec.files import alone_in
from tests.helpers.bench import config_of, texts_of


def test_answers_of_a_time_when_there_were_fewer_options(files, model, finished, tmp_path):
    """They are shown, and asked for with the same command, although they do not say what they did not know of."""
    folder = shutil.copytree(finished[0], tmp_path / "older")
    known = json.loads((folder / "bench.json").read_text())
    del known["settings"]["template"], known["settings"]["mesh"]["zero"]
    (folder / "bench.json").write_text(json.dumps(known))
    assert load_results(folder).setting["settings"]["template"] == ""
    run_bench(config_of(files), model, folder, lambda line: None)


def test_a_killed_benchmark_goes_on_where_it_stopped(files, model, finished, tmp_path):
    folder, config = tmp_path / "bench", config_of(files)
    shutil.copytree(finished[0], folder)
    answers = Answers(folder, ["autoregressive", "ppd=chain:2", "medusa"])
    file = answers.file("medusa", 1)
    lines = file.read_bytes().splitlines(keepends=True)
    torn = lines[-2][: lines[-2].index(b'"turns"') + 12] + "é".encode()[:1]  # in the middle of a letter
    file.write_bytes(b"".join(lines[:-2]) + torn)  # one answer missing, one cut
    kept = json.loads(lines[0])["answer_id"]
    assert len(answers.read(1)["ppd=chain:2"]) == 2
    assert "**Unfinished: 2 of 4 answers are there.**" in write_bench_report(load_results(folder), folder).read_text()
    memory = json.loads((folder / "memory.json").read_text())
    (folder / "memory.json").write_text(json.dumps(memory | {"peak_bytes": 10**15}))
    run_bench(config, model, folder, lambda line: None)
    assert json.loads((folder / "memory.json").read_text())["peak_bytes"] == 10**15
    again = [json.loads(line) for line in file.open()]
    assert sorted(row["question_id"] for row in again) == [1, 2, 3, 4] and again[0]["answer_id"] == kept
    assert texts_of(folder, "medusa") == texts_of(finished[0], "medusa")
    file.write_bytes(b"{broken\n" + file.read_bytes())
    with pytest.raises(UserError, match=r"medusa\.jsonl:1: damaged"):
        load_results(folder)
    file.write_text('{"question_id": 1}\n')
    with pytest.raises(UserError, match=r"medusa\.jsonl:1: damaged \(no category\)"):
        load_results(folder)


def test_a_larger_limit_goes_on_with_more_questions(files, model, finished, tmp_path):
    """What was answered stays; a smaller limit, or other questions, are another benchmark."""
    folder, config = tmp_path / "bench", config_of(files, methods="autoregressive,autoregressive", adapters="", limit=2)
    run_bench(config, model, folder, lambda line: None)
    file = Answers(folder, ["autoregressive"]).file("autoregressive", 1)
    first = file.read_text()
    assert first.count("\n") == 2
    run_bench(dataclasses.replace(config, limit=3), model, folder, lambda line: None)
    assert file.read_text().startswith(first) and file.read_text().count("\n") == 3
    results = load_results(folder)
    assert (results.setting["settings"]["limit"], results.setting["questions"]) == (3, 3)
    assert "Unfinished" not in write_bench_report(results, folder).read_text()
    with pytest.raises(UserError, match=r"holds another benchmark \(limit 3, not 2\)"):
        run_bench(config, model, folder, lambda line: None)
    with pytest.raises(UserError, match=r"holds another benchmark \(max-new-tokens 8, not 9\)"):
        run_bench(dataclasses.replace(config, limit=0, max_new_tokens=9), model, folder, lambda line: None)
    others = tmp_path / "questions.jsonl"
    others.write_text((files / "questions.jsonl").read_text().replace("?", "!"))
    with pytest.raises(UserError, match=r"holds another benchmark \(other questions\)"):
        run_bench(dataclasses.replace(config, limit=0, data=str(others)), model, folder, lambda line: None)
    setting = (folder / "bench.json").read_text()
    with alone_in(folder), pytest.raises(UserError, match="another process is writing there"):
        run_bench(dataclasses.replace(config, limit=0), model, folder, lambda line: None)
    assert (folder / "bench.json").read_text() == setting
    (folder / "perplexity.json").write_text('{"autoregressive": 1.5, "autoregressive again": 1.5}')  # of three
    run_bench(dataclasses.replace(config, limit=0), model, folder, lambda line: None)
    assert texts_of(folder, "autoregressive") == texts_of(finished[0], "autoregressive")
    assert not (folder / "perplexity.json").exists()


def test_batches_do_not_grow(files, model, tmp_path):
    config = config_of(files, methods="autoregressive", adapters="", limit=2, batch_size=2)
    run_bench(config, model, tmp_path / "b", lambda line: None)
    with pytest.raises(UserError, match="holds 2 questions, of batches that more questions would change"):
        run_bench(dataclasses.replace(config, limit=3), model, tmp_path / "b", lambda line: None)


def test_ctrl_c_keeps_what_is_finished(files, model, tmp_path, monkeypatch, capsys):
    """And says how to go on."""
    ask, asked = jaxspec.bench.run._ask, []

    def interrupted(*args):
        if asked:
            raise KeyboardInterrupt
        asked.append(ask(*args))

    monkeypatch.setattr(jaxspec.bench.run, "_ask", interrupted)
    monkeypatch.setattr(bench, "load_model", lambda name, dtype, mesh, template: model)
    folder, adapters = tmp_path / "bench", f"medusa={files}/medusa"
    args = [
        "--methods",
        "medusa",
        "--adapters",
        adapters,
        "--data",
        f"{files}/questions.jsonl",
        "--max-new-tokens",
        "8",
    ]
    monkeypatch.setattr("sys.argv", ["bench.py", *args, "--output", str(folder)])
    with pytest.raises(SystemExit) as stop:
        run_main(bench.main)
    error = capsys.readouterr().err
    assert stop.value.code == 130 and f"answers so far are in {folder}: the same command goes on" in error
    assert {way: len(rows) for way, rows in Answers(folder, ["autoregressive", "medusa"]).read(1).items()} == {
        "autoregressive": 1,
        "medusa": 1,
    }


def test_half_a_batch_does_not_count(files, model, tmp_path):
    config = config_of(files, methods="ppd", adapters=f"ppd={files}/ppd", batch_size=2)
    run_bench(config, model, tmp_path / "b", lambda line: None)
    answers = Answers(tmp_path / "b", ["autoregressive", "ppd"])
    file = answers.file("ppd", 1)
    rows = [json.loads(line) for line in file.open()]
    assert [len(row["batch"]) for row in rows if row["category"] in ("writing", "math")] == [2, 2]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["category"] != "math"))
    assert {row["category"] for row in answers.read(1)["ppd"]} == {"qa", "rag"}


def test_a_folder_with_other_results_is_left_alone(files, model, finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "bench")
    before = (folder / "bench.json").read_text()
    with pytest.raises(UserError, match="holds another benchmark \\(max-new-tokens 8, not 9\\)"):
        run_bench(config_of(files, max_new_tokens=9), model, folder, lambda line: None)
    assert (folder / "bench.json").read_text() == before
    (folder / "bench.json").write_text("{}")
    with pytest.raises(UserError, match="not what a benchmark writes"):
        run_bench(config_of(files), model, folder, lambda line: None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        run_bench(config_of(files), model, tmp_path / "notes.txt", lambda line: None)
    with pytest.raises(UserError, match="holds other files"):
        run_bench(config_of(files), model, tmp_path, lambda line: None)


def test_answers_of_other_code_are_reported_but_not_added_to(files, model, finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "bench")
    setting = json.loads((folder / "bench.json").read_text())
    (folder / "bench.json").write_text(json.dumps(setting | {"code": "of another version"}))
    run_bench(config_of(files), model, folder, lambda line: None)
    file = folder / "answers" / "run_1" / "medusa.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="holds answers of another version of the code that decodes: go on with that"):
        run_bench(config_of(files), model, folder, lambda line: None)
