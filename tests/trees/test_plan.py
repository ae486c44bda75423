"""Expected tokens and transitions of a plan against all outcomes there are; its checks and its JSON."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.trees import State, chain, expected, from_paths, make_plan, replayed, straightforward
from jaxspec.trees.plan import check_accuracy, plan_from_json, plan_to_json
from tests.helpers.trees import random_accuracy, random_paths, tree_paths

THREE = (
    State(((0,), (1,)), (3, 2, 1), 1),
    State(((0,), (2,), (0, 1)), (3, 1, 1, 3), 2),
    State(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)), (3, 1, 2, 3, 1, 2), 3),
)


def random_plan(seed, distances=3, ranks=3):
    """One random tree for every number of probes from 1 on."""
    rng = np.random.default_rng(seed)
    states = []
    for needs in range(1, distances + 1):
        paths = sorted(random_paths(10 * seed + needs, needs, ranks), key=lambda path: (len(path), path))
        states.append(State(tuple(paths), tuple(rng.integers(1, distances + 1, len(paths) + 1).tolist()), needs))
    return make_plan(states)


def follows(plan, probes):
    """Position of the last state that needs at most so many distances."""
    return [state.needs <= probes for state in plan.states].count(True) - 1


def enumerate_outcomes(plan, accuracy):
    """Tokens of a step and where it leads, for every state, by going through all combinations of right ranks."""
    distances, ranks = accuracy.shape
    chances = np.column_stack([accuracy, 1 - accuracy.sum(axis=1)])  # the last: no candidate is right
    tokens, transition = np.zeros(len(plan.states)), np.zeros((len(plan.states),) * 2)
    for i, state in enumerate(plan.states):
        labels = dict(zip(((), *state.paths), state.probes, strict=True))
        for right in itertools.product(range(ranks + 1), repeat=distances):
            chance = np.prod([chances[level, rank] for level, rank in enumerate(right)])
            last = max((right[:n] for n in range(distances + 1) if right[:n] in labels), key=len)
            tokens[i] += chance * (len(last) + 1)
            transition[i, follows(plan, labels[last])] += chance
    return tokens, transition


@pytest.mark.parametrize("seed", range(10))
def test_expected_tokens_are_those_of_all_outcomes(seed):
    plan, accuracy = random_plan(seed), random_accuracy(seed, 3, 3)
    tokens, transition = enumerate_outcomes(plan, accuracy)
    known = expected(plan, accuracy)
    assert known.states == plan.states
    np.testing.assert_allclose(known.transition, transition, atol=1e-12)
    np.testing.assert_allclose(known.transition.sum(axis=1), 1)
    often = np.linalg.matrix_power(transition / 2 + np.eye(3) / 2, 10_000)[0]  # lazy: no chain is periodic
    assert known.expected_tokens == pytest.approx(often @ tokens)


def test_expected_tokens_of_one_tree_by_hand():
    accuracy = [[0.5, 0.25], [0.4, 0.2]]
    plan = from_paths([(0,), (1,), (0, 1)], accuracy)
    assert plan.expected_tokens == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.2)
    np.testing.assert_allclose(plan.transition, [[1]])


def test_a_replay_accepts_what_is_right_and_goes_on_behind_it():
    """Steps begin at 0, 3 and 5 of the first text."""
    plan = from_paths([(0,), (1,), (0, 1)])
    first = np.array([[0, 1], [1, -1], [0, 1], [0, 0], [1, 1], [0, -1]])
    assert replayed(plan, [first[:3]]) == 3 / 1 and replayed(plan, [first]) == 6 / 3
    assert replayed(plan, [first, np.array([[-1, -1]]), np.empty((0, 2), int)]) == 7 / 4


@pytest.mark.parametrize("plan", [random_plan(1), random_plan(5), straightforward(3)], ids=["1", "5", "borrowing"])
def test_a_replay_comes_to_what_accuracies_let_expect(plan):
    """Where they are independent, each text drawn from them."""
    accuracy, rng = random_accuracy(0, 3, 3), np.random.default_rng(0)
    chances = np.column_stack([accuracy, 1 - accuracy.sum(axis=1)])
    ranks = np.stack([rng.choice([0, 1, 2, -1], 20_000, p=p) for p in chances], axis=1)
    assert replayed(plan, [ranks]) == pytest.approx(expected(plan, accuracy).expected_tokens, rel=0.01)


def test_candidates_without_a_known_accuracy_are_never_right():
    plan = expected(make_plan(THREE), [[0.5]])
    assert plan.expected_tokens == pytest.approx(1.5)
    assert expected(from_paths([]), [[0.5]]).expected_tokens == 1


def test_next_state_is_the_last_that_needs_no_more():
    plan = make_plan(THREE)
    assert [plan.next_state(n) for n in range(1, 6)] == [0, 1, 2, 2, 2]
    gap = make_plan([State((), (4,), 0), State(((0,),), (4, 1), 3)])
    assert [gap.next_state(n) for n in range(5)] == [0, 0, 0, 1, 1]
    assert [chain(2).next_state(n) for n in range(2, 4)] == [0, 0]


def test_what_a_node_borrows_counts_as_known():
    """From its parent's probes, one distance less; what it has itself if that is more."""
    state = State(((0,), (1,), (0, 0)), (3, 0, 2, 0), 2, borrows=True)
    assert state.known == (3, 2, 2, 1) and dataclasses.replace(state, borrows=False).known == state.probes
    plan = make_plan([state, State((), (3,), 0)])
    assert plan.arrays(3).next_state.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]  # the first one is padded
    assert plan_from_json(plan_to_json(plan), "here") == plan
    with pytest.raises(UserError, match="for 1 distances"):
        make_plan([state])


