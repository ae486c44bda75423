"""The benchmark from question file to report, on a tiny model."""

import dataclasses
import json
import shlex
import shutil

import jax
import numpy as np
import pytest

import bench
from jaxspec.bench.answers import Answers
from jaxspec.bench.config import BenchConfig
from jaxspec.bench.questions import Question
from jaxspec.bench.report import command, load_results, sections, write_bench_report
from jaxspec.bench.run import _shuffled, batches, converse, partings, run_bench, select_questions
from jaxspec.bench.ways import MethodWay, parse_ways
from jaxspec.cli.options import parse, run_main
from jaxspec.decoding.divergence import first_divergence
from jaxspec.drafting.adapter import Adapter, load_method, open_adapter, save_adapter
from jaxspec.drafting.choice import Choice, save_choice
from jaxspec.drafting.tree import chain
from jaxspec.errors import UserError
from jaxspec.machine import this_machine
from jaxspec.methods import SPACE
from tests.helpers.bench import config_of, texts_of
from tests.helpers.model import plain
from tests.helpers.tiny import on_mesh


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


def test_devices_may_share_the_work(finished, files, model, tmp_path, monkeypatch):
    """Everything, parts of the step included, over two devices; the same answers."""
    config = config_of(files)
    monkeypatch.setattr(bench, "load_model", lambda name, dtype, mesh, template: on_mesh(model, mesh))
    settings = {"methods": config.methods, "adapters": config.adapters, "data": config.data, "max-new-tokens": "8"}
    settings |= {"mesh.tensor": "2", "output": str(tmp_path / "bench")}
    bench.main([word for name, value in settings.items() for word in (f"--{name}", value)])
    ours, theirs = (Answers(folder, ["medusa"]).read(1)["medusa"] for folder in (tmp_path / "bench", finished[0]))
    said = ({row["question_id"]: row["choices"][0]["turns"] for row in rows} for rows in (ours, theirs))
    assert next(said) == next(said)
    results = load_results(tmp_path / "bench")
    assert results.figures["medusa"]["all"].identical == 6 and "--mesh.tensor 2" in command(results.setting)


def test_answers_are_in_spec_benchs_format(finished):
    """What Spec-Bench's script reads is there, and its two means are those of the report."""
    folder, _ = finished
    answers = Answers(folder, ["autoregressive", "medusa"])
    rows = {way: [json.loads(line) for line in answers.file(way, 1).open()] for way in ("autoregressive", "medusa")}
    speeds = {}
    for way, found in rows.items():
        assert sorted(row["question_id"] for row in found) == [1, 2, 3, 4]
        assert {row["model_id"] for row in found} == {f"tiny-{way}"}
        choices = [row["choices"][0] for row in found]
        for choice in choices:
            assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - len(choice["new_tokens"])
        speeds[way] = np.mean([sum(c["new_tokens"]) / sum(c["wall_time"]) for c in choices])
    figures = load_results(folder).figures["medusa"]["all"]
    assert figures.with_prefill == pytest.approx(speeds["medusa"] / speeds["autoregressive"])
    lengths = [length for row in rows["medusa"] for length in row["choices"][0]["accept_lengths"]]
    assert figures.tokens_per_step == pytest.approx(np.mean(lengths))


