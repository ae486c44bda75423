"""The tests behind the page of claims: Holm's correction, pairing, seeds, and the difference that would be seen."""

import numpy as np
import pytest

from experiments.lab.statistics import POWER, Spread, compare, holm, pooled_spread

LABEL = "alone-16"


def score(tokens, steps):
    """A result of a score job."""
    return {"tokens": list(tokens), "drafts": {LABEL: {"rows": 16, "steps": list(steps)}}}


def test_holm_of_a_worked_example():
    """Four p values: .005 x 4 = .02, .01 x 3 = .03, .03 x 2 = .06, and .04 x 1 may not fall below .06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_claim_that_is_measured_later_makes_no_other_weaker():
    """What is not measured counts with p = 1."""
    before, after = holm([0.02, 0.01, 1.0]), holm([0.02, 0.01, 0.004])
    assert after[0] <= before[0] and after[1] <= before[1]


def test_pairing_takes_out_what_makes_answers_hard():
    """Answers differ much and drafters little: the same ones tell them apart, other ones of the same kind do not."""
    tokens = [100] * 40
    steps = np.random.default_rng(0).integers(30, 90, 40)
    faster = score(tokens, steps)
    paired = compare([faster], [score(tokens, steps + 2)], LABEL, Spread())
    others = compare([faster], [score([100] * 39 + [101], steps + 2)], LABEL, Spread())
    assert paired.value == pytest.approx(others.value, abs=0.01)
    assert paired.p_value < 1e-6 and others.p_value > 0.2


def test_the_error_over_answers_is_that_of_drawing_them_anew():
    rng = np.random.default_rng(1)
    tokens, steps = rng.integers(50, 128, 100), rng.integers(20, 60, 100)
    slower = steps + rng.integers(0, 10, 100)
    found = compare([score(tokens, steps)], [score(tokens, slower)], LABEL, Spread())
    drawn = rng.integers(0, 100, (4000, 100))
    again = tokens[drawn].sum(1) / steps[drawn].sum(1) - tokens[drawn].sum(1) / slower[drawn].sum(1)
    assert found.error == pytest.approx(again.std(), rel=0.06)


def test_seeds_widen_a_difference_and_their_spread_is_pooled():
    one, other = score([100] * 4, [50] * 4), score([100] * 4, [40] * 4)  # 2.0 and 2.5 tokens per step
    spread = pooled_spread([[one, other], [one, one, other], [one]], LABEL)
    assert spread.freedom == 3
    assert spread.deviation == pytest.approx(np.sqrt((2 * 0.0625 + 3 * np.var([2, 2, 2.5])) / 3))
    assert pooled_spread([[one], [other]], LABEL) == Spread()
    found = compare([one], [other, other], LABEL, spread)
    assert found.value == -0.5 and found.error == pytest.approx(spread.deviation * np.sqrt(1 + 1 / 2))
    assert found.freedom == pytest.approx(3)
    assert found.half_width() == pytest.approx(3.182 * found.error, rel=1e-3)


def test_answers_that_do_not_differ_need_no_test():
    one, other = score([100] * 4, [50] * 4), score([100] * 4, [40] * 4)
    assert compare([one], [one], LABEL, Spread()).p_value == 1
    assert compare([other], [one], LABEL, Spread()).p_value == 0


def test_the_detectable_difference_is_seen_as_often_as_it_says():
    """Simulated: of drafters that lie so far apart, the test at .01 sees four in five."""
    rng, level, count, runs = np.random.default_rng(2), 0.01, 100, 600
    tokens = np.full(count, 128)
    noise = 6.0  # steps by which drafters differ on an answer, beside what is the same for all
    steps = 64 + rng.normal(0, noise, (200, count))
    errors = [compare([score(tokens, s)], [score(tokens, np.full(count, 64))], LABEL, Spread()) for s in steps]
    apart = np.mean([found.detectable(level) for found in errors])
    faster = 128 / (2 + apart)  # steps per answer
    seen = 0
    for draw in faster + rng.normal(0, noise, (runs, count)):
        found = compare([score(tokens, draw)], [score(tokens, np.full(count, 64))], LABEL, Spread())
        seen += found.p_value < level and found.value > 0
    assert seen / runs == pytest.approx(POWER, abs=0.06)
