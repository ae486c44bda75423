"""Costs of rows: kept by base and machine, read back, typical ones where there are none or none that can be read."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxspec.drafters import costs
from jaxspec.drafters.costs import GREEDY, SAMPLED, RowCosts, find_costs, save_costs
from jaxspec.machine import this_machine
from tests.helpers.tiny import TINY, make_tiny

MEASURED = RowCosts((1.0, 4.0, 8.0), ((2.0, 3.0, 5.0), (2.5, 4.0, 7.0)), {"suffix": (0.5, 0.75)})


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "FILE", tmp_path / "cache" / "costs.json")
    return costs.FILE


def test_costs_lie_on_lines_and_never_fall():
    assert MEASURED(1) == 2.0 and MEASURED(6) == 4.0 and MEASURED(6, SAMPLED) == 5.5
    assert MEASURED(12) == 7.0  # on the last line
    noisy = RowCosts((1.0, 2.0, 4.0), ((3.0, 2.0, 4.0),) * 2)
    assert noisy(2) == 3.0 and noisy(3) == 3.5


def test_what_was_measured_is_found_again_for_the_same_base_machine_and_batch(tiny, monkeypatch):
    assert "typical ones of a CPU (`jaxspec tune --quick` measures them)" in find_costs(tiny).note
    save_costs(tiny, 1, MEASURED)
    assert find_costs(tiny) == find_costs(tiny, 4) == MEASURED  # with no other, those of one text
    save_costs(tiny, 4, RowCosts((4.0, 16.0), ((3.0, 6.0), (4.0, 8.0))))
    assert find_costs(tiny, 4).rows == (4.0, 16.0) and find_costs(tiny) == MEASURED
    assert "typical" in find_costs(make_tiny(dataclasses.replace(TINY, num_layers=2))).note
    monkeypatch.setattr(costs, "this_machine", lambda: this_machine() | {"processor": "another"})
    assert "typical" in find_costs(tiny).note


def test_drafters_measured_before_stay(tiny):
    save_costs(tiny, 1, MEASURED)
    save_costs(tiny, 1, RowCosts((1.0, 8.0), ((1.0, 2.0),) * 2, {"hydra": (3.0, 4.0)}))
    found = find_costs(tiny)
    assert found.rows == (1.0, 8.0) and found.drafting == {"suffix": (0.5, 0.75), "hydra": (3.0, 4.0)}


@pytest.mark.parametrize(
    "change",
    [
        lambda row: {},
        lambda row: row | {"costs": [[1, 2, 3]]},
        lambda row: row | {"costs": [[1, 2, -3], [1, 2, 3]]},
        lambda row: row | {"costs": [[1, 2, "x"], [1, 2, 3]]},
        lambda row: row | {"rows": [4, 1, 8]},
        lambda row: row | {"drafting": {"suffix": 1}},
        lambda row: [1, 2],
    ],
)
def test_a_damaged_file_is_said_ignored_and_replaced(tiny, file, change):
    save_costs(tiny, 1, MEASURED)
    [(key, row)] = json.loads(file.read_text()).items()
    file.write_text(json.dumps({key: change(row) or {"rows": []}}))
    found = find_costs(tiny)
    assert found.note.startswith(f"{file} is damaged: costs of rows are typical")
    assert found.costs[GREEDY][0] == 1.0
    save_costs(tiny, 1, MEASURED)
    assert find_costs(tiny) == MEASURED


def test_a_file_that_is_no_json_is_replaced(tiny, file):
    file.parent.mkdir()
    file.write_text("{")
    assert "is damaged" in find_costs(tiny).note
    save_costs(tiny, 1, MEASURED)
    assert find_costs(tiny) == MEASURED


def test_rows_are_nearly_free_on_accelerators(tiny, monkeypatch):
    cpu = find_costs(tiny)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = find_costs(tiny)
    assert "typical ones of an accelerator" in gpu.note
    assert cpu(16) / cpu(1) > 2 and gpu(64) / gpu(1) < 1.2
    assert np.all(np.diff([gpu(rows) for rows in range(1, 200)]) >= 0)