def test_the_report_is_made_from_the_files_alone(finished, capsys):
    folder, _ = finished
    bench.main(["report", str(folder)])
    assert "| medusa |" in capsys.readouterr().out
    text = (folder / "report.md").read_text()
    assert "python bench.py --methods ppd=chain:2,medusa --data questions.jsonl" in text
    assert "1 questions of the files are too long" in text and "Nowhere" in text and "| all (4) |" in text
    assert (folder / "report.png").stat().st_size > 10_000
    overhead = json.loads((folder / "overhead.json").read_text())
    assert set(overhead["ways"]) == {"ppd=chain:2", "medusa"} and overhead["ways"]["ppd=chain:2"]["nodes"] == 3
    assert all(p["rows"] == load_results(folder).setting["ways"][way]["rows"] for way, p in overhead["ways"].items())
    whole = f"| {1e3 * overhead['ways']['medusa']['whole']:.1f} |"
    assert whole in text.split("Where the time of a step goes")[1] and "another version" not in text
    assert all(min(parts["plain"], parts["verifying"], parts["whole"]) > 0 for parts in overhead["ways"].values())
    older = dataclasses.replace(load_results(folder), overhead=overhead | {"code": "older"})
    assert "another version of the code than the answers" in "".join(sections(older, "##"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ways"]["medusa"]["all"]["speedup"] == {
        "value": load_results(folder).figures["medusa"]["all"].speedup.value, "low": None, "high": None,
    }  # fmt: skip


def test_sampling_repeats_and_batches_are_lossless(files, model, tmp_path):
    shared = {"methods": "ppd, autoregressive,autoregressive", "adapters": f"ppd={files}/ppd", "repeats": 2}
    shared |= {"mt_bench_temperatures": True, "temperature": 0.8, "seed": 5}
    for size in (1, 2):
        run_bench(config_of(files, **shared, batch_size=size), model, tmp_path / str(size), lambda line: None)
    results = load_results(tmp_path / "2")
    assert list(results.figures) == ["autoregressive", "ppd", "autoregressive again"]
    for groups in results.figures.values():
        assert groups["all"].identical == groups["all"].answers == 12 and len(groups["all"].run_speedups) == 2
    one, two = (texts_of(tmp_path / "2", "ppd", run) for run in (1, 2))
    assert one == texts_of(tmp_path / "1", "ppd") and two == texts_of(tmp_path / "1", "ppd", 2)
    assert one[2] == two[2]  # math is greedy
    assert all(one[name] != two[name] for name in (1, 3, 4))  # the others are drawn with another seed
    assert "±" in write_bench_report(load_results(tmp_path / "2"), tmp_path / "2").read_text()


def other(answer, place):
    """An answer with another token at a place."""
    tokens = list(answer.tokens)
    tokens[place] = (tokens[place] + 1) % 200
    return dataclasses.replace(answer, tokens=tokens)


def test_where_answers_part_is_found_turn_by_turn(files, model):
    config = config_of(files, temperature=0.9)
    [question, *_] = select_questions(config, model)[0]
    plain = converse(model, MethodWay("plain", {}, load_method("autoregressive", model)), [question], config, seed=4)
    assert partings(model, config, question, plain, plain, 4) == [None, None]
    [none, second] = partings(model, config, question, [plain[0], other(plain[1], 3)], plain, 4)
    assert none is None and second.index == 3 and second.gap > 0
    prompt = model.encode([question.turns[0], plain[0].text, question.turns[1]])
    tokens = other(plain[1], 3).tokens
    assert second == first_divergence(model, prompt, tokens, plain[1].tokens, config.sampling(0.9), 4)
    [first] = partings(model, config, question, [other(plain[0], 0), plain[1]], plain, 4)
    assert first.index == 0  # and nothing is said of the second turn


def test_batches_share_turns_and_temperature():
    categories = ["writing", "qa", "roleplay", "math", "qa", "stem", "rag"]
    questions = [Question("f", i, c, ("a",) * (1 if c == "qa" else 2), "turns", {}) for i, c in enumerate(categories)]

    def ids(config):
        return [[q.id for q in batch] for batch in batches(questions, config)]

    assert ids(BenchConfig(batch_size=2)) == [[0, 2], [1, 4], [3, 5], [6]]
    assert ids(BenchConfig(batch_size=2, mt_bench_temperatures=True)) == [[0, 2], [1, 4], [3], [5], [6]]
    assert ids(BenchConfig()) == [[i] for i in range(7)]


def test_questions_are_asked_in_an_order_of_their_own(finished):
    folder, _ = finished
    rows = [json.loads(line) for line in (folder / "answers/run_1/medusa.jsonl").open()]
    asked = [Question(row["data"], row["question_id"], "", (), "turns", {}) for row in rows]
    in_order = sorted(asked, key=lambda question: (question.data, str(question.id)))
    assert _shuffled(asked) == _shuffled(in_order) == asked != in_order


def test_a_divergence_is_listed_with_its_gap(finished, tmp_path):
    folder, _ = finished
    (tmp_path / "answers" / "run_1").mkdir(parents=True)
    answers = [f"answers/run_1/{way}.jsonl" for way in ("autoregressive", "ppd=chain-2")]
    for name in ("bench.json", *answers):
        (tmp_path / name).write_text((folder / name).read_text())
    rows = [json.loads(line) for line in (folder / "answers/run_1/medusa.jsonl").open()]
    rows[0]["choices"][0]["divergence"] = [{"index": 2, "tokens": [1, 2], "gap": 3e-5}]
    rows[1]["choices"][0]["divergence"] = [{"index": 0, "tokens": [1, -1], "gap": None}]
    rows[2]["choices"][0]["divergence"] = [{"index": 0, "tokens": [1, 2], "gap": None}]
    (tmp_path / "answers/run_1/medusa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_bench_report(load_results(tmp_path), tmp_path).read_text()
    assert "turn 1, run 1, from token 3 on; gap 3e-05, a near-tie" in text
    assert "from token 1 on; one answer ends where the other goes on" in text
    assert "from token 1 on; a token that the filters let through in one pass and not in the other" in text


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
        ({"data": "a/b.jsonl,c/b.jsonl"}, "different names"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(files, model, tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        run_bench(config_of(files, **changes), model, tmp_path / "bench", lambda line: None)
    assert message in str(error.value)
    assert not (tmp_path / "bench").exists()


def test_the_command_line_reports_errors_on_one_line(finished, monkeypatch, capsys, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "bench.json").write_text("{}")
    newer = shutil.copytree(finished[0], tmp_path / "newer")
    setting = json.loads((newer / "bench.json").read_text())
    (newer / "bench.json").write_text(json.dumps(setting | {"settings": setting["settings"] | {"colour": "red"}}))
    nameless = shutil.copytree(finished[0], tmp_path / "nameless")
    (nameless / "bench.json").write_text(json.dumps(setting | {"settings": "greedy"}))
    beside = shutil.copytree(finished[0], tmp_path / "beside")
    (beside / "overhead.json").write_text("{}")
    for args, message in (
        (["report", str(tmp_path)], "bench.json is missing"),
        (["report", str(other)], "not what a benchmark writes (model is missing)"),
        (["report", str(nameless)], "not what a benchmark writes (settings is 'greedy')"),
        (["report", str(beside)], "overhead.json: not what a benchmark writes (code is missing)"),
        (["report", str(newer)], "settings that this version does not have: colour"),
        (["report"], "error: Missing from bench.py report: DIR of a benchmark, or of latencies. (required)\n"),
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


def test_the_command_repeats_the_benchmark(files, model, tmp_path):
    changes = {"methods": "ppd", "adapters": f"ppd={files}/ppd", "repeats": 2, "chat": False, "dtype": "float32"}
    config = config_of(files, **changes, mt_bench_temperatures=True, model="a model's folder")
    run_bench(config, model, tmp_path / "b", lambda line: None)
    words = shlex.split(command(json.loads((tmp_path / "b" / "bench.json").read_text())))
    assert words[:2] == ["python", "bench.py"]
    expected = dataclasses.replace(config, data="questions.jsonl", adapters="ppd=ppd")
    assert parse(BenchConfig, words[2:]) == expected


def test_scores_stand_beside_speeds_and_text_may_be_another(files, model, tmp_path):
    rows = [{"question": "2+2", "answer": "#### 444444"}, {"question": "one", "answer": "#### 111111"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data": f"{tmp_path}/sums.jsonl", "temperature": 1.0, "accept": "rejection", "repeats": 2}
    run_bench(config_of(files, **changes), model, tmp_path / "b", lambda line: None)
    text = write_bench_report(load_results(tmp_path / "b"), tmp_path / "b").read_text()
    assert "| method | gsm8k solved |" in text and "| medusa | 0.000 |" in text and "differences are not listed" in text
    figures = load_results(tmp_path / "b").figures
    assert "| medusa | 0.000 |" in text and "Acceptance: rejection, which when sampling gives another text" in text
    assert figures["medusa"]["all"].answers == 0  # no answer is compared
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["quality"]["medusa"] == {"gsm8k solved": 0.0}
    typical = config_of(files, **changes | {"accept": "typical", "repeats": 1})
    run_bench(typical, model, tmp_path / "t", lambda line: None)
    assert "**lossy**" in write_bench_report(load_results(tmp_path / "t"), tmp_path / "t").read_text()
    plain = texts_of(tmp_path / "t", "autoregressive")  # the reference is sampled as ever
    assert plain == texts_of(tmp_path / "b", "autoregressive")


def test_perplexity_is_the_bases_of_the_last_turns(files, model, tmp_path):
    folder, config = tmp_path / "b", config_of(files, methods="medusa", adapters=f"medusa={files}/medusa", repeats=2)
    run_bench(config, model, folder, lambda line: None, perplexities=True)
    entropy, count = 0.0, 0
    questions, _ = select_questions(config, model)
    for rows in (Answers(folder, ["medusa"]).read(run)["medusa"] for run in (1, 2)):
        for question in questions:
            (said,) = [row["choices"][0]["turns"] for row in rows if row["question_id"] == question.id]
            talk = [text for pair in zip(question.turns, said, strict=True) for text in pair]
            prompt, answer = model.encode(talk[:-1]), model.tokenizer.encode(talk[-1])
            logits = plain(model.base, np.array([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
            entropy -= jax.nn.log_softmax(logits)[np.arange(len(answer)), answer].sum()
            count += len(answer)
    scores = load_results(folder).scores
    assert count and set(scores) == {"autoregressive", "medusa"}
    assert scores["medusa"]["perplexity under the base"] == pytest.approx(float(np.exp(entropy / count)), rel=1e-4)
    report = write_bench_report(load_results(folder), folder).read_text()
    assert "| method | perplexity under the base |" in report


def test_what_ships_for_the_base_runs_by_default(files, model, monkeypatch):
    assert list(parse_ways(config_of(files, methods=""), model)) == ["autoregressive", "ppd", "medusa"]
    with pytest.raises(UserError, match=r"no adapter ships for .* --adapters METHOD=FOLDER, or name --methods"):
        parse_ways(BenchConfig(), model)
    assert list(parse_ways(BenchConfig(methods="autoregressive"), model)) == ["autoregressive"]


def test_a_tuned_tree_is_the_one_for_these_circumstances(files, model, tmp_path):
    _, adapter = open_adapter("ppd", model, files / "ppd")
    shutil.copytree(files / "ppd", tmp_path / "ppd")
    for size, plan in ((1, chain(2)), (2, chain(1))):
        choice = Choice(this_machine(), "float32", adapter.digest, size, 512, 0.0, plan, f"for {size}", {})
        save_choice(tmp_path / "ppd", "ppd", choice)
    config = config_of(files, methods="ppd=auto", adapters=f"ppd={tmp_path}/ppd", batch_size=2)
    way = parse_ways(config, model)["ppd=auto"]
    assert way.drafter.tree.num_nodes == 2 and way.info["note"].startswith("ppd=auto: tuned for this machine: for 2")
    alone = parse_ways(dataclasses.replace(config, batch_size=1), model)["ppd=auto"]
    assert alone.drafter.tree.num_nodes == 3 and alone.info["adapter"] == adapter.digest


def test_long_conversations_are_left_out(files, model):
    fit, long = select_questions(config_of(files, max_new_tokens=120), model)
    assert [q.id for q in fit] == [3, 4] and [q.id for q in long] == [1, 2, 5]


def test_a_method_with_a_base_of_its_own_is_compared_with_that(files, model, tmp_path):
    method = SPACE(distances=2, rank=2)
    trainable = jax.tree.map(lambda x: x + 0.1, method.init(jax.random.key(0), model.base))
    save_adapter(tmp_path / "space", Adapter(method, trainable, model.fingerprint, {"tree": [[0], [0, 0]]}))
    config = config_of(files, methods="space,ppd", adapters=f"space={tmp_path}/space,ppd={files}/ppd")
    run_bench(config, model, tmp_path / "bench", lambda line: None)
    results = load_results(tmp_path / "bench")
    own = "autoregressive, base of space"
    assert list(results.figures) == ["autoregressive", own, "space", "ppd"]
    texts = {way: [row["choices"][0]["turns"] for row in runs[0]] for way, runs in results.rows.items()}
    assert texts["space"] == texts[own] != texts["autoregressive"] == texts["ppd"]
    assert all(groups["all"].identical == 6 for groups in results.figures.values())
    assert results.figures[own]["all"].speedup.value == 1
    assert results.memory["method_bytes"]["space"] > results.memory["method_bytes"]["ppd"] * 10
    report = write_bench_report(results, tmp_path / "bench").read_text()
    assert "space: compared with autoregressive decoding of the base that the method has tuned" in report
