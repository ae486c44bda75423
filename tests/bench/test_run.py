"""The benchmark from question file to report, on a tiny model."""

import dataclasses
import shlex

import jax
import numpy as np
import pytest

import jaxspec.cli.bench
from jaxspec.bench.answers import Answers
from jaxspec.bench.config import BenchConfig
from jaxspec.bench.questions import Question
from jaxspec.bench.report import command, write_bench_report
from jaxspec.bench.results import load_results
from jaxspec.bench.run import batches, converse, divergences, shuffled
from jaxspec.bench.setting import select_questions
from jaxspec.bench.ways import load_ways
from jaxspec.cli.options import parse
from jaxspec.errors import UserError
from jaxspec.generation.divergence import first_divergence
from jaxspec.methods import SPACE
from tests.helpers.bench import config_of, run, save_untrained, texts_of
from tests.helpers.files import read_jsonl, write_jsonl
from tests.helpers.model import plain
from tests.helpers.tiny import on_mesh


def test_every_method_answers_every_question_that_fits(finished):
    folder, said = finished
    typical = "costs of rows are typical ones of a CPU to begin with (`jaxspec tune --quick` measures them)"
    assert said == [f"medusa: {typical}", "left out, too long for the base: questions.jsonl 5"]
    results = load_results(folder)
    assert list(results.figures) == ["autoregressive", "ppd tree=chain:2", "medusa"]
    for groups in results.figures.values():
        assert list(groups) == ["all", "mt_bench", "qa", "rag"]
        assert groups["all"].identical == groups["all"].answers == 6 and groups["mt_bench"].answers == 4
    assert results.figures["autoregressive"]["all"].tokens_per_step == 1
    assert results.memory["peak_bytes"] > 0 and results.memory["method_bytes"]["medusa"] > 0


@pytest.mark.slow
def test_devices_may_share_the_work(finished, files, model, tmp_path, monkeypatch, quickly):
    """Everything, parts of the step included, over two devices; the same answers."""
    config = config_of(files, "medusa")
    monkeypatch.setattr(
        jaxspec.cli.bench, "load_base", lambda name, dtype, mesh, template, weights: on_mesh(model, mesh)
    )
    words = ["--run", *config.runs, "--data", config.data, "--max-new-tokens", "8", "--mesh.tensor", "2"]
    jaxspec.cli.bench.main(["compare", *words, "--output", str(tmp_path)])
    assert texts_of(tmp_path, "medusa") == texts_of(finished[0], "medusa")
    results = load_results(tmp_path)
    assert results.figures["medusa"]["all"].identical == 6 and "--mesh.tensor 2" in command(results.setting)


def test_answers_are_in_spec_benchs_format(finished):
    """What Spec-Bench's script reads is there, and its two means are those of the report."""
    folder, _ = finished
    speeds = {}
    for way in ("autoregressive", "medusa"):
        rows = read_jsonl(Answers(folder, [way]).file(way, 1))
        assert sorted(row["question_id"] for row in rows) == [1, 2, 3, 4]
        assert {row["model_id"] for row in rows} == {f"tiny-{way}"}
        choices = [row["choices"][0] for row in rows]
        for choice in choices:
            assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - len(choice["new_tokens"])
        speeds[way] = np.mean([sum(c["new_tokens"]) / sum(c["wall_time"]) for c in choices])
    figures = load_results(folder).figures["medusa"]["all"]
    assert figures.with_prefill == pytest.approx(speeds["medusa"] / speeds["autoregressive"])
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    assert figures.tokens_per_step == pytest.approx(np.mean(lengths))