def test_states_come_in_order_and_so_do_their_paths():
    plan = make_plan([THREE[2], State([[1], [0]], [3, 2, 1], 1), THREE[1]])
    assert plan == make_plan(THREE) and plan.states == THREE
    assert make_plan(THREE, [[0.5, 0.2]]) == expected(plan, [[0.5, 0.2]])


def test_sizes_are_those_of_the_largest_state():
    plan = make_plan(THREE)
    assert (plan.num_nodes, plan.num_probes, plan.depth) == (6, 12, 3)
    assert (from_paths([]).num_nodes, from_paths([]).num_probes, from_paths([]).depth) == (1, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_arrays_hold_every_state_and_what_follows_each_node(seed):
    plan = random_plan(seed)
    stack = plan.arrays(3)
    assert (stack.num_nodes, stack.num_probes, stack.max_depth) == (plan.num_nodes, plan.num_probes, plan.depth)
    for i, state in enumerate(plan.states):
        one = type(stack)(**{k: v if k.startswith(("max_", "inner")) else v[i] for k, v in vars(stack).items()})
        assert tuple(tree_paths(one)) == state.paths
        live = np.flatnonzero(one.live)
        assert one.next_state[live].tolist() == [plan.next_state(n) for n in state.probes]
        assert (one.probe_of[live] >= 0).sum(axis=1).tolist() == list(state.probes)


def test_a_method_without_probes_gets_none():
    stack = from_paths([(0,), (0, 1)]).arrays(0)
    assert stack.num_probes == 0 and stack.parent.shape == (1, 3) and not stack.next_state.any()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (State(((0,),), (1,), 1), r"2 nodes need as many probe counts, got \[1\]"),
        (State(((0,),), (1, 1, 1), 1), r"2 nodes need as many probe counts, got \[1, 1, 1\]"),
        (State(((0,),), (1, -1), 1), r"2 nodes need as many probe counts, got \[1, -1\]"),
        (State(((0,), (0, 1)), (1, 1, 1), 1), r"path \[0, 1\] is deeper than the 1 distances"),
        (State(((0,), (0,)), (1, 1, 1), 1), r"path \[0\] occurs twice"),
        (State(((0, 1),), (2, 2), 2), r"path \[0, 1\] comes without its parent \[0\]"),
        (State(((-1,),), (1, 1), 1), r"path \[-1\] has a negative rank"),
    ],
)
def test_states_that_do_not_hold_together_are_named(state, message):
    with pytest.raises(UserError, match=message):
        make_plan([THREE[0], state])


@pytest.mark.parametrize("accuracy", [[0.5], [[0.5], [0.5, 0.1]], [[-0.1]], [[float("nan")]], [["a"]], None, [[]]])
def test_accuracies_that_are_none_are_refused(accuracy):
    for function in (check_accuracy, lambda table: expected(make_plan(THREE), table)):
        with pytest.raises(UserError, match=r"\[M, K\] table of values in \[0, 1\]"):
            function(accuracy)


def test_json_round_trip():
    for plan in (make_plan(THREE), random_plan(3), chain(3), from_paths([])):
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "x") == plan


def test_a_list_of_paths_is_a_plan_of_one_tree():
    assert plan_from_json([[0, 1], [1], [0]], "x") == from_paths([(0,), (1,), (0, 1)])


def state_json(**changes):
    return [{"needs": 1, "paths": [[0]], "probes": [1, 1], **changes}]


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        True,
        "abc",
        {"needs": 1},
        [1, 2],
        [[0.5]],
        [[True]],
        [["a"]],
        [[0], None],
        [{}],
        [{"paths": [[0]], "probes": [1, 1]}],
        [*state_json(), [0]],
        state_json(paths=None),
        state_json(paths=[["0"]]),
        state_json(probes=3),
        state_json(probes=["x", 1]),
        state_json(probes=[None, 1]),
        state_json(needs="x"),
        state_json(needs=None),
    ],
)
def test_garbage_is_named_by_where_it_came_from(value):
    with pytest.raises(UserError, match=r"^my\.json: neither a list of paths nor a list of tree states"):
        plan_from_json(value, "my.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[]], "the root's empty path"),
        ([[0], [0]], "occurs twice"),
        ([[0, 0]], "without its parent"),
        (state_json(probes=[1]), "2 nodes need as many probe counts"),
        (state_json(needs=0), "deeper than the 0 distances"),
    ],
)
def test_trees_in_json_that_are_none_are_named_too(value, message):
    with pytest.raises(UserError, match=rf"^my\.json: .*{message}"):
        plan_from_json(value, "my.json")


def test_states_that_no_step_leads_to_are_dropped():
    """Two probes everywhere: the trees of one and of three distances are never verified."""
    trees = {1: ((0,),), 2: ((0,), (1,)), 3: ((0,), (0, 0))}
    plan = expected(make_plan([State(p, (2,) * (len(p) + 1), n) for n, p in trees.items()]), [[0.5, 0.2]])
    assert [state.needs for state in plan.trimmed(2).states] == [2]
    assert [state.needs for state in plan.trimmed(3).states] == [2, 3]
    assert math.isclose(plan.trimmed(2).expected_tokens, plan.expected_tokens)


def test_a_state_that_repeats_the_one_before_is_merged_with_it():
    same = [State(((0,),), (3, 3 - n), n) for n in (1, 2)] + [State(((0,),), (3, 1), 3)]
    plan = expected(make_plan(same), [[0.5]])
    trimmed = plan.trimmed(3)
    assert [state.needs for state in trimmed.states] == [1, 2]
    assert math.isclose(expected(trimmed, [[0.5]]).expected_tokens, plan.expected_tokens)
