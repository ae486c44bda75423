"""What makes a source's scores chances: kept by temperature, and refused where it is damaged."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxspec.drafters.source import temperature_key
from jaxspec.errors import UserError
from jaxspec.methods import Medusa, PromptLookup, Suffix
from tests.helpers.methods import source

TABLES = {key: [[number, -number]] * 3 for number, key in enumerate(("0", "0.25", "0.8", "10"), 1)}


@pytest.fixture
def heads(tiny):
    return source(Medusa(heads=3), tiny)


def numbers(calibrations):
    """{temperature: its first number}, in their order."""
    return dict(zip(calibrations.temperatures.tolist(), calibrations.tables[:, 0, 0].tolist(), strict=True))


def test_calibrations_are_in_the_order_of_their_temperatures(heads):
    heads.adapter.info["calibration"] = {key: TABLES[key] for key in ("10", "0.25", "0")}
    found = heads.calibrations()
    assert numbers(found) == {0.0: 1, 0.25: 2, 10.0: 4}
    np.testing.assert_array_equal(found.tables[2], TABLES["10"])
    assert found.tables.dtype == found.temperatures.dtype == np.float32


def test_a_sources_own_values_count_at_their_temperatures_alone(heads):
    heads.adapter.info["calibration"] = {"0": TABLES["0"], "0.5": TABLES["0"], "1.0": TABLES["0"]}
    own = {temperature_key(0.25): TABLES["0.25"], temperature_key(1.0): TABLES["10"]}
    found = dataclasses.replace(heads, calibration=own).calibrations()
    assert numbers(found) == {0.0: 1, 0.25: 2, 0.5: 1, 1.0: 4}


def test_what_was_never_fitted_stays_as_it_is(heads):
    np.testing.assert_array_equal(heads.calibrations().tables, [[[1, 0]] * 3])


def test_a_methods_values_are_those_of_the_last_distance_from_there_on(tiny):
    """What looks up the text has chances of greedy tokens, and values for sampled ones."""
    for method in (PromptLookup(length=12), Suffix(length=2)):
        found = source(method, tiny).calibrations()
        greedy, *sampled = found.tables
        np.testing.assert_array_equal(greedy, [[1, 0]] * method.length)
        for table, known in zip(sampled, list(method.calibration.values())[1:], strict=True):
            np.testing.assert_allclose(table, [known[min(i, len(known) - 1)] for i in range(method.length)])


@pytest.mark.parametrize(
    "calibration",
    [
        [1],
        {"0": 3},
        {"0": [[1.0, 0.0]]},
        {"0": [[1.0], [1.0, 0.0]]},
        {"0": [["a", "b"]] * 3},
        {"0": [[None, 0.0]] * 3},
        {"0.8": TABLES["0.8"]},  # without greedy decoding
        {"0": TABLES["0"], "0.8": TABLES["0.8"][:2]},
        *({"0": TABLES["0"], key: TABLES["0.8"]} for key in ("sampled", "", "-0.5", "nan", "inf")),
        {"greedy": TABLES["0"], "sampled": TABLES["0.8"]},
    ],
    ids=str,
)
def test_a_damaged_calibration_is_refused(heads, calibration):
    heads.adapter.info["calibration"] = calibration
    wanted = "calibration must hold two numbers for each of 3 distances by temperature, 0 among them"
    with pytest.raises(UserError, match=f"^medusa: {wanted}; run `jaxspec tune` again$"):
        heads.calibrations()
    read = dataclasses.replace(heads.adapter, folder=Path("runs/heads"))
    again = "run `python -m experiments.calibrate --methods medusa` again"
    with pytest.raises(UserError, match=f"^runs/heads/adapter.json: {wanted}; {again}$"):
        dataclasses.replace(heads, adapter=read).calibrations()
