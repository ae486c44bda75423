"""Step times against rows: every case is measured, and the memory a step must read is counted right."""

import contextlib
import dataclasses
import json
import shutil

import pytest

from jaxspec.cli.bench import main
from jaxspec.errors import UserError
from jaxspec.tuning import steps
from jaxspec.tuning.memory import bandwidth, step_bytes
from jaxspec.tuning.steps import SIZES, LatencyConfig, check_fits, check_latency, measure_steps, random_model
from jaxspec.versions import code_version
from jaxspec.weights import layouts
from jaxspec.weights.load import save_model
from tests.helpers.files import change_json
from tests.helpers.tiny import TINY, make_text_model

CONFIG = LatencyConfig(models=("1b", "7b"), rows=(1, 4), cache_lengths=(64,), rounds=1)
OTHERS = "other settings, models, code or devices"


@pytest.fixture(autouse=True, scope="module")
def small():
    """Shapes that are quickly measured, with a memory whose speed is known."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("1b", "7b"):
            patch.setitem(SIZES, name, dataclasses.replace(TINY, num_layers=1))
        patch.setattr(steps, "bandwidth", lambda rounds: 5e9)
        yield


@pytest.fixture(scope="module")
def measured(small, tmp_path_factory):
    """A folder of two curves."""
    folder = tmp_path_factory.mktemp("latency")
    measure_steps(CONFIG, folder)
    return folder


@pytest.fixture
def folder(measured, tmp_path):
    """A copy of it."""
    return shutil.copytree(measured, tmp_path / "latency")


def test_every_case_is_measured_and_shown(tmp_path, capsys):
    save_model(make_text_model(num_layers=1), tmp_path / "model")
    command = ["latency", "--models", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    main([*command, *["--rows", "5", "--batch-sizes", "2", "--cache-lengths", "64", "96", "--rounds", "1"]])
    shown, content = capsys.readouterr().out, (tmp_path / "out" / "latency.json").read_text()
    assert shown.strip() in (tmp_path / "out" / "latency.md").read_text() and "| 5 rows |" in shown
    assert (tmp_path / "out" / "latency.png").stat().st_size > 5000
    assert len([line for line in shown.splitlines() if "(float32)" in line]) == 2
    assert "--models model --rows 5 --batch-sizes 2 --cache-lengths 64 96 --rounds 1`" in shown
    assert str(tmp_path) not in content and json.loads(content)["code"] == code_version()
    with pytest.raises(UserError, match="measured with other settings"):
        main(command)


def test_kernels_may_be_in_few_bits(small, tmp_path):
    """Random ones and those of a file; what a step must read is less."""
    save_model(make_text_model(num_layers=1), tmp_path / "model")
    config = LatencyConfig(("1b", str(tmp_path / "model")), (1,), cache_lengths=(64,), rounds=1, weights="int8")
    curves = measure_steps(config, tmp_path / "small")["curves"]
    floats = random_model("1b", SIZES["1b"], "float32")
    assert [curve["dtype"] for curve in curves] == ["float32 int8", "float32 int8"]
    assert curves[0]["memory_seconds"] < 0.5 * step_bytes(floats, 1, 64) / 5e9
    with pytest.raises(UserError, match="weights 'int3' are unknown"):
        check_latency(dataclasses.replace(config, weights="int3"))


def test_curves_hold_seconds_and_the_memory_limit(measured):
    curve, _ = json.loads((measured / "latency.json").read_text())["curves"]
    assert set(curve["seconds"]) == {"1", "4"} and min(curve["seconds"].values()) > 0
    assert 0 < curve["memory_seconds"] < 1


def test_what_was_measured_stays_and_the_rest_follows(folder, monkeypatch, capsys):
    file = folder / "latency.json"
    whole = json.loads(file.read_text())
    change_json(file, curves=whole["curves"][:1], bytes_per_second=4e9)
    main(["report", str(folder)])
    assert "**Unfinished: 1 of 2 curves are there.**" in (folder / "latency.md").read_text()
    capsys.readouterr()
    main(["report", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    made = []
    monkeypatch.setattr(steps, "random_model", lambda *args: made.append(args[0]) or random_model(*args))
    again = measure_steps(CONFIG, folder)
    assert made == ["7b"] and again["curves"][:1] == whole["curves"][:1] and again["bytes_per_second"] == 4e9
    assert [curve["model"] for curve in again["curves"]] == ["1b", "7b"]
    (folder / "latency.md").unlink()
    assert measure_steps(CONFIG, folder) == again and made == ["7b"]
    assert "Unfinished" not in (folder / "latency.md").read_text()


def test_finished_curves_are_shown_whatever_the_code_and_unfinished_ones_need_the_same(folder, monkeypatch):
    file = folder / "latency.json"
    change_json(file, code="older")
    older = json.loads(file.read_text())
    assert measure_steps(CONFIG, folder) == older
    change_json(file, curves=older["curves"][:1])
    with pytest.raises(UserError, match=OTHERS):
        measure_steps(CONFIG, folder)
    change_json(file, **older | {"code": code_version()})
    monkeypatch.setitem(SIZES, "7b", TINY)
    with pytest.raises(UserError, match=OTHERS):
        measure_steps(CONFIG, folder)


def test_what_is_no_latency_is_refused(folder, tmp_path):
    change_json(folder / "latency.json", curves=[])
    with pytest.raises(UserError, match="other settings or curves than"):
        main(["report", str(folder)])
    (folder / "latency.json").write_text("{}")
    with pytest.raises(UserError, match=r"latency\.json: device is missing"):
        main(["report", str(folder)])
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
    assert bandwidth(1, 1 << 16) > 1e4


def test_nothing_is_measured_before_everything_is_known_to_fit(monkeypatch, tmp_path):
    assert random_model("tiny", TINY, "float32").params["lm_head"].shape == (32, 16)
    monkeypatch.setattr(steps, "bandwidth", lambda rounds: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        measure_steps(CONFIG, tmp_path / "file")
    monkeypatch.setattr(steps, "device_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"in float32 needs 0\.0 GiB"):
        measure_steps(CONFIG, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_layouts_that_steps_read_must_fit(monkeypatch, tmp_path):
    """Kernels in blocks for few rows are copies; what is remembered may ask for more of them, or for none."""
    monkeypatch.setattr(layouts, "FILE", tmp_path / "layouts.json")
    monkeypatch.setattr(layouts, "BLOCK", 16)
    monkeypatch.setattr(steps, "cache_bytes", lambda *args: 0)
    weights, kernels = (
        3 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 64) + 32 + 2 * 32 * 16,
        3 * (32 * 64 + 32 * 32 + 3 * 32 * 48),
    )

    def least(*rows):
        """Bytes below which these rows are refused."""
        config = dataclasses.replace(CONFIG, rows=rows)
        for copies in range(4):
            needed = 4 * (weights + copies * (kernels + 32 * 16))
            monkeypatch.setattr(steps, "device_memory", lambda needed=needed: (needed + 1) / 0.9)
            with contextlib.suppress(UserError):
                check_fits("tiny", TINY, "float32", config)
                return copies

    assert [least(64), least(1), least(1, 64)] == [0, 1, 1]
    shapes = [(32, 64), (32, 32), (32, 48), (48, 32), (32, 16)]
    layouts.write_layouts("float32", {shape: {1: 8, 4: 16, 8: 0} for shape in shapes})
    assert [least(8), least(1, 8), least(1, 4)] == [0, 1, 2]


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
