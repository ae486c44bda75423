"""The recent speed of rows, and how long drafts that did not pay rest."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.pace import Pace


def test_the_pace_of_late_forgets():
    pace = Pace.begin(jnp.array([True, True]))
    np.testing.assert_allclose(pace.tokens / pace.time, 1)
    for _ in range(60):
        pace = pace.after(jnp.array([3, 1]), jnp.float32(1.5), jnp.array([True, False]))
    np.testing.assert_allclose(pace.tokens / pace.time, [3 / 1.5, 1 / 1.5], rtol=0.01)
    assert pace.active.tolist() == [True, False]


@pytest.mark.parametrize(("trial", "unit"), [(0.0, 1), (0.25, 1), (-0.5, 1), (0.5, 4)])
def test_drafting_that_does_not_pay_is_tried_less_and_less(trial, unit):
    """The rarer, the dearer a step with a draft is."""
    active = jnp.array([True, False])
    pace, tried = Pace.begin(active), []
    for step in range(1, 50 * unit):
        pace = pace.after(jnp.array([1, 1]), jnp.float32(1.0), active, jnp.bool_(False))
        tried += [] if pace.rests(trial) else [step]
    assert tried == [unit * waited for waited in (1, 2, 4, 8, 16, 32, 48)]
    assert not pace.after(jnp.array([1, 1]), jnp.float32(1.0), active, jnp.bool_(True)).rests(trial)


@pytest.mark.parametrize(("tokens", "trial"), [(1.0, 0.5), (1.05, 0.5), (1.2, 0.0)])
def test_trials_are_dear_unless_drafts_bring_more_than_a_tenth(tokens, trial):
    """By the rows that are not done, in steps of the cheapest size."""
    pace = Pace.begin(jnp.array([True, True, False]))
    pace = pace.replace(tokens=tokens * pace.time * jnp.array([0.5, 1.5, 100.0]))
    np.testing.assert_allclose(pace.trial(jnp.array([[20.0, 30.0, 60.0]])), [trial])


def test_nothing_is_tried_where_no_row_may_draft():
    """And steps without drafts do not count for a row that may."""
    active = jnp.array([True, True, False])
    for drafting, rests in (([False, False, True], True), ([False, True, False], False)):
        pace = Pace.begin(active, jnp.array(drafting))
        assert bool(pace.rests()) == rests
        pace = pace.after(jnp.array([1, 1, 1]), jnp.float32(1.0), active, jnp.bool_(False))
        assert pace.idle.tolist() == [0 if rests else 1] * 3


def test_drafts_keep_resting_for_texts_that_join_a_batch():
    """Even where all others have ended: what kept them from paying, such as a temperature, is likely the same."""
    pace = Pace.begin(jnp.array([True, True]))
    for active in ([True, True], [True, True], [False, False]):
        pace = pace.after(jnp.array([1, 1]), jnp.float32(1.0), jnp.array(active), jnp.bool_(False))
    joined = Pace.begin(jnp.array([True])).joining(pace)
    assert pace.idle.tolist() == [3, 3] and joined.idle.tolist() == [3] and joined.rests()
    assert not Pace.begin(jnp.array([True])).rests()
