"""Recorded offers beside the answer that came: what was right, and what it had to stand behind."""

import numpy as np
import pytest

from jaxspec.decoding.draft import Offer
from jaxspec.tuning.record import Recording

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
