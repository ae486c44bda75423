"""Both metrics of Spec-Bench by hand, and intervals."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxspec.bench.answers import accept_lengths
from jaxspec.bench.metrics import estimate, figures
from jaxspec.generation.generate import Generation
from tests.helpers.bench import answer_row as row

# Two turns of 7 and 3 tokens, and one of 5; a turn of n tokens takes n - 1 autoregressive steps.
PLAIN = [
    row(1, [7, 3], [6.0, 2.0], [7.0, 3.0], [[1] * 6, [1] * 2]),
    row(2, [5], [4.0], [6.0], [[1] * 4]),
]
OURS = [
    row(1, [7, 3], [3.0, 1.0], [4.0, 2.0], [[3, 2, 1], [2]], [None, {"index": 1}], [[3, 1], [1, 1]], [[2, 1], [1, 0]]),
    row(2, [5], [4.0], [6.0], [[2, 2]], offered=[[2, 2]], accepted=[[2, 0]]),
]


def test_figures_by_hand():
    found = figures([OURS], [PLAIN])
    assert found.tokens_per_step == 12 / 6  # pooled over steps, the bonus included
    # Spec-Bench: tokens with prefill's over wall time, averaged over questions: (10/6 + 5/6)/2 over (10/10 + 5/6)/2
    assert found.with_prefill == pytest.approx(15 / 11)
    # ours: (10 - 2) tokens in 4 s against 8 s, and 4 tokens in 4 s against 4 s
    assert found.speedup.value == found.mean_speedup.value == 1.5
    assert found.tokens_per_second == 1.5 and found.step_milliseconds == 1500
    assert found.step_cost == pytest.approx((1.0 + 2.0) / 2)
    assert found.acceptance == (5 / 6, 1 / 4) and found.acceptance_rate is None
    assert (found.identical, found.answers, found.questions) == (2, 3, 2)


def test_the_acceptance_rate_is_of_all_that_was_drafted():
    drafted = [r | {"choices": [r["choices"][0] | {"candidates": [10]}]} for r in OURS]
    assert figures([drafted], [PLAIN]).acceptance_rate == 6 / 20


def test_autoregressive_decoding_against_itself_is_one():
    found = figures([PLAIN], [PLAIN])
    assert found.tokens_per_step == found.speedup.value == found.with_prefill == found.step_cost == 1
    assert found.acceptance == () and found.speedup.low is None  # two questions are too few for an interval


def test_repeats_are_averaged_within_a_question_and_shown_by_run():
    slower = [slowed(r, 2.0) for r in OURS]
    found = figures([OURS, slower], [PLAIN, PLAIN])
    assert found.questions == 2 and found.answers == 6
    assert found.run_speedups == (1.5, 0.75)
    assert found.mean_speedup.value == pytest.approx(1.125)


def slowed(original, factor):
    choice = original["choices"][0]
    slow = choice | {"decode_seconds": [factor * seconds for seconds in choice["decode_seconds"]]}
    return original | {"choices": [slow]}


def test_turns_behind_one_that_differs_are_not_compared():
    parted = [OURS[0] | {"choices": [OURS[0]["choices"][0] | {"divergence": [{"index": 3}]}]}, OURS[1]]
    found = figures([parted], [PLAIN])
    assert (found.identical, found.answers) == (1, 2)


def test_a_batch_is_timed_as_one():
    """Two answers of 101 and 11 tokens made together, 100 steps of 0.1 s; ours makes 2 tokens a step of 0.125 s."""
    pair = [["f", 1], ["f", 2]]
    plain = [row(n, [t], [10.0], [11.0], [[1] * (t - 1)], batch=[1, 2]) for n, t in ((1, 101), (2, 11))]
    ours = [row(n, [t], [6.25], [7.0], [[2] * (t // 2)], batch=[1, 2]) for n, t in ((1, 101), (2, 11))]
    assert plain[0]["batch"] == pair
    alone, found = figures([plain], [plain]), figures([ours], [plain])
    assert alone.step_milliseconds == pytest.approx(100) and alone.tokens_per_second == pytest.approx(11)
    assert found.step_milliseconds == pytest.approx(125) and found.speedup.value == pytest.approx(1.6)
    assert found.step_cost == pytest.approx(1.25) and found.questions == 2
    assert found.with_prefill == pytest.approx(11 / 7)
    many = [
        [r | {"batch": [["f", f"{b}-{q}"] for q in (1, 2)], "question_id": f"{b}-{r['question_id']}"} for r in rows]
        for rows in (ours, plain)
        for b in range(4)
    ]
    four = figures([list(itertools.chain(*many[:4]))], [list(itertools.chain(*many[4:]))])
    assert four.questions == 8 and four.speedup.low is None  # four batches, too few for an interval


def test_questions_without_a_step_say_nothing_of_speed():
    single = row(3, [1], [0.0], [1.0], [[]], offered=[[0, 0]], accepted=[[0, 0]])
    assert figures([[single]], [[single]]) is None
    assert figures([[*OURS, single]], [[*PLAIN, single]]).mean_speedup == figures([OURS], [PLAIN]).mean_speedup


def test_an_interval_holds_its_value_and_narrows_with_more_questions():
    values = np.random.default_rng(1).normal(1.2, 0.1, 400)
    few, many = estimate(values[:20], np.median), estimate(values, np.median)
    for found in (few, many):
        assert found.low < found.value < found.high
    assert many.high - many.low < 0.5 * (few.high - few.low)
    assert estimate(values, np.median) == many


def test_accept_lengths_follow_from_what_was_drafted():
    answer = Generation("", "", [1] * 8, [0, 1, 1, 0, 0, 1, 0, 1], 4, [], [], 0, 0, 0)
    assert accept_lengths(answer) == [3, 1, 2, 1]  # the last step's bonus was cut off
    assert accept_lengths(dataclasses.replace(answer, tokens=[1], drafted_by=[0])) == []
