"""The benchmark from question file to report, on a tiny model."""

import json

import jax
import numpy as np
import pytest

import bench
from jaxspec.cli import run_main
from jaxspec.errors import UserError
from jaxspec.evaluation.answers import Answers
from jaxspec.evaluation.bench import BenchConfig, batches, parse_ways, run_bench, select_questions
from jaxspec.evaluation.bench_report import command, load_results, write_bench_report
from jaxspec.evaluation.questions import Question
from jaxspec.methods import PPD, Medusa
from jaxspec.methods.adapter import Adapter, save_adapter
from tests.tiny import make_text_model

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "math", "turns": ["2+2", "3+3"]},
    {"question_id": 3, "category": "qa", "turns": ["Who?"]},
    {"question_id": 4, "category": "rag", "turns": ["Where is it?"]},
    {"question_id": 5, "category": "qa", "turns": ["Why " * 80]},
]


@pytest.fixture(scope="module")
def model():
    return make_text_model()


@pytest.fixture(scope="module")
def files(tmp_path_factory, model):
    """A question file, and adapters of two methods."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    info = {"accuracy": [[0.3, 0.2, 0.1]] * 4, "tree": [[0], [1], [0, 0]]}
    for method in (PPD(), Medusa()):
        trainable = method.init(jax.random.key(0), model.base)
        save_adapter(folder / method.name, Adapter(method, trainable, model.fingerprint, info))
    return folder


def config_of(files, **changes):
    adapters = f"ppd={files}/ppd,medusa={files}/medusa"
    defaults = {"methods": "ppd=chain:2,medusa", "data": f"{files}/questions.jsonl", "adapters": adapters}
    return BenchConfig(**(defaults | {"max_new_tokens": 8} | changes))


@pytest.fixture(scope="module")
def finished(files, model, tmp_path_factory):
    """A folder with a whole benchmark, and what was said."""
    folder, said = tmp_path_factory.mktemp("finished") / "bench", []
    run_bench(config_of(files), model, folder, said.append)
    return folder, said


def test_every_method_answers_every_question_that_fits(finished):
    folder, said = finished
    assert said == ["left out, too long for the base: questions.jsonl 5"]
    results = load_results(folder)
    assert list(results.figures) == ["autoregressive", "ppd=chain:2", "medusa"]
    for groups in results.figures.values():
        assert list(groups) == ["all", "mt_bench", "qa", "rag"]
        assert groups["all"].identical == groups["all"].answers == 6 and groups["mt_bench"].answers == 4
    assert results.figures["autoregressive"]["all"].tokens_per_step == 1
    assert results.memory["peak_bytes"] > 0 and results.memory["method_bytes"]["medusa"] > 0


def test_answers_are_in_spec_benchs_format(finished):
    """What its speed script computes from the files is what the report says."""
    folder, _ = finished
    answers = Answers(folder, ["autoregressive", "medusa"])
    rows = {way: [json.loads(line) for line in answers.file(way, 1).open()] for way in ("autoregressive", "medusa")}
    speeds = {}
    for way, found in rows.items():
        assert [row["question_id"] for row in found] != [] and {row["model_id"] for row in found} == {f"tiny-{way}"}
        choices = [row["choices"][0] for row in found]
        for choice in choices:
            assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - len(choice["new_tokens"])
        speeds[way] = np.mean([sum(c["new_tokens"]) / sum(c["wall_time"]) for c in choices])
    figures = load_results(folder).figures["medusa"]["all"]
    assert figures.spec_bench_speedup == pytest.approx(speeds["medusa"] / speeds["autoregressive"])
    lengths = [length for row in rows["medusa"] for length in row["choices"][0]["accept_lengths"]]
    assert figures.tokens_per_step == pytest.approx(np.mean(lengths))


def test_the_report_is_made_from_the_files_alone(finished, capsys):
    folder, _ = finished
    bench.main(["report", str(folder)])
    assert "| medusa |" in capsys.readouterr().out
    text = (folder / "report.md").read_text()
    assert "python bench.py --methods ppd=chain:2,medusa --data questions.jsonl" in text
    assert "1 questions are too long" in text and "Nowhere" in text and "| all (4) |" in text
    assert (folder / "report.png").stat().st_size > 10_000
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ways"]["medusa"]["all"]["speedup"]["low"] <= summary["ways"]["medusa"]["all"]["speedup"]["value"]


def test_a_killed_benchmark_goes_on_where_it_stopped(files, model, finished, tmp_path):
    folder, config = tmp_path / "bench", config_of(files)
    run_bench(config, model, folder, lambda line: None)
    answers = Answers(folder, ["autoregressive", "ppd=chain:2", "medusa"])
    file = answers.file("medusa", 1)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]) + lines[-2][:40])  # one answer missing, one cut in the middle
    kept = json.loads(lines[0])["answer_id"]
    assert len(answers.read(1)["ppd=chain:2"]) == 2
    run_bench(config, model, folder, lambda line: None)
    again = [json.loads(line) for line in file.open()]
    assert sorted(row["question_id"] for row in again) == [1, 2, 3, 4] and again[0]["answer_id"] == kept
    whole = [json.loads(line) for line in Answers(finished[0], ["medusa"]).file("medusa", 1).open()]
    texts = [{row["question_id"]: row["choices"][0]["turns"] for row in rows} for rows in (again, whole)]
    assert texts[0] == texts[1]


def test_sampling_repeats_and_batches_are_lossless(files, model, tmp_path):
    config = config_of(files, methods="ppd,autoregressive,autoregressive", adapters=f"ppd={files}/ppd", repeats=2)
    changes = {"batch_size": 2, "temperature": 0.8, "mt_bench_temperatures": True, "seed": 5}
    run_bench(config.__class__(**(vars(config) | changes)), model, tmp_path / "b", lambda line: None)
    results = load_results(tmp_path / "b")
    assert list(results.figures) == ["autoregressive", "ppd", "autoregressive again"]
    for groups in results.figures.values():
        assert groups["all"].identical == groups["all"].answers == 12 and len(groups["all"].run_speedups) == 2
    first, second = ([row["choices"][0]["turns"] for row in run] for run in results.rows["ppd"])
    assert first != second  # another seed
    assert "±" in write_bench_report(tmp_path / "b").read_text()


def test_batches_share_turns_and_temperature():
    categories = ["writing", "qa", "roleplay", "math", "qa", "stem"]
    questions = [Question("f", i, c, ("a",) * (1 if c == "qa" else 2), {}) for i, c in enumerate(categories)]
    ids = lambda config: [[q.id for q in batch] for batch in batches(questions, config)]  # noqa: E731
    assert ids(BenchConfig(batch_size=2)) == [[0, 2], [1, 4], [3, 5]]
    assert ids(BenchConfig(batch_size=2, mt_bench_temperatures=True)) == [[0, 2], [1, 4], [3], [5]]
    assert ids(BenchConfig()) == [[i] for i in range(6)]


def test_a_divergence_is_listed_with_its_gap(finished, tmp_path):
    folder, _ = finished
    (tmp_path / "answers" / "run_1").mkdir(parents=True)
    for name in ("bench.json", "answers/run_1/autoregressive.jsonl", "answers/run_1/ppd=chain-2.jsonl"):
        (tmp_path / name).write_text((folder / name).read_text())
    rows = [json.loads(line) for line in (folder / "answers/run_1/medusa.jsonl").open()]
    rows[0]["choices"][0]["identical"][0] = False
    rows[0]["choices"][0]["divergence"][0] = {"index": 2, "tokens": [1, 2], "gap": 3e-5}
    (tmp_path / "answers/run_1/medusa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_bench_report(tmp_path).read_text()
    assert "turn 1, run 1, from token 3 on; gap 3e-05, a near-tie" in text and "5 of 6" in text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": ""}, "--data"),
        ({"limit": -1}, "limit must be at least 0"),
        ({"max_new_tokens": 1}, "max-new-tokens must be at least 2"),
        ({"temperature": -1.0}, "temperature"),
        ({"methods": "ppd,medusaa"}, "unknown method 'medusaa' (did you mean 'medusa'?)"),
        ({"methods": "ppd@x"}, "method 'ppd@x': expected METHOD"),
        ({"methods": "ppd=chain:9"}, "chain:9"),
        ({"methods": "ppd@100"}, "draft-vocabulary 100: the adapter does not say"),
        ({"methods": "ppd=auto@5"}, "brings its own draft vocabulary"),
        ({"methods": "ppd"}, "adapters: medusa is not among the methods"),
        ({"adapters": "ppd"}, "expected METHOD=FOLDER"),
        ({"data": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"max_new_tokens": 4000}, "no question fits"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(files, model, tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        run_bench(config_of(files, **changes), model, tmp_path / "bench", lambda line: None)
    assert message in str(error.value)
    assert not (tmp_path / "bench").exists()


def test_a_folder_with_other_results_is_left_alone(files, model, finished, tmp_path):
    folder, _ = finished
    before = (folder / "bench.json").read_text()
    with pytest.raises(UserError, match="holds another benchmark \\(other settings\\)"):
        run_bench(config_of(files, max_new_tokens=9), model, folder, lambda line: None)
    assert (folder / "bench.json").read_text() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        run_bench(config_of(files), model, tmp_path, lambda line: None)


def test_the_command_line_reports_errors_on_one_line(monkeypatch, capsys, tmp_path):
    for args, message in (
        (["report", str(tmp_path)], "bench.json is missing"),
        (["report"], "give one folder"),
        (["--data", ""], "--data"),
        (["--metods", "ppd"], "did you mean '--methods'?"),
    ):
        monkeypatch.setattr("sys.argv", ["bench.py", *args])
        with pytest.raises(SystemExit) as stop:
            run_main(bench.main)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1


def test_a_tree_may_hold_commas(files, model):
    ways = parse_ways(config_of(files, methods="ppd=cartesian:2,1,medusa,ppd"), model)
    assert list(ways) == ["autoregressive", "ppd=cartesian:2,1", "medusa", "ppd"]
    assert ways["ppd"].drafter.tree.num_nodes == 4


def test_the_command_repeats_the_benchmark():
    setting = {"settings": vars(BenchConfig(methods="ppd", repeats=3, mt_bench_temperatures=True))}
    setting["settings"] = setting["settings"] | {"data": ["a.jsonl", "b.jsonl"]}
    expected = "python bench.py --methods ppd --data a.jsonl,b.jsonl --mt-bench-temperatures --repeats 3"
    assert command(setting) == expected


def test_long_conversations_are_left_out(files, model):
    fit, long = select_questions(config_of(files, max_new_tokens=120), model)
    assert [q.id for q in fit] == [3, 4] and [q.id for q in long] == [1, 2, 5]
