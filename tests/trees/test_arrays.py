"""The arrays of a tree against a slow reference that reads the paths themselves."""

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.tree import select_trees
from jaxspec.errors import UserError
from jaxspec.trees.arrays import build_tree, check_paths, pad_tree, stack_trees
from tests.helpers.trees import random_paths, tree_paths


@pytest.mark.parametrize("seed", range(20))
def test_arrays_of_random_trees(seed):
    paths, distances = random_paths(seed), 4
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]
    counts = [random.Random(seed + n).randrange(distances + 1) for n in range(len(nodes))]
    tree = build_tree(paths, distances, counts)
    assert tree.num_nodes == len(nodes) and tree.live.all() and tree.probe_live.all()
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
    assert tree.probe_ends == tuple(int((tree.probe_distance <= d).sum()) for d in range(1, distances + 1))
    assert tree.max_depth == max(len(path) for path in nodes)
    assert tree.max_rank == 1 + max(rank for path in [(0,), *paths] for rank in path)
    assert (tree.parent[1:] < np.arange(1, len(nodes))).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_borrowed_probe_predicts_the_same_token(seed):
    """Its own where a node has one; else the nearest ancestor's whose distance reaches as far."""
    paths, distances = random_paths(seed), 4
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]
    counts = [random.Random(seed + n).randrange(distances + 1) for n in range(len(nodes))]
    own, tree = build_tree(paths, distances, counts), build_tree(paths, distances, counts, borrows=True)
    np.testing.assert_array_equal(own.probe_owner, tree.probe_owner)
    for n, path in enumerate(nodes):
        for distance in range(1, distances + 1):
            reaches = (own.probe_of[nodes.index(path[: len(path) - up]), distance - 1 + up]
                       for up in range(min(len(path), distances - distance) + 1))  # fmt: skip
            assert tree.probe_of[n, distance - 1] == next((probe for probe in reaches if probe >= 0), -1)


def test_the_ends_of_a_stack_hold_for_every_tree_in_it():
    few, many = build_tree([(0,)], 2, [2, 0]), build_tree([(0,), (1,)], 2, [1, 1, 1])
    assert (few.probe_ends, many.probe_ends) == ((1, 2), (3, 3))
    assert stack_trees([few, many]).probe_ends == (3, 3)
    assert pad_tree(few, 4, 5, 1, 2).probe_ends == (5, 5) and pad_tree(few, 4, 5, 1, 2, (2, 2)).probe_ends == (2, 5)


def test_inner_counts_the_nodes_that_have_children():
    one, two = build_tree([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)]), build_tree([(0,), (1,), (2,)])
    assert (one.inner, two.inner, build_tree([]).inner) == ((1, 2, 1), (1,), ())
    assert stack_trees([two, one]).inner == (1, 2, 1)
    assert pad_tree(two, 6, 0, 3, 4).inner == (1, 6, 6)  # whatever may stand there


@pytest.mark.parametrize("seed", range(10))
def test_tree_paths_is_the_inverse(seed):
    paths = random_paths(seed)
    tree = build_tree(paths)
    assert tree_paths(tree) == sorted(paths, key=lambda p: (len(p), p)) == check_paths(paths)
    again = build_tree(tree_paths(tree))
    np.testing.assert_array_equal(again.ancestors, tree.ancestors)


def test_tree_paths_leaves_padding_out():
    tree = build_tree([(0,), (1,), (0, 2)])
    assert tree_paths(pad_tree(tree, 6, 0, 4, 4)) == [(0,), (1,), (0, 2)]


