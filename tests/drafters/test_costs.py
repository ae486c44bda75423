"""Costs of rows: kept by base and machine, read back, typical ones where there are none or none that can be read."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config import MeshConfig
from jaxspec.drafters import costs
from jaxspec.drafters.costs import GREEDY, SAMPLED, RowCosts, find_costs, save_costs
from jaxspec.errors import UserError
from jaxspec.machine import this_machine
from jaxspec.parallel.sharding import make_mesh
from tests.helpers.tiny import TINY, make_tiny

MEASURED = RowCosts((1.0, 4.0, 8.0), ((2.0, 3.0, 5.0), (2.5, 4.0, 7.0)), {"suffix": (0.5, 0.75)})
OTHER = RowCosts((1.0, 8.0), ((4.0, 9.0), (5.0, 11.0)), {"suffix": (0.25, 0.25)})


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "FILE", tmp_path / "cache" / "costs.json")
    return costs.FILE


def test_costs_lie_on_lines_and_never_fall():
    assert MEASURED(1) == 2.0 and MEASURED(6) == 4.0 and MEASURED(6, SAMPLED) == 5.5
    assert MEASURED(12) == 7.0  # on the last line
    noisy = RowCosts((1.0, 2.0, 4.0), ((3.0, 2.0, 4.0),) * 2)
    assert noisy(2) == 3.0 and noisy(3) == 3.5


def save(model, costs, batch_size=1, rounds=9):
    return save_costs(model, batch_size, costs, rounds)


def test_what_was_measured_is_found_again_for_the_same_base_machine_and_batch(tiny, monkeypatch):
    assert "typical ones of a CPU to begin with (`jaxspec tune --quick` measures them)" in find_costs(tiny).note
    assert save(tiny, MEASURED) == ""
    assert find_costs(tiny) == find_costs(tiny, 4) == MEASURED  # with no other, those of one text
    save(tiny, RowCosts((4.0, 16.0), ((3.0, 6.0), (4.0, 8.0))), batch_size=4)
    assert find_costs(tiny, 4).rows == (4.0, 16.0) and find_costs(tiny) == MEASURED
    assert "typical" in find_costs(make_tiny(dataclasses.replace(TINY, num_layers=2))).note
    monkeypatch.setattr(costs, "this_machine", lambda: this_machine() | {"processor": "another"})
    assert "typical" in find_costs(tiny).note


def test_costs_of_a_mesh_are_its_own(tiny):
    save(tiny, MEASURED)
    mesh = make_mesh(MeshConfig(tensor=2))
    divided = dataclasses.replace(tiny, params=jax.device_put(tiny.params, NamedSharding(mesh, PartitionSpec())))
    assert "typical" in find_costs(divided).note
    save(divided, OTHER)
    assert find_costs(divided) == OTHER and find_costs(tiny) == MEASURED


def test_a_newer_measurement_replaces_all_rows_and_joins_other_drafters(tiny):
    """The machine may have been busier then: rows of both would not rise."""
    save(tiny, MEASURED)
    save(tiny, RowCosts((1.0, 6.0), ((1.0, 4.0), (1.5, 5.0)), {"hydra": (3.0, 4.0)}))
    found = find_costs(tiny)
    assert found.rows == (1.0, 6.0) and found.costs == ((1.0, 4.0), (1.5, 5.0))
    assert found.drafting == {"suffix": (0.5, 0.75), "hydra": (3.0, 4.0)}


def test_fewer_rounds_replace_nothing(tiny):
    """A server measures a few steps of each size, `jaxspec tune --quick` many."""
    save(tiny, MEASURED, rounds=9)
    save(tiny, RowCosts((1.0, 6.0), ((1.0, 4.0), (1.5, 5.0)), {"suffix": (9.0, 9.0)}), rounds=3)
    found = find_costs(tiny)
    assert found == MEASURED
    save(tiny, OTHER, rounds=9)
    assert find_costs(tiny) == OTHER


DAMAGES = {
    "null": lambda entry: None,
    "empty": lambda entry: {},
    "a list": lambda entry: [1, 2],
    "one number of rows": lambda entry: entry | {"rows": {"1.0": [1, 1, 9]}},
    "no rounds": lambda entry: entry | {"rows": {"1.0": [1, 2], "4.0": [2, 3]}},
    "negative": lambda entry: entry | {"rows": entry["rows"] | {"4.0": [-3, 4, 9]}},
    "nothing": lambda entry: entry | {"rows": entry["rows"] | {"4.0": [0, 4, 9]}},
    "a word": lambda entry: entry | {"rows": entry["rows"] | {"4.0": ["x", 4, 9]}},
    "no rows": lambda entry: entry | {"rows": entry["rows"] | {"x": [3, 4, 9]}},
    "rows below 0": lambda entry: entry | {"rows": entry["rows"] | {"-1": [3, 4, 9]}},
    "the same rows twice": lambda entry: entry | {"rows": entry["rows"] | {"4": [3, 4, 9]}},
    "beyond floats": lambda entry: entry | {"rows": entry["rows"] | {"4.0": [10**400, 4, 9]}},
    "drafting in one number": lambda entry: entry | {"drafting": {"suffix": 1}},
    "drafting of NaN": lambda entry: entry | {"drafting": {"suffix": [math.nan, 1.0, 9]}},
    "drafting below 0": lambda entry: entry | {"drafting": {"suffix": [-1.0, 1.0, 9]}},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_ignored_and_replaced_alone(tiny, file, damage):
    save(tiny, MEASURED)
    save(tiny, OTHER, batch_size=4)
    [(key, entry), (other, kept)] = json.loads(file.read_text()).items()
    file.write_text(json.dumps({key: DAMAGES[damage](entry), other: kept}))
    found = find_costs(tiny)
    assert found.note.startswith(f"{file} is damaged: costs of rows are typical ones")
    assert found.costs[GREEDY][0] == 1.0 and find_costs(tiny, 4) == OTHER
    assert save(tiny, MEASURED) == f"{file} is damaged: the costs of this base are replaced"
    assert find_costs(tiny) == MEASURED and find_costs(tiny, 4) == OTHER


@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"\xff", b"[" * 100_000], ids=lambda x: repr(x[:4]))
def test_a_file_that_holds_no_costs_is_said_and_replaced(tiny, file, content):
    file.parent.mkdir()
    file.write_bytes(content)
    assert find_costs(tiny).note.startswith(f"{file} is damaged: costs of rows are typical ones")
    assert save(tiny, MEASURED) == f"{file} is damaged: it is replaced"
    assert find_costs(tiny) == MEASURED


def test_a_file_that_cannot_be_read_or_written_is_one_line(tiny, file, monkeypatch):
    file.mkdir(parents=True)
    assert find_costs(tiny).note.startswith(f"{file} cannot be read (Is a directory): costs of rows are typical ones")
    with pytest.raises(UserError, match=r"costs.json: cannot be written \(it is a folder\); remove it"):
        save(tiny, MEASURED)
    file.rmdir()

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:  # fixtures read files when the test has ended
        patched.setattr(Path, "exists", refuse)
        patched.setattr(Path, "read_text", refuse)
        assert find_costs(tiny).note.startswith(f"{file} cannot be read (Permission denied): ")
        with pytest.raises(UserError, match=r"costs.json: cannot be written \(Permission denied\)"):
            save(tiny, MEASURED)
    monkeypatch.setattr(costs, "FILE", Path("/dev/null/costs.json"))
    with pytest.raises(UserError, match="/dev/null: cannot be written"):
        costs.check_costs_file()


def test_rows_are_nearly_free_on_accelerators(tiny, monkeypatch):
    cpu = find_costs(tiny)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = find_costs(tiny)
    assert "typical ones of an accelerator" in gpu.note
    assert cpu(16) / cpu(1) > 2 and gpu(64) / gpu(1) < 1.2
    assert np.all(np.diff([gpu(rows) for rows in range(1, 200)]) >= 0)
