"""The arrays of a tree against a slow reference that reads the paths themselves."""

import random
import re

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.tree import Tree, build_tree, check_paths, tree_paths


def random_paths(seed, depth=4, ranks=4):
    """A random tree, its paths shuffled."""
    rng = random.Random(seed)
    nodes = [()]
    for _ in range(rng.randrange(25)):
        path = (*rng.choice(nodes), rng.randrange(ranks))
        if path not in nodes and len(path) <= depth:
            nodes.append(path)
    rng.shuffle(paths := nodes[1:])
    return paths


@pytest.mark.parametrize("seed", range(20))
def test_arrays_of_random_trees(seed):
    paths, distances = random_paths(seed), 4
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]
    counts = [random.Random(seed + n).randrange(distances + 1) for n in range(len(nodes))]
    tree = build_tree(paths, distances, counts)
    assert tree.num_nodes == len(nodes) and tree.live.all()
    for n, path in enumerate(nodes):
        assert nodes[tree.parent[n]] == path[:-1]
        assert tree.depth[n] == len(path)
        assert tree.rank[n] == (path[-1] if path else 0)
        for other, candidate in enumerate(nodes):
            assert tree.ancestors[n, other] == (path[: len(candidate)] == candidate)
        for distance in range(1, distances + 1):
            probe = tree.probe_of[n, distance - 1]
            assert (probe >= 0) == (distance <= counts[n])
            if probe >= 0:
                assert (tree.probe_owner[probe], tree.probe_distance[probe]) == (n, distance)
    assert tree.num_probes == sum(counts) == (tree.probe_of >= 0).sum()
    assert (np.diff(tree.probe_distance) >= 0).all()  # each segment of layers works on a prefix
    assert tree.max_depth == max(len(path) for path in nodes)
    assert tree.max_rank == 1 + max(rank for path in [(0,), *paths] for rank in path)
    assert (tree.parent[1:] < np.arange(1, len(nodes))).all()


@pytest.mark.parametrize("seed", range(10))
def test_tree_paths_is_the_inverse(seed):
    paths = random_paths(seed)
    tree = build_tree(paths)
    assert tree_paths(tree) == sorted(paths, key=lambda p: (len(p), p)) == check_paths(paths)
    again = build_tree(tree_paths(tree))
    np.testing.assert_array_equal(again.ancestors, tree.ancestors)


def test_tree_paths_leaves_padding_out():
    tree = build_tree([(0,), (1,), (0, 2)])
    padded = Tree(
        parent=np.append(tree.parent, [0, 0]),
        depth=np.append(tree.depth, [0, 0]),
        rank=np.append(tree.rank, [0, 0]),
        live=np.append(tree.live, [False, False]),
        ancestors=np.pad(tree.ancestors, ((0, 2), (0, 2))),
        probe_owner=tree.probe_owner,
        probe_distance=tree.probe_distance,
        probe_of=np.pad(tree.probe_of, ((0, 2), (0, 0))),
        max_depth=4,
        max_rank=4,
    )
    assert tree_paths(padded) == [(0,), (1,), (0, 2)]


def test_root_alone():
    tree = build_tree([], 3)
    assert (tree.num_nodes, tree.num_probes, tree.max_depth, tree.max_rank) == (1, 0, 0, 1)
    np.testing.assert_array_equal(tree.probe_of, [[-1, -1, -1]])
    assert tree.ancestors.all() and tree_paths(tree) == []


def test_every_node_carries_the_probes_a_tree_of_this_depth_can_use():
    tree = build_tree([(0,), (1,), (0, 0)], 2)
    np.testing.assert_array_equal(tree.probe_owner, [0, 1, 2, 3, 0, 1, 2, 3])
    np.testing.assert_array_equal(tree.probe_distance, [1, 1, 1, 1, 2, 2, 2, 2])
    shallow = build_tree([(0,), (1,)], 2)
    np.testing.assert_array_equal(shallow.probe_of, [[0, -1], [1, -1], [2, -1]])
    assert build_tree([(0,), (1,)]).num_probes == 0


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([()], "the root's empty path is implied"),
        ([(0,), (0,)], "path [0] occurs twice"),
        ([(0,), (0, 1), (1,), (0, 1)], "path [0, 1] occurs twice"),
        ([(-1,)], "path [-1] has a negative rank"),
        ([(0,), (0, -2)], "path [0, -2] has a negative rank"),
        ([(0, 0)], "path [0, 0] comes without its parent [0]"),
        ([(0,), (1, 0, 0), (1,)], "path [1, 0, 0] comes without its parent [1, 0]"),
    ],
)
def test_paths_that_form_no_tree_are_named(paths, message):
    for function in (check_paths, build_tree):
        with pytest.raises(UserError, match=re.escape(message)):
            function(paths)


def test_paths_may_come_as_lists_and_in_any_order():
    """JSON has no tuples."""
    assert check_paths([[0, 1], [2], [0]]) == [(0,), (2,), (0, 1)]


@pytest.mark.parametrize("probes", [[1], [1, 1, 1], [3, 0], [0, -1]])
def test_wrong_probe_counts_are_refused(probes):
    with pytest.raises(UserError, match="2 nodes need as many probe counts between 0 and 2"):
        build_tree([(0,)], 2, probes)


def test_path_longer_than_the_probes_reach_is_refused():
    """Nothing would ever propose a candidate there; a tree without probes has no such limit."""
    deep = [(0,), (0, 0), (0, 0, 0)]
    assert build_tree(deep, 3).max_depth == build_tree(deep).max_depth == 3
    with pytest.raises(UserError, match=re.escape("[0, 0, 0]")):
        build_tree(deep, 2)