@pytest.mark.slow
def test_sampling_repeats_and_batches_are_lossless(files, model, tmp_path, quickly):
    shared = {"repeats": 2, "mt_bench_temperatures": True, "temperature": 0.8, "seed": 5}
    runs = ("ppd", "autoregressive", "autoregressive")
    run(config_of(files, *runs, **shared), model, tmp_path / "1")
    results = run(config_of(files, *runs, **shared, batch_size=2), model, tmp_path / "2")
    assert list(results.figures) == ["autoregressive", "ppd", "autoregressive again"]
    for groups in results.figures.values():
        assert groups["all"].identical == groups["all"].answers == 12 and len(groups["all"].run_speedups) == 2
    one, two = (texts_of(tmp_path / "2", "ppd", run) for run in (1, 2))
    assert one == texts_of(tmp_path / "1", "ppd") and two == texts_of(tmp_path / "1", "ppd", 2)
    assert one[2] == two[2]  # math is greedy
    assert all(one[name] != two[name] for name in (1, 3, 4))  # the others are drawn with another seed
    assert "±" in write_bench_report(results, tmp_path / "2").read_text()


def test_where_answers_differ_is_found_turn_by_turn(files, model):
    config = config_of(files, "autoregressive", temperature=0.9)
    way = load_ways(config, model)["autoregressive"]
    question = select_questions(config, model)[0][0]
    said = converse(way, [question], config, 4)

    def different(answer, place):
        tokens = list(answer.tokens)
        tokens[place] = (tokens[place] + 1) % 200
        return dataclasses.replace(answer, tokens=tokens)

    def found(*answers):
        return divergences(way, question, answers, said, config, 4)

    assert found(*said) == [None, None]
    [none, second] = found(said[0], different(said[1], 3))
    assert none is None and second.index == 3 and second.gap > 0
    prompt = model.encode([question.turns[0], said[0].text, question.turns[1]])
    tokens = different(said[1], 3).tokens
    assert second == first_divergence(model, prompt, tokens, said[1].tokens, config.sampling(0.9), 4)
    [first] = found(different(said[0], 0), said[1])
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
    rows = read_jsonl(finished[0] / "answers/run_1/medusa.jsonl")
    asked = [Question(row["data"], row["question_id"], "", (), "turns", {}) for row in rows]
    in_order = sorted(asked, key=lambda question: (question.data, str(question.id)))
    assert shuffled(asked) == shuffled(in_order) == asked != in_order


