"""`sparse_paths` against every tree there is."""

import itertools

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.tree import check_paths, sparse_paths


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


def random_accuracy(seed, distances, ranks):
    """[M, K], not sorted by rank: nothing promises that."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(ranks + 1), size=distances)[:, :ranks]


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
        assert larger[:-1] == smaller


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
        sparse_paths(accuracy, num_nodes)
