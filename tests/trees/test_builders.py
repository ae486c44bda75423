"""`sparse_tree` against every tree there is, the other builders against their node sets written down."""

import itertools

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.trees import (
    cartesian,
    chain,
    efficient,
    expected,
    from_paths,
    medusa,
    random_tree,
    sparse_tree,
    straightforward,
)
from jaxspec.trees.arrays import check_paths
from tests.helpers.trees import random_accuracy


def only_paths(plan):
    (state,) = plan.states
    return list(state.paths)


def sparse_paths(accuracy, num_nodes):
    return only_paths(sparse_tree(accuracy, num_nodes))


def expected_length(accuracy, paths):
    """Sum over the nodes of the probability that their whole path is right."""
    return sum(np.prod([accuracy[level, rank] for level, rank in enumerate(path)]) for path in paths)


def best_length(accuracy, num_nodes):
    """The best of all trees of that size, by trying them."""
    distances, ranks = accuracy.shape
    every = [p for n in range(1, distances + 1) for p in itertools.product(range(ranks), repeat=n)]
    sets = (set(chosen) for chosen in itertools.combinations(every, num_nodes - 1))
    trees = (s for s in sets if all(len(path) == 1 or path[:-1] in s for path in s))
    return max(expected_length(accuracy, tree) for tree in trees)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("distances", "ranks"), [(1, 4), (2, 3), (3, 2)])
def test_no_tree_of_that_size_is_better(seed, distances, ranks):
    accuracy = random_accuracy(seed, distances, ranks)
    most = 1 + sum(ranks**n for n in range(1, distances + 1))
    for num_nodes in range(1, min(most, 6) + 1):
        paths = sparse_paths(accuracy, num_nodes)
        assert len(check_paths(paths)) == num_nodes - 1
        assert expected_length(accuracy, paths) == pytest.approx(best_length(accuracy, num_nodes))


def test_a_larger_tree_contains_the_smaller():
    accuracy = random_accuracy(0, 4, 5)
    trees = [sparse_paths(accuracy, n) for n in range(1, 40)]
    for smaller, larger in itertools.pairwise(trees):
        assert set(larger) > set(smaller) and len(larger) == len(smaller) + 1


def test_only_nodes_that_can_be_right_are_taken():
    """Fewer than asked for where the table holds no more, or none with a positive probability."""
    assert len(sparse_paths(np.full((2, 2), 0.4), 100)) == 2 + 4
    assert sparse_paths(np.array([[0.5, 0.0], [0.3, 0.0]]), 100) == [(0,), (0, 0)]
    assert sparse_paths(np.zeros((2, 2)), 5) == []
    assert sparse_paths(np.array([[0.0], [0.9]]), 5) == []
    assert sparse_paths(np.full((2, 2), 0.5), 1) == []


def test_table_may_be_a_list_and_sum_to_one():
    assert sparse_paths([[0.7, 0.3]], 3) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("accuracy", "num_nodes", "message"),
    [
        ([[0.5, -0.1]], 3, "values in"),
        ([[1.2]], 3, "values in"),
        ([[float("nan")]], 3, "values in"),
        ([0.5, 0.1], 3, r"\[M, K\] table"),
        ([[[0.5]]], 3, r"\[M, K\] table"),
        ([[0.5], [0.5, 0.1]], 3, r"\[M, K\] table"),
        (np.zeros((0, 3)), 3, r"\[M, K\] table"),
        ([[0.2, 0.1], [0.8, 0.4]], 3, "sum to 1.200, more than 1"),
        ([[0.5]], 0, "at least 1"),
        ([[0.5]], -3, "at least 1"),
    ],
)
def test_bad_input_is_named(accuracy, num_nodes, message):
    with pytest.raises(UserError, match=message):
        sparse_tree(accuracy, num_nodes)


def test_tokens_of_a_sparse_tree_are_its_expected_length():
    accuracy = random_accuracy(1, 3, 4)
    plan = sparse_tree(accuracy, 12)
    assert plan.expected_tokens == pytest.approx(1 + expected_length(accuracy, only_paths(plan)))


def test_a_chain_is_the_likeliest_candidate_of_every_distance():
    assert only_paths(chain(1)) == [(0,)]
    assert only_paths(chain(3)) == [(0,), (0, 0), (0, 0, 0)]


def test_straightforward_by_hand():
    """BiTA Figure 4 with three masks: one more candidate accepted, one fewer in the next step."""
    plan = straightforward(3)
    assert [state.paths for state in plan.states] == [(), ((0,),), ((0,), (0, 0)), ((0,), (0, 0), (0, 0, 0))]
    assert all(state.probes[0] == 3 and not any(state.probes[1:]) for state in plan.states)
    assert [state.known for state in plan.states] == [(3,), (3, 2), (3, 2, 1), (3, 2, 1, 0)]
    assert (plan.num_nodes, plan.num_probes, plan.depth) == (4, 3, 3)
    assert plan.arrays(3).next_state[3].tolist() == [3, 2, 1, 0]