@pytest.mark.parametrize(
    "runs, changes, message",
    [
        ((), {"data": ""}, "--data"),
        ((), {"limit": -1}, "limit must be at least 0"),
        ((), {"max_new_tokens": 1}, "max-new-tokens must be at least 2"),
        ((), {"temperature": -1.0}, "temperature"),
        ((), {"data": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ((), {"max_new_tokens": 4000}, "no question fits"),
        ((), {"data": "a/b.jsonl,c/b.jsonl"}, "different names"),
        (["medusaa"], {}, "did you mean 'medusa'?"),
        (["bita"], {}, "no adapter of bita ships for 'tiny'"),
        (["ppd tree=chain:9"], {}, "chain:9"),
        (["ppd vocabulary=100"], {}, "draft-vocabulary 100: the adapter does not say"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(files, model, tmp_path, runs, changes, message):
    with pytest.raises(UserError) as error:
        run(config_of(files, *runs, **changes), model, tmp_path / "bench")
    assert message in str(error.value) and not (tmp_path / "bench").exists()


def test_the_command_repeats_the_benchmark(files, model, tmp_path, quickly):
    changes = {"repeats": 2, "chat": False, "dtype": "float32", "mt_bench_temperatures": True}
    config = config_of(files, "ppd", "ppd tree=chain:2", **changes, model="a model's folder", limit=1)
    words = shlex.split(command(run(config, model, tmp_path / "b").setting))
    assert words[:3] == ["jaxspec", "bench", "compare"]
    expected = dataclasses.replace(
        config, data="questions.jsonl", runs=("ppd adapter=ppd", "ppd tree=chain:2 adapter=ppd")
    )
    assert parse(BenchConfig, words[3:]) == expected


@pytest.mark.slow
def test_scores_stand_beside_speeds_and_text_may_be_another(files, model, tmp_path, quickly):
    rows = [{"document": "A long one.", "summary": "x"}, {"document": "Another.", "summary": "x"}]
    write_jsonl(tmp_path / "news.jsonl", rows)
    changes = {"data": f"{tmp_path}/news.jsonl", "temperature": 1.0, "max_new_tokens": 24}
    typical = run(config_of(files, "medusa", **changes, accept="typical"), model, tmp_path / "t")
    assert "**lossy**" in write_bench_report(typical, tmp_path / "t").read_text()
    texts = texts_of(tmp_path / "t", "autoregressive")  # the reference is sampled as ever
    write_jsonl(tmp_path / "news.jsonl", [row | {"summary": texts[f"line {i}"][-1]} for i, row in enumerate(rows, 1)])
    results = run(config_of(files, "medusa tree=own", **changes, accept="rejection"), model, tmp_path / "b")
    assert texts_of(tmp_path / "b", "autoregressive") == texts
    assert results.scores["autoregressive"]["xsum ROUGE-1"] == 1
    assert results.scores["medusa tree=own"]["xsum ROUGE-1"] < 1
    text = write_bench_report(results, tmp_path / "b").read_text()
    assert "| method | xsum ROUGE-1 |" in text and "| autoregressive | 1.000 |" in text
    assert "Acceptance: rejection, when sampling, another text" in text and "differences are not listed" in text
    assert results.figures["medusa tree=own"]["all"].answers == 0  # no answer is compared


@pytest.mark.slow
def test_perplexity_is_the_bases_of_the_last_turns(files, model, tmp_path, quickly):
    config = config_of(files, "medusa", repeats=2)
    results = run(config, model, tmp_path, perplexities=True)
    entropy, count = 0.0, 0
    for number in (1, 2):
        texts = texts_of(tmp_path, "medusa", number)
        for question in select_questions(config, model)[0]:
            talk = [text for pair in zip(question.turns, texts[question.id], strict=True) for text in pair]
            prompt, answer = model.encode(talk[:-1]), model.tokenizer.encode(talk[-1])
            tokens = np.zeros((1, 128), int)  # padded: one program for all
            tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
            logits = plain(model.base, tokens)[0, len(prompt) - 1 :][: len(answer)]
            entropy -= jax.nn.log_softmax(logits)[np.arange(len(answer)), answer].sum()
            count += len(answer)
    assert count and set(results.scores) == {"autoregressive", "medusa"}
    expected = pytest.approx(float(np.exp(entropy / count)), rel=1e-4)
    assert results.scores["medusa"]["perplexity under the base"] == expected
    assert "| method | perplexity under the base |" in write_bench_report(results, tmp_path).read_text()


def test_long_conversations_are_left_out(files, model):
    fit, long = select_questions(config_of(files, max_new_tokens=120), model)
    assert [q.id for q in fit] == [3, 4] and [q.id for q in long] == [1, 2, 5]


@pytest.mark.slow
def test_a_method_with_a_base_of_its_own_is_compared_with_that(files, model, tmp_path, quickly):
    save_untrained(tmp_path / "space", SPACE(distances=2, rank=2), model, 0.1)
    config = config_of(files, "ppd")
    config = dataclasses.replace(config, runs=(f"space tree=chain:2 adapter={tmp_path}/space", *config.runs))
    results = run(config, model, tmp_path / "bench")
    own = "autoregressive, base of space adapter=space"
    assert list(results.figures) == ["autoregressive", own, "space tree=chain:2", "ppd"]
    texts = {way: texts_of(tmp_path / "bench", way) for way in results.rows}
    assert texts["space tree=chain:2"] == texts[own] != texts["autoregressive"] == texts["ppd"]
    assert all(groups["all"].identical == 6 for groups in results.figures.values())
    assert results.figures[own]["all"].speedup.value == 1
    sizes = results.memory["method_bytes"]
    assert sizes["space tree=chain:2"] > sizes["ppd"] * 10
    report = write_bench_report(results, tmp_path / "bench").read_text()
    assert "space tree=chain:2: compared with autoregressive decoding of the base that the method has tuned" in report
