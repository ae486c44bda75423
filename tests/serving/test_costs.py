"""What a server measures of its steps at its start is kept, where it is the default's, and never stops it."""

from pathlib import Path

import numpy as np
import pytest

from jaxspec.drafters import costs, load_drafter
from jaxspec.drafters.costs import find_costs
from jaxspec.generation.sizes import SizeTimes
from jaxspec.serving import engine
from tests.helpers.tiny import make_text_model


class MeasuredSlots:
    """Slots whose steps take a millisecond per size, with one row and with two."""

    spread = 1.1

    def __init__(self, drafter, acceptance, limits, penalties):
        self._count, self.times = len(drafter.shape.sizes), {}

    def warm_up(self):
        milliseconds = np.arange(1.0, self._count + 1)
        self.times = {rows: [SizeTimes(10 * rows + milliseconds, 0.5, self.spread)] * 2 for rows in (1, 2)}


@pytest.fixture
def warm_up(monkeypatch):
    """Starts a server with a tree and lets it measure; its base, and what it warns of."""
    monkeypatch.setattr(engine, "Slots", MeasuredSlots)
    warnings = []
    monkeypatch.setattr(engine._log, "warning", lambda *message: warnings.append(message[0] % message[1:]))

    def run(tree=None):
        model = make_text_model(num_layers=1)
        with engine.Engine(model, load_drafter("suffix", model, tree=tree)) as started:
            started.warm_up()
            assert started.alive
        return model, warnings

    return run


def test_costs_are_kept_for_each_number_of_texts(warm_up):
    model, warnings = warm_up()
    assert find_costs(model).rows == (1.0, 4.0, 8.0) and find_costs(model).costs == ((11.0, 11.5, 12.5),) * 2
    assert find_costs(model, 2).rows == (2.0, 8.0, 16.0) and find_costs(model, 2)(2) == 21.0
    assert list(find_costs(model).drafting.values()) == [(0.5, 0.5)] and not warnings


def test_sizes_by_hand_say_nothing_of_the_base(warm_up):
    """Without a step of the root alone what drafting takes cannot be told apart."""
    model, warnings = warm_up("best:4@1,8@1")
    assert "typical" in find_costs(model).note and not costs.FILE.exists() and not warnings


def test_costs_on_a_busy_machine_are_not_kept(warm_up, monkeypatch):
    monkeypatch.setattr(MeasuredSlots, "spread", 3.0)
    _, warnings = warm_up()
    assert not costs.FILE.exists()
    assert warnings == ["costs of steps are not kept: of two alike one took 3.0 times as long"]


def test_a_damaged_file_is_said_and_replaced(warm_up):
    costs.FILE.write_text("{")
    model, warnings = warm_up()
    assert warnings == [f"{costs.FILE} is damaged: it is replaced"] and find_costs(model).note == ""


def test_a_server_that_cannot_write_starts_all_the_same(warm_up, monkeypatch):
    monkeypatch.setattr(costs, "FILE", Path("/dev/null/costs.json"))
    _, [warning] = warm_up()
    assert warning == "costs of steps are not kept: /dev/null: cannot be written (/dev/null is a file)"
