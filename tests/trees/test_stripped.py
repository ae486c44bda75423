"""The tree of the thesis against its procedure written down plainly, a case by hand, and the exact search."""

import itertools

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.trees import State, dynamic_sparse_tree, expected, stripped_tree
from tests.helpers.trees import random_accuracy

BY_HAND = [[0.6, 0.2], [0.4, 0.3]]


def thesis_tokens(accuracy, max_rows):
    """Tokens per step of the best division of the rows, by looking at everything again and again."""
    distances, ranks = accuracy.shape
    every = [path for n in range(1, distances + 1) for path in itertools.product(range(ranks), repeat=n)]
    reach = {path: np.prod([accuracy[level, rank] for level, rank in enumerate(path)]) for path in every}
    every.sort(key=lambda path: (-reach[path], len(path)))
    best = 0.0
    for candidates in range(max_rows // 2 + 1):
        trees = [[p for p in every if len(p) <= depth][:candidates] for depth in range(1, distances + 1)]
        length = [0.0, *(sum(reach[path] for path in tree) for tree in trees)]
        transition = np.zeros((distances, distances))
        for state, tree in enumerate(trees):
            last = {p: reach[p] - sum(reach[q] for q in tree if q[:-1] == p) for p in tree}
            probes = dict.fromkeys(tree, distances)
            while len(tree) + sum(probes.values()) > max_rows:
                loss = {p: last[p] * (length[n] - length[n - 1]) for p, n in probes.items() if n > 1}
                probes[min(loss, key=loss.get)] -= 1
            for path, count in probes.items():
                transition[state, count - 1] += last[path]
            transition[state, -1] += 1 - sum(last.values())
        often = np.linalg.matrix_power(transition / 2 + np.eye(distances) / 2, 1 << 20)[0]  # lazy: never periodic
        best = max(best, 1 + often @ length[1:])
    return best


@pytest.mark.parametrize("max_rows", [0, 3, 6, 16, 40])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_procedure_of_the_thesis_and_never_better_than_the_exact_search(seed, max_rows):
    accuracy = random_accuracy(seed, 3, 10)
    plan = stripped_tree(accuracy, max_rows)
    assert plan.expected_tokens == pytest.approx(thesis_tokens(accuracy, max_rows), abs=1e-9)
    assert plan.expected_tokens <= dynamic_sparse_tree(accuracy, max_rows).expected_tokens + 1e-9


def test_a_tree_by_hand():
    """Five rows: two candidates and three probes in each state. Only one candidate of each keeps two probes.

    Alone, the first two candidates make .8 tokens, with one below the other .84. The last accepted one is (0) with .6
    and (1) with .2 in the first tree, (0) with .36 and (0, 0) with .24 in the second: (1) and (0, 0) lose a probe. So
    the first state follows on itself with .2 and on the second with .24, and is there in .3 / 1.3 of the steps.
    """
    plan = stripped_tree(BY_HAND, 5)
    assert plan.states == (State(((0,), (1,)), (2, 2, 1), 1), State(((0,), (0, 0)), (2, 2, 1), 2))
    assert plan.expected_tokens == pytest.approx(1 + (0.3 * 0.8 + 0.84) / 1.3)
    assert plan.expected_tokens == pytest.approx(dynamic_sparse_tree(BY_HAND, 5).expected_tokens)


@pytest.mark.parametrize("cost", [1, 3, 0.5])
def test_every_state_fills_its_rows(cost):
    """As far as its candidates can carry probes, and each keeps at least one."""
    accuracy = random_accuracy(1, 3, 5)
    for max_rows in (4, 7, 30):
        plan = stripped_tree(accuracy, max_rows, cost)
        assert plan.expected_tokens <= dynamic_sparse_tree(accuracy, max_rows, probe_cost=cost).expected_tokens + 1e-9
        for needs, state in enumerate(plan.states, 1):
            count, probes = len(state.paths), sum(state.probes[1:])
            assert state.needs == needs and state.probes[0] == 3 and min(state.probes) >= 1
            assert probes == min(3 * count, int((max_rows - count) / cost))


def test_a_candidate_that_is_always_right_is_no_trap():
    sure = np.eye(4)[[0, 0, 0]]
    plan = stripped_tree(sure, 12)
    assert plan.expected_tokens == pytest.approx(4)
    assert expected(plan, sure).expected_tokens == plan.expected_tokens
    assert stripped_tree([[0.5]], 9).states == (State(((0,),), (1, 1), 1),)


def test_bad_input_is_named():
    with pytest.raises(UserError, match="max_rows must be a whole number from 0 to 1024, got -1"):
        stripped_tree([[0.5]], -1)
    with pytest.raises(UserError, match="probe_cost must be a positive number, got 0"):
        stripped_tree([[0.5]], 4, probe_cost=0)
    with pytest.raises(UserError, match=r"\[M, K\] table"):
        stripped_tree([0.5], 4)
