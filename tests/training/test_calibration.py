"""Scores become probabilities: what is fitted to outcomes that were drawn from known ones."""

import numpy as np
import pytest

from jaxspec.training.calibration import BINS_PER_NAT, IDENTITY, NATS, fit


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.8, -0.3), (1.5, -0.1)])
def test_the_settings_that_outcomes_were_drawn_with_are_found(slope, offset):
    x = -(np.arange(NATS * BINS_PER_NAT) + 0.5) / BINS_PER_NAT
    tried = np.full(x.shape, 5000)
    right = np.random.default_rng(0).binomial(tried, np.exp(np.minimum(slope * x + offset, 0)))
    [found] = fit(tried[None], right[None])
    assert found == pytest.approx([slope, offset], abs=0.03)


def test_too_few_candidates_change_nothing():
    tried = np.zeros((2, NATS * BINS_PER_NAT))
    tried[1, 3] = 20
    assert fit(tried, tried) == [[*IDENTITY]] * 2
    assert fit(100 * tried, 0 * tried) == [[*IDENTITY]] * 2  # nor does a distance that is never right
