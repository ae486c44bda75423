"""One page of several benchmarks."""

import dataclasses
import json
import shutil

import pytest

import bench
from experiments.agreement import agreement, asked_again
from jaxspec.errors import UserError
from jaxspec.tuning.steps import write_latency
from tests.experiments.test_claims import benchmark


def change_settings(folder, **changes):
    file = folder / "bench.json"
    setting = json.loads(file.read_text())
    file.write_text(json.dumps(setting | {"settings": setting["settings"] | changes}))


def test_several_benchmarks_make_one_page(finished, tmp_path, capsys):
    longer = shutil.copytree(finished[0], tmp_path / "longer_answers")
    change_settings(longer, max_new_tokens=9)
    setting = json.loads((longer / "bench.json").read_text())
    (longer / "bench.json").write_text(json.dumps(setting | {"code": "older"}))
    bench.main(["results", str(finished[0]), str(longer), "--output", str(tmp_path / "page")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "page" / "results.md")
    text = (tmp_path / "page" / "results.md").read_text()
    assert "## Bench\n" in text and "## Longer answers\n" in text and "### Acceptance by depth\n" in text
    assert "Made with another version of decoding's code than bench: longer_answers." in text
    assert "| BiTA | LLaMA-2-7B-chat |" in text
    assert "--data questions.jsonl" in text and str(tmp_path) not in text
    for name in ("bench", "longer_answers"):
        assert (tmp_path / "page" / f"results-{name}.png").stat().st_size > 10_000
        assert f"](results-{name}.png)" in text
    summaries = json.loads((tmp_path / "page" / "results.json").read_text())
    assert summaries["bench"]["ways"]["medusa"]["all"]["answers"] == 6
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        bench.main(["results", str(finished[0]), "--output", str(tmp_path / "file")])
    for folders, words in (([], "give at least one"), ([finished[0]] * 2, "different names"), (["no"], "no benchmark")):
        with pytest.raises(UserError, match=words):
            bench.main(["results", *map(str, folders), "--output", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def run_of(**seconds):
    """A benchmark of eight questions, by hand: the seconds that a way took for each."""
    found = benchmark({way: (times, [2, 2]) for way, times in seconds.items()}, limit=0, methods="", repeats=1)
    shared = {"fingerprint": "f", "dtype": "float32", "device": "a machine", "began": "today", "questions": 8}
    return dataclasses.replace(found, setting=found.setting | shared)


def test_a_second_run_is_held_against_the_first():
    plain = [4.0] * 8
    first = run_of(autoregressive=plain, ppd=[2.0] * 8, medusa=[1.0, 3.0] * 4, hydra=plain)
    second = run_of(autoregressive=plain, ppd=[1.0] * 8, medusa=[2.0] * 8)
    assert asked_again(first, second) and not asked_again(second, first)
    lines = agreement(first, second)
    assert "8 questions. 1 of 2 speedups lie" in lines[2] and "Unfinished" not in lines[2]
    longer = dataclasses.replace(second, setting=second.setting | {"questions": 12})
    assert "**Unfinished: 8 of 12 answers of the second are there.**" in agreement(first, longer)[2]
    assert lines[-2:] == [
        "| ppd | 2.000 | 2.000 | 2.00 (2.00 to 2.00) | 4.00 (4.00 to 4.00) | no |",
        "| medusa | 2.000 | 2.000 | 2.67 (1.33 to 4.00) | 2.00 (2.00 to 2.00) | yes |",
    ]
    for changes in ({"device": "another"}, {"settings": {"temperature": 1.0}}, {"ways": {"ppd": {"adapter": "new"}}}):
        other = dataclasses.replace(second, setting=second.setting | changes)
        assert not asked_again(first, other)


def test_a_second_run_is_not_shown_whole(finished, tmp_path):
    again = shutil.copytree(finished[0], tmp_path / "again")
    change_settings(again, limit=3)
    for file in (again / "answers" / "run_1").iterdir():
        rows = [row for row in map(json.loads, file.open()) if row["question_id"] != 1]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench.main(["results", str(finished[0]), str(again), "--output", str(tmp_path / "page")])
    text = (tmp_path / "page" / "results.md").read_text()
    assert text.count("### All questions") == 1 and "what both runs make of 3 questions" in text
    assert not (tmp_path / "page" / "results-again.png").exists()


def test_the_page_shows_latencies_too(finished, tmp_path, capsys):
    curve = {"model": "tiny", "dtype": "float32", "batch_size": 1, "cache_length": 64, "memory_seconds": 0.5}
    settings = {"models": ["tiny"], "rows": [1, 4], "batch_sizes": [1], "cache_lengths": [64], "rounds": 3, "dtype": ""}
    found = {
        "device": "a machine",
        "jax": "0",
        "bytes_per_second": 1e9,
        "settings": settings,
        "began": "2026-01-01",
        "shapes": "",
    }
    found |= {"code": "a version", "curves": [curve | {"seconds": {"1": 1, "4": 2}}]}
    (tmp_path / "latency").mkdir()
    write_latency(found, tmp_path / "latency")
    bench.main(["report", str(tmp_path / "latency")])
    shown = capsys.readouterr().out
    assert "| tiny (float32) | 1 | 64 | 500.0 | 1000.0 | 2000.0 |" in shown
    assert "latency --models tiny --rows 1 4 --cache-lengths 64 --rounds 3`" in shown
    bench.main(["results", str(finished[0]), str(tmp_path / "latency"), "--output", str(tmp_path / "page")])
    text = (tmp_path / "page" / "results.md").read_text()
    assert "## Latency: milliseconds of a step by rows" in text and "| 500.0 | 1000.0 |" in text
    assert (tmp_path / "page" / "results-latency.png").stat().st_size > 5000
    with pytest.raises(UserError, match="a benchmark beside latency's"):
        bench.main(["results", str(tmp_path / "latency"), "--output", str(tmp_path / "page")])
    del found["code"]
    (tmp_path / "latency" / "latency.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"not what .* writes now: code is missing"):
        bench.main(["report", str(tmp_path / "latency")])
