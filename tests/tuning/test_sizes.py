"""Costs of rows, measured with the steps of a drafter."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.drafters.defaults import cost_name, with_default
from jaxspec.generation import sizes
from jaxspec.generation.job import Job, Settings
from jaxspec.generation.sizes import SizeTimes
from jaxspec.methods import PPD, Hydra, Suffix
from jaxspec.tuning.sizes import SAMPLINGS, measure_rows, measure_sizes, row_costs
from tests.helpers.methods import union
from tests.helpers.tiny import make_text_model


@pytest.fixture
def drafter():
    return with_default(union([PPD(), Suffix()], make_text_model(num_layers=1), 8))


def set_clock(monkeypatch, seconds):
    """Have steps, which do nothing, take so many seconds one by one; the last of these for all that follow."""
    clock = [0.0]
    monkeypatch.setattr(sizes.time, "perf_counter", lambda: clock[0])

    def timed(decoding, state, steps):
        clock[0] += seconds.pop(0) if len(seconds) > 1 else seconds[0]
        return state

    monkeypatch.setattr(sizes, "decode", timed)


def test_costs_of_rows_are_without_drafting(drafter):
    greedy, sampled = np.array([20.0, 24.0, 30.0, 25.0, 29.0]), np.array([21.0, 25.0, 35.0, 27.0, 34.0])
    costs = row_costs(drafter, 2, [SizeTimes(greedy, 2.0), SizeTimes(sampled, 3.0)])
    assert costs.rows == (2.0, 8.0, 16.0)  # four nodes, or two and their probes
    assert costs.costs == ((20.0, 22.0, 27.0), (21.0, 22.0, 31.0))
    assert costs.drafting == {cost_name(drafter): (2.0, 3.0)}


def test_noise_makes_no_size_cheaper_than_a_smaller_one(drafter):
    """Drafting may seem to take longer than a whole step with a draft."""
    times = SizeTimes(np.array([20.0, 24.0, 23.0, 30.0, 30.0]), 25.0)
    assert row_costs(drafter, 1, [times] * 2).costs == ((20.0, 20.0, 20.0),) * 2


def test_a_slow_moment_makes_no_greedy_step_dearer_than_a_sampled_one(drafter, monkeypatch):
    """Its work is a part of the other's."""
    set_clock(monkeypatch, [9.0] * 5 + [1.0])
    costs = measure_rows(drafter, rounds=1).costs
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("seconds", "rounds"), [(1000.0, 9), (40.0, 4), (1.0, 3)])
def test_long_steps_are_timed_less_often(drafter, monkeypatch, seconds, rounds):
    """A round has a step of each of the five sizes and one that rests, greedy and sampled: here twelve seconds."""
    set_clock(monkeypatch, [1.0])
    jobs, done = [Job(drafter, Settings(sampling), 1) for sampling in SAMPLINGS], []
    state = jobs[0].begin([[1, 2]], 8, 1, 8, 64).state
    measure_sizes([job.decoding for job in jobs], state, 9, seconds, done.append)
    assert done == [*range(1, 2 * rounds + 1)]


@pytest.mark.parametrize("length", [64, 1100])
def test_rows_are_measured_with_the_cache_that_was_asked_for(drafter, monkeypatch, length):
    capacities = set()

    def nothing(decoding, state, steps):
        capacities.update(layer.shape[2] for layer in jax.tree.leaves(state.cache))
        return state

    monkeypatch.setattr(sizes, "decode", nothing)
    model = make_text_model(num_layers=1, max_positions=2048)
    measure_rows(dataclasses.replace(drafter, model=model), cache_length=length, rounds=1)
    assert capacities == {length}


@pytest.mark.slow
def test_rows_of_a_cpu_are_measured_greedy_and_sampled():
    drafter = union([Hydra(), Suffix()], make_text_model(num_layers=1), 8)
    costs = measure_rows(drafter, cache_length=64, rounds=1)
    assert (
        costs.rows == (1.0, 4.0, 8.0, 16.0) and np.shape(costs.costs) == (2, 4) and cost_name(drafter) in costs.drafting
    )


@pytest.mark.parametrize(
    ("others", "rows"),
    [((), (1.0, 4.0, 8.0, 12.0, 16.0)), ((Suffix(),), (1.0, 4.0, 8.0, 16.0))],
    ids=["a step of fewer probes", "a step of nodes alone"],
)
def test_few_rows_are_measured_beside_many_probes(monkeypatch, others, rows):
    """The largest step's six probes leave no size between 1 row and 8."""
    drafter = union([PPD(), *others], make_text_model(num_layers=1), 8)
    monkeypatch.setattr(sizes, "decode", lambda decoding, state, steps: state)
    costs = measure_rows(drafter, rounds=1)
    assert costs.rows == rows and (np.diff(costs.costs) >= 0).all()
