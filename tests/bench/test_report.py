"""The report, made from the files of a benchmark alone."""

import dataclasses
import json
import shutil

import pytest

from jaxspec.bench.report import remarks, sections, write_bench_report
from jaxspec.bench.results import load_results
from jaxspec.cli.bench import main
from jaxspec.cli.program import run_main
from jaxspec.errors import UserError
from tests.helpers.files import read_jsonl, write_jsonl


def test_the_report_is_made_from_the_files_alone(finished, capsys):
    folder, _ = finished
    main(["report", str(folder)])
    assert "| medusa |" in capsys.readouterr().out
    text, results = (folder / "report.md").read_text(), load_results(folder)
    assert "jaxspec bench compare --run 'ppd tree=chain:2 adapter=ppd' --run 'medusa adapter=medusa' --data" in text
    assert "1 questions are too long" in text and "Nowhere" in text and "| all (4) |" in text
    assert (folder / "report.png").stat().st_size > 10_000
    overhead = results.overhead["ways"]
    assert set(overhead) == {"ppd tree=chain:2"}  # steps of the other have one of several sizes
    parts = overhead["ppd tree=chain:2"]
    assert parts["nodes"] == 3 and parts["rows"] == results.setting["ways"]["ppd tree=chain:2"]["rows"]
    assert min(parts["plain"], parts["verifying"], parts["whole"]) > 0
    milliseconds = f"| {1e3 * parts['whole']:.1f} |"
    assert milliseconds in text.split("Where the time of a step goes")[1] and "another version" not in text
    older = dataclasses.replace(results, overhead=results.overhead | {"code": "older"})
    assert "another version of the code than the answers" in "".join(sections(older, "##"))
    summary = json.loads((folder / "summary.json").read_text())["ways"]["medusa"]["all"]
    assert summary["speedup"] == dataclasses.asdict(results.figures["medusa"]["all"].speedup)


def test_categories_of_mt_bench_have_columns_of_their_own(finished, tmp_path):
    """Where there are enough questions of them for an interval; here six of writing, and one of mathematics."""
    folder = shutil.copytree(finished[0], tmp_path / "bench")
    for file in (folder / "answers" / "run_1").iterdir():
        rows = read_jsonl(file)
        (writing,) = (row for row in rows if row["category"] == "writing")
        more = [writing | {"question_id": id, "batch": [["questions.jsonl", id]]} for id in range(10, 15)]
        write_jsonl(file, [*rows, *more])
    results = load_results(folder)
    assert list(results.figures["medusa"]) == ["all", "mt_bench", "qa", "rag", "writing"]
    lines = sections(results, "##")
    assert lines[lines.index("## Speedup by category") + 2] == "| method | all (9) | mt_bench (7) | qa (1) | rag (1) |"
    for title in ("Speedup by category of MT-Bench", "Tokens per step by category of MT-Bench"):
        assert lines[lines.index(f"## {title}") + 2] == "| method | writing (6) |"
    assert "of MT-Bench" not in "".join(sections(load_results(finished[0]), "##"))


def test_a_note_of_several_is_said_once(finished):
    results = load_results(finished[0])
    notes = {"a": "costs are typical", "b": "tuned", "c": "costs are typical"}
    setting = results.setting | {"ways": {name: {"note": note} for name, note in notes.items()}}
    assert remarks(dataclasses.replace(results, setting=setting))[:2] == ["a, c: costs are typical.", "b: tuned."]


def test_a_step_is_taken_apart(finished):
    parts = {"nodes": 3, "rows": 5, "plain": 0.02, "verifying": 0.025, "whole": 0.03}
    results = dataclasses.replace(load_results(finished[0]), overhead={"code": "", "ways": {"ppd": parts}})
    assert "| ppd | 3 | 5 | 20.0 | 5.0 | 5.0 | 30.0 |" in sections(results, "##")


def test_a_divergence_is_listed_with_its_gap(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "bench")
    file = folder / "answers/run_1/medusa.jsonl"
    rows = read_jsonl(file)
    found = ({"index": 2, "tokens": [1, 2], "gap": 3e-5}, {"index": 0, "tokens": [1, -1], "gap": None})
    for row, divergence in zip(rows, (*found, {"index": 0, "tokens": [1, 2], "gap": None}), strict=False):
        row["choices"][0]["divergence"] = [divergence]
    write_jsonl(file, rows)
    text = write_bench_report(load_results(folder), folder).read_text()
    assert "turn 1, run 1, from token 3 on; gap 3e-05, a near-tie" in text
    assert "from token 1 on; one answer ends where the other continues" in text
    assert "from token 1 on; a token that the filters let through in one pass and not in the other" in text


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("bench.json", lambda content: {}, "bench.json: model is missing"),
        ("bench.json", lambda content: content | {"settings": "greedy"}, "(settings is 'greedy')"),
        (
            "bench.json",
            lambda content: content | {"settings": content["settings"] | {"colour": "red"}},
            "of another version of this program (colour)",
        ),
        ("overhead.json", lambda content: {}, "overhead.json: code is missing"),
    ],
)
def test_what_is_no_benchmark_is_refused(finished, tmp_path, name, damage, message):
    folder = shutil.copytree(finished[0], tmp_path / "bench")
    (folder / name).write_text(json.dumps(damage(json.loads((folder / name).read_text()))))
    with pytest.raises(UserError) as error:
        load_results(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Expected one of {compare, report, latency, device, kernels}."),
        (
            ["report"],
            "error: Missing from jaxspec bench report: DIR of `jaxspec bench compare` or `jaxspec",
        ),
        (["report", "tests"], "tests: no benchmark there (bench.json is missing)"),
        (["compare", "--data", ""], "--data"),
        (["compare", "--rnu", "ppd"], "unknown option '--rnu' (did you mean '--run'?)"),
        (["latency", "--row", "1"], "unknown option '--row' (did you mean '--rows'?)"),
    ],
)
def test_the_command_line_reports_errors_on_one_line(args, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jaxspec bench", *args])
    with pytest.raises(SystemExit) as stop:
        run_main(main)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
