"""Measuring a device in one go: what comes first, what a limit leaves out, and that a kill loses one figure at most."""

import dataclasses
import time

import jax
import pytest

import jaxspec.bench.device as device
from jaxspec.bench.device import DeviceConfig, expected_seconds, measure_device, plan, read_device
from jaxspec.bench.device_figures import largest_tree
from jaxspec.bench.device_report import write_device_report
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.methods import PPD, Medusa
from tests.helpers.methods import untrained_drafter

CONFIG = DeviceConfig(dtypes=("float32",), shapes=("tiny",), drafters=("ppd",), trees=(8,), cpu=True)
SPEED = {"tokens_per_step": 1.5, "tokens_per_second": 30.0, "milliseconds_per_step": 50.0}
FOUND = {
    "decode_figure": SPEED
    | {"rows": 8, "speedup": 1.2, "step_cost": 1.25, "identical": 11, "answers": 12}
    | {"differences": [{"index": 3, "tokens": [1, 2], "gap": 0.003}]},
    "step_figure": {"milliseconds": 20.0, "share_of_bandwidth": 0.8},
    "prefill_figure": {"tokens_per_second": 5000.0, "streaming_gigabytes_per_second": 3000.0},
    "training_figure": {"groups_per_second": 100.0, "seconds_per_update": 0.6, "gigabytes": 30.0},
}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The names of the figures that were measured, in turn; each is known beforehand, and takes no time."""
    calls = []

    def known(kind):
        return lambda *settings: calls.append((kind, *settings[:3])) or dict(FOUND[kind])

    for kind in FOUND:
        monkeypatch.setattr(device, kind, known(kind))
    return calls


def run(folder, config=CONFIG, began=None):
    said = []
    measure_device(config, folder, time.monotonic() if began is None else began, said.append)
    return said


def test_the_most_valuable_figures_come_first():
    keys = list(plan(DeviceConfig()))
    assert keys[:2] == ["decode/bfloat16/autoregressive/1", "decode/bfloat16/hidden_transfer/8"]
    kinds = [key.split("/")[0] for key in keys]
    assert kinds.index("decode") < kinds.index("step") < kinds.index("train")
    assert keys.index("train/7b/ppd") < keys.index("step/13b/prefill") < keys.index("decode/bfloat16/ppd/8")
    assert len(set(keys)) == len(keys)


def test_every_figure_is_written_and_nothing_is_measured_twice(tmp_path, measured, monkeypatch):
    """Killed after any number of figures, the same command measures the rest."""
    whole = len(plan(CONFIG))
    for kept in (1, 5, whole - 1):
        write = device.write_json

        def killed(file, content, kept=kept, write=write):
            write(file, content)
            if len(content["figures"]) == kept:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(device, "write_json", killed)
            run(tmp_path)
        assert len(read_device(tmp_path)["figures"]) == kept
    run(tmp_path)
    assert list(read_device(tmp_path)["figures"]) == list(plan(CONFIG))
    assert len(measured) == whole


def test_a_limit_leaves_out_what_would_not_fit(tmp_path):
    said = run(tmp_path, DeviceConfig(**vars(CONFIG) | {"minutes": 0.5}))  # no figure of decoding, as far as is known
    figures = read_device(tmp_path)["figures"]
    assert not any(key.startswith(("decode", "train")) for key in figures) and "step/tiny/prefill" in figures
    assert said[-1].startswith("left out, as 0.5 minutes are up: train/tiny/ppd, ")


def test_a_figure_that_outlasts_the_limit_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "expected_seconds", lambda task, known: 0)
    monkeypatch.setattr(device, "step_figure", lambda *settings: time.sleep(30))
    began = time.monotonic()
    run(tmp_path, DeviceConfig(**vars(CONFIG) | {"minutes": 0.02}))
    assert time.monotonic() - began < 10
    assert "step/tiny/batch 1/1 rows" not in read_device(tmp_path)["figures"]


def test_expectations_follow_what_was_measured():
    task = "step/tiny/batch 8/8 rows"
    assert task in plan(CONFIG) and expected_seconds(task, {}) > 0
    known = {"step/tiny/prefill": {"total_seconds": 9.0}, "train/tiny/ppd": {"total_seconds": 99.0}}
    assert expected_seconds(task, known) == 9
    assert expected_seconds(task, known | {"step/tiny/batch 8/1 rows": {"total_seconds": 4.0}}) == 4


def test_what_does_not_fit_the_memory_is_said_and_the_rest_is_measured(tmp_path, monkeypatch):
    def full(*settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 13 bytes")

    monkeypatch.setattr(device, "training_figure", full)
    run(tmp_path)
    results = read_device(tmp_path)
    assert "out of memory" in results["figures"]["train/tiny/ppd"]["error"]
    assert len(results["figures"]) == len(plan(CONFIG))
    assert "out of memory" in write_device_report(results, tmp_path).read_text()


def test_the_report_needs_no_device(tmp_path):
    run(tmp_path)
    page = write_device_report(read_device(tmp_path), tmp_path).read_text()
    assert "| float32 | ppd | 8 | 1.50 | 30 | 1.20 | 1.25 | 11 of 12 | 0.003 |" in page
    assert (
        "| 20.0 (80%) |" in page and "| tiny | 5000 | 3000 |" in page and "| tiny | ppd | 100 | 0.600 | 30.0 |" in page
    )
    assert (tmp_path / "device.png").stat().st_size > 5000


def test_weights_in_few_bits_are_of_every_base_and_a_folder_of_its_own(tmp_path, measured):
    run(tmp_path, dataclasses.replace(CONFIG, weights="int8"))
    assert ("step_figure", "tiny", 1, 1) in measured
    page = write_device_report(read_device(tmp_path), tmp_path).read_text()
    assert "Kernels in int8. " in page and "Random weights in int8, " in page and "recomputed, weights in int8." in page
    with pytest.raises(UserError, match="figures of another settings"):
        run(tmp_path)
    with pytest.raises(UserError, match="weights 'int3' are unknown"):
        run(tmp_path, dataclasses.replace(CONFIG, weights="int3"))


def test_bad_input(tmp_path, monkeypatch):
    run(tmp_path)
    with pytest.raises(UserError, match=r"figures of another settings .*; give another --output"):
        run(tmp_path, DeviceConfig(**vars(CONFIG) | {"limit": 3}))
    monkeypatch.setattr(device, "device_name", lambda: "1 x Other")
    with pytest.raises(UserError, match=r"figures of another device .*, this is 1 x Other"):
        run(tmp_path)
    with pytest.raises(UserError, match="JAX finds no accelerator here, only a CPU; measure it with --cpu"):
        run(tmp_path, DeviceConfig())
    with pytest.raises(UserError, match=r"unknown shapes '7' .did you mean '7b'"):
        run(tmp_path, DeviceConfig(shapes=("7",), cpu=True))
    (tmp_path / "device.json").write_text("{}")
    with pytest.raises(UserError, match=r"device.json: device is missing"):
        read_device(tmp_path)


@pytest.mark.parametrize(("method", "rows"), [pytest.param(PPD(), 12, marks=pytest.mark.slow), (Medusa(heads=3), 9)])
def test_trees_fill_the_rows_there_are(tiny, method, rows):
    drafter = untrained_drafter(method, tiny, autoregressive(tiny).plan)
    drafter.source.adapter.info["accuracy"] = [[0.5, 0.2, 0.1], [0.3, 0.1, 0.1], [0.2, 0.1, 0.05]]
    sized = largest_tree(drafter, rows)
    assert rows - 3 <= sized.num_rows <= rows
    with pytest.raises(UserError, match="has no tree of 1 rows"):
        largest_tree(drafter, 1)
