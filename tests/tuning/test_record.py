"""Recorded offers beside the answer that came: what was right, and what it had to stand behind."""

import numpy as np
import pytest

from jaxspec.decoding.draft import Offer
from jaxspec.tuning.record import Recording, fit_calibration, ranks_of

TOKENS = np.array([[[1, 9], [2, 7]], [[9, 8], [3, 7]], [[3, 7], [4, 7]]])  # of three positions at two distances
ANSWER = np.array([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("parent", "here", "right"),
    [
        (None, [[1, 1], [1, 1]], [[1, 0], [1, 0]]),
        ([[0, 1], [1, 0]], [[1, 0], [0, 1]], [[1, 0], [0, 0]]),  # the second position's 3 stands behind another token
    ],
    ids=["independent", "trie"],
)
def test_candidates_are_told_apart_along_the_answer(parent, here, right):
    """The second position offers nothing right at distance 1, and the third one's answer ends there."""
    parents = None if parent is None else np.array([[[0, 0], row] for row in (*parent, [0, 0])])
    offer = Offer(TOKENS, np.ones((3, 1, 1), bool), np.zeros((3, 2, 2)), parents)
    first, second = Recording(ANSWER, [offer]).along_answer(0)
    np.testing.assert_array_equal(first[0], [True] * 3)
    np.testing.assert_array_equal(first[2], [[1, 0], [0, 0], [1, 0]])
    reached, found, hits, log_p = second
    np.testing.assert_array_equal(reached, [True, False])
    np.testing.assert_array_equal(found, here)
    np.testing.assert_array_equal(hits, right)
    assert log_p.shape == (2, 2)


def test_ranks_are_those_of_the_tokens_that_come():
    """The second position has nothing right at distance 1; behind others, what follows counts only where they do."""
    log_p = np.log([[[0.5, 0.4], [0.3, 0.6]]] * 3)
    for parent, along, second in (
        (None, [[0, 1], [-1, 1], [0, -1]], [0, 1]),
        (np.array([[[0, 0], [0, 1]]] * 3), [[0, 0], [-1, -1], [0, -1]], [1, 0]),
    ):
        found = ranks_of([Recording(ANSWER, [Offer(TOKENS, np.ones((3, 1, 1), bool), log_p, parent)])], 0)
        np.testing.assert_array_equal(found.along_answers[0], along)
        np.testing.assert_allclose(found.accuracy[:, :2], [[2 / 3, 0], second])


def test_calibration_finds_the_chances_that_came_true():
    """A source that is too sure: a chance of p comes true with p squared, at the second distance less often still."""
    answer, random = np.arange(2001) % 7, np.random.default_rng(0)
    log_p = -random.uniform(0.1, 1.5, (2000, 2, 1)).astype(np.float32)
    right = random.random((2000, 2)) < np.exp(2 * log_p[..., 0] + [0.0, -0.3])
    wanted = np.stack([np.roll(answer, -1)[:-1], np.roll(answer, -2)[:-1]], axis=1)
    tokens = np.where(right, wanted, 9)[..., None]
    recording = Recording(answer, [Offer(tokens, np.ones_like(tokens, bool), log_p, np.zeros_like(tokens))])
    known = [[1.0, 0.0], [1.0, 0.0], [0.5, -0.1]]  # at a third distance, which nothing is offered at
    np.testing.assert_allclose(
        fit_calibration([recording], 0, known), [[2.0, 0.0], [2.0, -0.3], [0.5, -0.1]], atol=0.25
    )
