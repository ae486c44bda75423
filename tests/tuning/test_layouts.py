"""What `jaxspec tune` remembers of layouts: the fastest ones, and the default where others are not clearly faster."""

import numpy as np
import pytest

from jaxspec.config import MeshConfig
from jaxspec.tuning import layouts as measuring
from jaxspec.tuning.layouts import ROWS, fastest, measure_products, tune_layouts
from jaxspec.weights import layouts
from tests.helpers.tiny import make_tiny, on_mesh


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "FILE", tmp_path / "layouts.json")
    monkeypatch.setattr(layouts, "BLOCK", 8)


def samples(**changes):
    """Five rounds, all layouts alike but for one row, where the changes say how long each takes."""
    times = {(rows, n): [1.0] * 5 for rows in ROWS for n in (0, 4, 8)}
    return times | {(1, int(name[1:])): seconds for name, seconds in changes.items()}


@pytest.mark.parametrize(
    "times, chosen",
    [
        ({"n4": [0.9, 0.9, 7.0, 0.9, 0.9]}, 4),  # one slow moment is none of its own
        ({"n4": [0.9, 0.9, 7.0, 0.9, 1.0]}, 8),
        ({"n4": [0.97] * 5}, 8),
        ({"n4": [0.9] * 5, "n0": [0.8] * 5}, 0),
    ],
)
def test_another_layout_than_the_default_must_be_faster_for_sure(times, chosen):
    found = fastest(samples(**times), (32, 64))
    assert found == {1: chosen, 4: 8, 8: 8, 16: 8, 32: 8, 48: 8, 64: 0}


def test_the_fastest_are_used_and_remembered(monkeypatch, capsys):
    monkeypatch.setattr(measuring, "measure_products", lambda kernels, dtype: samples(n4=[0.5] * 5))
    model = make_tiny()
    tune_layouts(model)
    shapes = {(32, 64), (32, 32), (48, 32), (32, 48), (32, 16)}
    for found in (model.layouts, layouts.read_layouts("float32")):
        assert found.keys() == shapes and all(blocks[1] == 4 and blocks[4] == 8 for blocks in found.values())
    assert model.base_for(1).params["lm_head"].shape == (4, 32, 4) and "layouts: 5/5" in capsys.readouterr().err


def test_every_layout_that_divides_is_timed(monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    monkeypatch.setattr(measuring, "ROWS", (1, 4))
    times = measure_products([np.ones((16, 40), np.float32)] * 2, np.float32)
    assert times.keys() == {(rows, n) for rows in (1, 4) for n in (0, 4, 8)}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())


def test_a_mesh_has_no_layouts(monkeypatch):
    monkeypatch.setattr(measuring, "measure_products", lambda kernels, dtype: pytest.fail("measured"))
    tune_layouts(on_mesh(make_tiny(), MeshConfig(tensor=2)))
    assert not layouts.FILE.exists()
