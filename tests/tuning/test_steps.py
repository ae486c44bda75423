"""Step times against rows: every case is measured, and the memory a step must read is counted right."""

import dataclasses
import json

import pytest

import bench
from jaxspec.errors import UserError
from jaxspec.tuning import steps as step_latency
from jaxspec.tuning.steps import LatencyConfig, check_latency, measure_steps, random_model, step_bytes
from jaxspec.versions import code_version
from jaxspec.weights.hf import save_directory
from tests.helpers.tiny import TINY, make_text_model


@pytest.fixture
def folder(tmp_path):
    model = make_text_model()
    save_directory(tmp_path / "model", model.config, model.params, model.eos)
    model.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def test_every_case_is_measured_and_shown(folder, capsys):
    sizes = ["--rows", "1", "5", "--batch-sizes", "2", "--cache-lengths", "64", "96", "--rounds", "1"]
    bench.main(["latency", "--models", str(folder / "model"), *sizes, "--output", str(folder / "out")])
    shown = capsys.readouterr().out
    assert shown.strip() in (folder / "out" / "latency.md").read_text() and "| 5 rows |" in shown
    assert (folder / "out" / "latency.png").stat().st_size > 5000
    assert len([line for line in shown.splitlines() if "(float32)" in line]) == 2
    assert "--models model --rows 1 5 --batch-sizes 2 --cache-lengths 64 96 --rounds 1`" in shown
    assert str(folder) not in (folder / "out" / "latency.json").read_text()
    assert json.loads((folder / "out" / "latency.json").read_text())["code"] == code_version()
    with pytest.raises(UserError, match="measured with other settings"):
        bench.main(["latency", "--models", str(folder / "model"), "--output", str(folder / "out")])


def test_what_was_measured_stays_and_the_rest_follows(monkeypatch, tmp_path, capsys):
    """Finished curves are kept as they are, whatever the code; unfinished ones need the same code."""
    monkeypatch.setitem(step_latency.SHAPES, "1b", TINY)
    monkeypatch.setitem(step_latency.SHAPES, "7b", TINY)
    config = LatencyConfig(models=("1b", "7b"), rows=(1, 4), cache_lengths=(64, 96), rounds=1)
    whole = measure_steps(config, tmp_path)
    file = tmp_path / "latency.json"
    file.write_text(json.dumps(whole | {"curves": whole["curves"][:3], "bytes_per_second": 5e9}))
    bench.main(["report", str(tmp_path)])
    assert "**Unfinished: 3 of 4 curves are there.**" in (tmp_path / "latency.md").read_text()
    capsys.readouterr()
    bench.main(["report", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    made = []
    monkeypatch.setattr(step_latency, "random_model", lambda *args: made.append(args[0]) or random_model(*args))
    again = measure_steps(config, tmp_path)
    assert made == ["7b"] and again["curves"][:3] == whole["curves"][:3] and again["bytes_per_second"] == 5e9
    sizes = [(curve["model"], curve["cache_length"]) for curve in again["curves"]]
    assert sizes == [("1b", 64), ("1b", 96), ("7b", 64), ("7b", 96)]
    (tmp_path / "latency.md").unlink()
    assert measure_steps(config, tmp_path) == again and made == ["7b"]
    assert "Unfinished" not in (tmp_path / "latency.md").read_text()
    monkeypatch.setitem(step_latency.SHAPES, "7b", dataclasses.replace(TINY, num_layers=1))
    with pytest.raises(UserError, match="other settings, models, code or devices"):
        measure_steps(config, tmp_path)
    monkeypatch.setitem(step_latency.SHAPES, "7b", TINY)
    older = again | {"code": "older"}
    file.write_text(json.dumps(older))
    assert measure_steps(config, tmp_path) == older
    file.write_text(json.dumps(older | {"curves": older["curves"][:3]}))
    with pytest.raises(UserError, match="other settings, models, code or devices"):
        measure_steps(config, tmp_path)


def test_curves_hold_seconds_and_the_memory_limit(monkeypatch, tmp_path):
    monkeypatch.setitem(step_latency.SHAPES, "1b", TINY)
    [curve] = measure_steps(LatencyConfig(models=("1b",), rows=(1, 4), rounds=1), tmp_path)["curves"]
    assert set(curve["seconds"]) == {"1", "4"} and min(curve["seconds"].values()) > 0
    assert 0 < curve["memory_seconds"] < 1


def test_a_benchmark_is_not_hidden_behind_latencies(tmp_path):
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(UserError, match="holds a benchmark"):
        measure_steps(LatencyConfig(), tmp_path)


def test_bytes_by_hand():
    model = make_text_model()
    c = model.config
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32  # q, k and v, o, MLP, two norms
    weights = c.num_layers * layer + 32 + 32 * c.vocab_size
    cache = 2 * c.num_layers * 3 * c.num_kv_heads * 64 * c.head_dim
    assert step_bytes(model, 3, 64) == 4 * (weights + cache)


def test_nothing_is_measured_before_everything_is_known_to_fit(monkeypatch, tmp_path):
    assert random_model("tiny", TINY, "float32").params["lm_head"].shape == (32, 16)
    monkeypatch.setitem(step_latency.SHAPES, "1b", TINY)
    monkeypatch.setattr(step_latency, "bandwidth", lambda rounds: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        measure_steps(LatencyConfig(models=("1b",)), tmp_path / "file")
    monkeypatch.setattr(step_latency, "device_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"1b in float32 needs 0\.0 GiB"):
        measure_steps(LatencyConfig(models=("1b",)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": (0, 2)}, "rows must be at least 1, got 0"),
        ({"rows": ()}, "at least one value for rows"),
        ({"cache_lengths": (32,)}, "cache-lengths must be at least 64"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"models": ("7bb",)}, "did you mean '7b'"),
        ({"models": ("1b", "1b")}, "models need different names, got 1b, 1b"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        check_latency(dataclasses.replace(LatencyConfig(), **changes))
    assert message in str(error.value)
