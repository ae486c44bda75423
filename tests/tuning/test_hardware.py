"""The search for the fastest tree, on machines of our own making."""

import numpy as np
import pytest

from jaxspec.trees import expected
from jaxspec.tuning.hardware import fit_latency, rank_options

ACCURACY = np.array([[0.5, 0.2, 0.1, 0.05], [0.3, 0.15, 0.1, 0.05], [0.2, 0.1, 0.05, 0.02]])


def test_latency_is_increasing_and_straight_between_and_beyond_the_measured_sizes():
    latency = fit_latency({8: 3.0, 1: 1.0, 4: 2.0, 6: 1.8})
    assert latency.rows == (1, 4, 6, 8) and latency.seconds == (1.0, 2.0, 2.0, 3.0)
    assert [latency(r) for r in (1, 2.5, 5, 7, 10)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 4.0])


@pytest.mark.parametrize(("probes", "probe_rows"), [(3, 1), (3, 4), (0, 1)])
def test_options_are_sorted_and_count_what_a_step_costs(probes, probe_rows):
    latency = fit_latency({1: 1.0, 64: 3.0})
    options = rank_options(ACCURACY, latency, 12, probes, probe_rows)
    assert [o.predicted for o in options] == sorted((o.predicted for o in options), reverse=True)
    for option in options:
        assert option.rows == option.shape.num_nodes + (option.shape.num_probes * probe_rows if probes else 0) <= 12
        assert option.predicted == pytest.approx(
            expected(option.shape, ACCURACY).expected_tokens / latency(option.rows)
        )


@pytest.mark.slow
def test_free_rows_call_for_the_largest_trees_and_dear_ones_for_the_smallest():
    free = rank_options(ACCURACY, fit_latency({1: 1.0, 64: 1.0}), 12, 3, 1)[0]
    dear = rank_options(ACCURACY, fit_latency({1: 1.0, 2: 2.0, 64: 64.0}), 12, 3, 1)[0]
    assert free.rows > 9 and dear.rows <= 4
    assert dear.predicted < 1.0  # autoregressive decoding would be faster, and the tuner can see it


def test_states_that_are_never_reached_are_left_out():
    for option in rank_options(ACCURACY, fit_latency({1: 1.0, 64: 2.0}), 12, 3, 1):
        followers = {option.shape.next_state(n) for state in option.shape.states for n in state.probes}
        assert followers == set(range(len(option.shape.states)))