def test_tokens_of_straightforward_decoding_are_those_of_a_simulation():
    """Where c candidates were accepted, the probes at distances c + 1 and further predict what follows."""
    right, rng = [0.6, 0.4, 0.2], np.random.default_rng(0)
    accepted, length = [], 3
    for _ in range(40000):
        count = next((c for c in range(length) if rng.random() >= right[3 - length + c]), length)
        accepted.append(count)
        length = 3 - count
    plan = expected(straightforward(3), np.array(right)[:, None])
    assert plan.expected_tokens == pytest.approx(1 + np.mean(accepted), abs=0.02)


@pytest.mark.parametrize("widths", [[1], [4], [2, 2], [3, 1, 2], [2, 3, 1, 2]])
def test_cartesian_is_every_combination(widths):
    paths = only_paths(cartesian(widths))
    assert len(paths) == sum(np.prod(widths[:depth]) for depth in range(1, len(widths) + 1))
    assert all(rank < widths[level] for path in paths for level, rank in enumerate(path))
    assert len(set(paths)) == len(paths) and max(map(len, paths)) == len(widths)


@pytest.mark.parametrize("widths", [[1], [5], [5, 5, 5], [5, 4, 3], [1, 3], [3, 1, 2, 1]])
def test_only_the_best_ones_branch_in_an_efficient_tree(widths):
    paths = only_paths(efficient(widths))
    assert [sum(len(path) == n for path in paths) for n in range(1, len(widths) + 1)] == widths
    assert all(set(path[:-1]) <= {0} and path[-1] < widths[len(path) - 1] for path in paths)
    assert len(set(paths)) == len(paths)


def test_efficient_by_hand():
    assert only_paths(efficient([3, 2])) == [(0,), (1,), (2,), (0, 0), (0, 1)]


def test_medusas_tree_is_that_of_its_figure():
    """64 nodes of depth 4 (Amphista A.1); smaller ones are trees too, each within the next."""
    paths = only_paths(medusa())
    assert len(paths) == 63
    assert [sum(len(path) == n for path in paths) for n in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert max(path[-1] for path in paths) == 9 and {p for p in paths if len(p) == 4} == {(0, 0, 0, 0), (0, 0, 0, 1)}
    trees = [{*only_paths(medusa(n))} for n in range(1, 65)]
    assert [len(tree) for tree in trees] == list(range(64))
    assert all(smaller < larger for smaller, larger in itertools.pairwise(trees))


@pytest.mark.parametrize("widths", [[], [0], [2, 0], [3, -1]])
def test_a_level_without_candidates_is_refused(widths):
    for builder in (cartesian, efficient):
        with pytest.raises(UserError, match="every level needs at least one candidate"):
            builder(widths)


@pytest.mark.parametrize("length", [0, -1])
def test_a_chain_without_candidates_is_refused(length):
    with pytest.raises(UserError, match="at least one candidate"):
        chain(length)


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_are_trees_of_that_size(seed):
    for distances, ranks, num_nodes in [(1, 4, 5), (3, 2, 9), (4, 10, 60), (3, 5, 1)]:
        paths = only_paths(random_tree(distances, ranks, num_nodes, seed))
        assert check_paths(paths) == paths and len(paths) == num_nodes - 1
        assert all(len(path) <= distances and max(path) < ranks for path in paths)


def test_random_trees_differ_by_seed_alone():
    assert random_tree(3, 10, 30, seed=4) == random_tree(3, 10, 30, seed=4)
    assert len({random_tree(3, 10, 30, seed).states for seed in range(10)}) == 10


def test_a_random_tree_ends_where_there_are_no_more_nodes():
    assert random_tree(2, 2, 100) == cartesian([2, 2])
    with pytest.raises(UserError, match="at least 1"):
        random_tree(2, 2, 0)


def test_from_paths_puts_as_many_probes_on_every_node_as_the_tree_is_deep():
    (state,) = from_paths([[0, 1], [2], [0]]).states
    assert state.paths == ((0,), (2,), (0, 1)) and state.probes == (2, 2, 2, 2) and state.needs == 2
    (root,) = from_paths([]).states
    assert root.paths == () and root.probes == (0,) and root.needs == 0
    with pytest.raises(UserError, match="without its parent"):
        from_paths([(0, 0)])


def test_tokens_are_known_where_accuracies_are():
    assert from_paths([(0,)]).expected_tokens is None
    assert from_paths([(0,), (1,), (0, 1)], [[0.5, 0.25], [0.5, 0.4]]).expected_tokens == pytest.approx(1.95)