def arrays(tree, nodes=None, probes=None):
    """Every array of a tree by name, cut to so many nodes and probes."""
    cut = {name: np.s_[:probes] for name in ("probe_owner", "probe_distance", "probe_live")}
    cut["ancestors"] = np.s_[:nodes, :nodes]
    fields = {name: value for name, value in vars(tree).items() if not name.startswith(("max_", "probe_ends", "inner"))}
    return {name: np.asarray(value)[cut.get(name, np.s_[:nodes])] for name, value in fields.items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert found[name].dtype == value.dtype, name


def numbered(seed):
    """A random tree with probes, its nodes told apart by their next state."""
    tree = build_tree(paths := random_paths(seed), 4, [(seed + n) % 5 for n in range(len(paths) + 1)])
    return tree.replace(next_state=np.arange(7, 7 + tree.num_nodes, dtype=np.int32))


@pytest.mark.parametrize("seed", range(5))
def test_padding_is_not_live_and_leaves_the_rest_unchanged(seed):
    tree = numbered(seed)
    nodes, probes = tree.num_nodes, tree.num_probes
    padded = pad_tree(tree, nodes + 3, probes + 2, tree.max_depth + 1, tree.max_rank + 2)
    assert_same(arrays(padded, nodes, probes), arrays(tree))
    assert (padded.num_nodes, padded.num_probes) == (nodes + 3, probes + 2)
    assert (padded.max_depth, padded.max_rank) == (tree.max_depth + 1, tree.max_rank + 2)
    assert not padded.live[nodes:].any() and not padded.probe_live[probes:].any()
    assert not padded.ancestors[nodes:].any() and not padded.ancestors[:, nodes:].any()
    assert (padded.probe_of[nodes:] == -1).all()
    for index in (padded.parent, padded.probe_owner):
        assert ((index >= 0) & (index < nodes)).all()
    assert (np.diff(padded.probe_distance) >= 0).all() and (padded.probe_distance <= 4).all()


def test_padding_to_its_own_size_changes_nothing():
    tree = numbered(3)
    same = pad_tree(tree, tree.num_nodes, tree.num_probes, tree.max_depth, tree.max_rank)
    assert_same(arrays(same), arrays(tree))


@pytest.mark.parametrize("size", [(3, 8, 2, 3), (4, 7, 2, 3), (4, 8, 1, 3), (4, 8, 2, 2)])
def test_a_tree_that_does_not_fit_is_named(size):
    tree = build_tree([(0,), (1,), (0, 2)], 2)
    pad_tree(tree, 4, 8, 2, 3)
    with pytest.raises(UserError, match="4 nodes, 8 probes, depth 2 and rank 3 do not fit .* " + str(size[0])):
        pad_tree(tree, *size)


def test_states_of_a_stack_keep_their_arrays():
    trees = [numbered(seed) for seed in range(4)]
    stack = stack_trees(trees)
    most = [max(getattr(t, name) for t in trees) for name in ("num_nodes", "num_probes", "max_depth", "max_rank")]
    assert [stack.num_nodes, stack.num_probes, stack.max_depth, stack.max_rank] == most
    assert stack.parent.shape == (4, most[0]) and stack.ancestors.shape == (4, most[0], most[0])
    assert stack.probe_owner.shape == (4, most[1]) and stack.probe_of.shape == (4, most[0], 4)
    for state, tree in enumerate(trees):
        one = jax.tree.map(lambda x, state=state: x[state], stack)
        assert_same(arrays(one, tree.num_nodes, tree.num_probes), arrays(tree))
        assert one.live.sum() == tree.num_nodes and one.probe_live.sum() == tree.num_probes
        assert tree_paths(one) == tree_paths(tree)


def test_every_batch_row_selects_its_tree():
    stack = stack_trees([numbered(seed) for seed in range(3)])
    states = [2, 0, 2, 1]
    for select in (select_trees, jax.jit(select_trees)):
        batch = select(stack, jnp.array(states))
        assert batch.max_depth == stack.max_depth and batch.max_rank == stack.max_rank
        assert batch.parent.shape == (4, stack.num_nodes)
        for row, state in enumerate(states):
            assert_same(
                arrays(jax.tree.map(lambda x, row=row: x[row], batch)),
                arrays(jax.tree.map(lambda x, state=state: x[state], stack)),
            )


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
