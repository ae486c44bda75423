"""Shapes: fixed trees take candidates by rank, `Best` the most probable ones of all sources."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.draft import Offer
from jaxspec.decoding.pace import Pace
from jaxspec.decoding.shape import Best, StaticTree
from jaxspec.trees.arrays import build_tree, stack_trees
from tests.helpers.model import quick_jit

B, DEPTH = 3, 3


def marginals(rng, width=4, distances=DEPTH, vocabulary=6):
    """Independent candidates per distance, distinct among siblings."""
    tokens = np.stack([rng.permutation(vocabulary)[:width] for _ in range(B * distances)], dtype=np.int32)
    tokens = tokens.reshape(B, distances, width)
    p = rng.dirichlet(np.ones(width), size=(B, distances)) * rng.uniform(0.5, 1.4, (B, distances, 1))
    known = rng.random((B, distances, 1)) < 0.8
    return Offer(tokens, known, np.log(np.minimum(p, 1.0), dtype=np.float32))


def trie(rng, width=3, distances=DEPTH, vocabulary=6):
    """Candidates below others: siblings have distinct tokens, and some parents are not there."""
    tokens, parent = np.zeros((2, B, distances, width), np.int32)
    for b in range(B):
        for d in range(distances):
            parent[b, d] = rng.integers(0, width, width) if d else 0
            for up in set(parent[b, d]):
                where = np.flatnonzero(parent[b, d] == up)
                tokens[b, d, where] = rng.permutation(vocabulary)[: len(where)]
    p = rng.uniform(0.1, 0.9, tokens.shape)
    known = rng.random(tokens.shape) < 0.8
    return Offer(tokens, known, np.log(p, dtype=np.float32), parent)


def below(offer, b, depth, place):
    """{token: (log p, place)} that one source offers below a node that is its candidate at `place`, None for none."""
    if depth >= offer.tokens.shape[1]:
        return {}
    known = np.broadcast_to(offer.known, offer.tokens.shape)[b, depth]
    fits = known & (True if offer.parent is None else depth == 0 or np.asarray(offer.parent)[b, depth] == place)
    fits &= offer.parent is None or depth == 0 or place is not None
    log_p = np.asarray(offer.log_p, np.float64)[b, depth]
    return {int(offer.tokens[b, depth, w]): (log_p[w], w) for w in np.flatnonzero(fits)}


def every_path(offers, b, depth=DEPTH):
    """{path of tokens: (log p, sources)} by the rules, one node at a time."""
    found, pending = {}, [((), 0.0, (0,) * len(offers))]
    while pending:
        path, log_p, places = pending.pop()
        if len(path) == depth:
            continue
        given = [below(offer, b, len(path), place) for offer, place in zip(offers, places, strict=True)]
        best = {t: max(g[t][0] for g in given if t in g) for t in set().union(*given)}
        total = max(np.logaddexp.reduce(list(best.values())), 0.0) if best else 0.0
        for token, chance in best.items():
            child = (*path, token)
            found[child] = (log_p + chance - total, sum(1 << i for i, g in enumerate(given) if token in g))
            pending.append((child, found[child][0], tuple(g[token][1] if token in g else None for g in given)))
    return found


def drafted(draft, b):
    """{path of tokens: (log p, sources)} of a draft's valid nodes."""
    parent, tokens, paths = np.asarray(draft.tree.parent)[b], np.asarray(draft.tokens)[b], [()]
    for node in range(1, len(parent)):
        paths.append((*paths[parent[node]], int(tokens[node])))
    valid = np.asarray(draft.valid)[b]
    facts = zip(np.asarray(draft.log_p)[b].tolist(), np.asarray(draft.sources)[b].tolist(), strict=True)
    return {path: fact for path, fact, there in zip(paths, facts, valid, strict=True) if there and path}


@functools.partial(jax.jit, static_argnums=0)
def choose(best, offers):
    return best.draft([], jnp.full(B, 9), offers)


@pytest.mark.parametrize(
    ("kinds", "nodes"),
    [
        ((marginals,), 12),
        ((trie,), 12),
        ((marginals, trie), 2),
        ((marginals, trie), 5),
        ((marginals, trie), 12),
        ((trie, marginals, trie), 40),
        ((functools.partial(marginals, distances=1), trie), 12),
        ((trie, functools.partial(trie, distances=2)), 9),
        ((trie, functools.partial(marginals, distances=2), functools.partial(trie, distances=2)), 40),
    ],
)
def test_best_takes_the_most_probable_paths_of_all_offers(nodes, kinds):
    """Against all paths listed one by one: the same chances, and none left out that is more probable."""
    rng = np.random.default_rng(nodes)
    for _ in range(4):
        offers = [kind(rng) for kind in kinds]
        draft = choose(Best((), nodes, 0, 0, min(nodes - 1, DEPTH)), offers)
        for b in range(B):
            every, taken = every_path(offers, b, min(nodes - 1, DEPTH)), drafted(draft, b)
            assert len(taken) == min(nodes - 1, len(every))
            for path, (log_p, sources) in taken.items():
                assert log_p == pytest.approx(every[path][0], abs=1e-4) and sources == every[path][1]
            worst = min((log_p for log_p, _ in taken.values()), default=0.0)
            assert all(every[path][0] <= worst + 1e-4 for path in every.keys() - taken.keys())


def test_nodes_fall_in_probability_and_follow_their_parents():
    """So that a draft of fewer nodes is the beginning of a larger one."""
    rng = np.random.default_rng(1)
    offers = [marginals(rng), trie(rng)]
    large, small = (choose(Best((), nodes, 0, 0, DEPTH), offers) for nodes in (12, 5))
    assert np.all(np.diff(np.where(large.valid, large.log_p, -np.inf)[:, 1:]) <= 0)
    assert np.all(np.asarray(large.tree.parent)[:, 1:] < np.arange(1, 12))
    for ours, theirs in ((small.tokens, large.tokens), (small.tree.parent, large.tree.parent)):
        np.testing.assert_array_equal(ours, theirs[:, :5])


@jax.jit
def sized(best, offers, pace):
    return best.draft([], jnp.full(B, 9), offers, pace, best.costs[:1])


def pace_of(tokens, active=(True, True, True), idle=0, blind=False):
    fields = (jnp.full(B, 10.0), jnp.array(active), jnp.full(B, idle), jnp.full(B, blind), jnp.full(B, True))
    return Pace(jnp.array(tokens), *fields)


@pytest.mark.parametrize("milliseconds", [(20, 21, 26), (20, 30, 60), (20, 20, 20)])
def test_a_step_has_the_size_that_is_worth_most(milliseconds):
    """Tokens to expect, less what its time brings, of all rows that are not done; further time counts 1.25 times.

    Time brings tokens at the pace of late, but at least as many as autoregressive decoding.
    """
    rng, sizes = np.random.default_rng(6), (1, 4, 9)
    costs = jnp.array([milliseconds, milliseconds], jnp.float32)
    largest, best = Best((), 9, 0, 0, DEPTH), Best((), 9, 0, 0, DEPTH, sizes, costs=costs)
    chosen = set()
    for _ in range(12):
        offers = [marginals(rng), trie(rng)]
        pace = pace_of(rng.uniform(8, 24, B), (True, False, True))
        draft, full = sized(best, offers, pace), choose(largest, offers)
        p, price = np.exp(full.log_p), np.maximum(pace.tokens / pace.time, 1)
        worth = [
            sum(p[b, :size].sum() - price[b] * (1 + 1.25 * (cost / 20 - 1)) for b in (0, 2))
            for size, cost in zip(sizes, milliseconds, strict=True)
        ]
        assert draft.size.tolist() == [int(np.argmax(worth))] * B
        valid = np.asarray(full.valid) & (np.arange(9) < sizes[np.argmax(worth)])
        np.testing.assert_array_equal(draft.valid, valid)
        np.testing.assert_array_equal(draft.tokens, full.tokens)
        chosen.add(int(np.argmax(worth)))
    assert len(chosen) > 1 or milliseconds == (20, 20, 20)


@pytest.mark.parametrize(
    ("idle", "blind", "size"),
    [
        (0, False, 1),  # nothing is worth its time, but without probes the step after the next would have no draft
        (2, False, 1),
        (3, False, 0),  # which it has none of either if nothing pays for several steps
        (3, True, 0),
        (4, True, 1),  # then probes are tried now and then
    ],
)
def test_probes_are_left_out_while_no_draft_pays(idle, blind, size):
    rng, costs = np.random.default_rng(7), jnp.array([(20, 24, 500), (20, 24, 500)], jnp.float32)
    best, unlikely = Best((), 4, 1, 2, DEPTH, (1, 1, 4), 1, 1, costs), marginals(rng)
    unlikely = unlikely.replace(log_p=unlikely.log_p - 9)
    draft = sized(best, [unlikely, unlikely], pace_of(np.full(B, 10.0), idle=idle, blind=blind))
    assert draft.size.tolist() == [size] * B and not draft.valid[:, 1:].any()


@pytest.mark.parametrize(
    ("idle", "chances", "size", "pays"),
    [
        (3, (0.0, 0.8), 1, False),  # at rest the lookup drafts nodes alone
        (3, (0.8, 0.0), 3, True),  # what probes brought in a trial calls them back
        (3, (0.1, 0.8), 1, False),  # unless it is hardly ever right
        (0, (0.0, 0.8), 3, False),  # when a trial is due probes are run, whoever drafts
        (3, (0.0, 0.0), 0, False),
    ],
)
def test_other_sources_draft_while_probes_rest(idle, chances, size, pays):
    """Sizes are 1 and 3 nodes alone, and a root or 3 nodes with probes, in this order."""
    costs = jnp.array([(20, 24, 30, 34)] * 2, jnp.float32)
    best = Best((), 3, 1, 1, DEPTH, (1, 3, 1, 3), 2, 1, costs)
    draft = sized(best, [certain(1, chances[0]), certain(2, chances[1])], pace_of(np.full(B, 10.0), idle=idle))
    assert draft.size.tolist() == [size] * B and draft.pays.tolist() == [pays] * B
    assert draft.valid[:, 1:].any() == (size > 0)


@pytest.mark.parametrize(
    ("chances", "pays"),
    [((0.8, 0.1), True), ((0.45, 0.5), False), ((0.0, 0.8), False), ((0.55, 0.48), True), ((0.5, 0.48), False)],
)
def test_probes_pay_if_they_make_more_than_lookups_make_without(chances, pays):
    """Though nodes alone would be worth more once: as many rows take as long, and have more candidates.

    Further time of steps with probes counts 1.5 times, for lookups would offer more than the nodes at hand.
    """
    costs = jnp.array([(20, 24, 24)] * 2, jnp.float32)
    best = Best((), 3, 1, 1, DEPTH, (1, 3, 2), 2, 1, costs)
    draft = sized(best, [certain(1, chances[0]), certain(2, chances[1])], pace_of(np.full(B, 10.0)))
    assert draft.size.tolist() == [2] * B and draft.pays.tolist() == [pays] * B


def test_noise_makes_no_size_cheaper_than_one_of_its_kind_with_fewer_nodes():
    best = Best((), 6, 1, 1, DEPTH, (1, 4, 6, 2, 4), 3, 1)
    assert best.rising(np.array([20, 26, 25, 24, 23])).tolist() == [20, 26, 26, 24, 24]
    assert best.rising(np.array([[20, 19, 25, 18, 23]])).tolist() == [[20, 20, 25, 20, 23]]


def certain(token, chance):
    """An offer of two tokens of some chance, one after the other; of none where that is 0."""
    tokens = np.full((B, 2, 1), token, np.int32)
    return Offer(tokens, np.full(tokens.shape, chance > 0), np.full(tokens.shape, np.log(chance or 1), np.float32))


def test_ancestors_follow_from_parents():
    rng = np.random.default_rng(2)
    tree = choose(Best((), 12, 0, 0, DEPTH), [marginals(rng), trie(rng)]).tree
    for b in range(B):
        for node in range(12):
            path, up = {node}, node
            while up:
                up = int(tree.parent[b, up])
                path.add(up)
            assert set(np.flatnonzero(tree.ancestors[b, node])) == path and len(path) == int(tree.depth[b, node]) + 1


def test_probes_stand_where_the_path_will_most_probably_end():
    """The owners end most paths; what has no probe for a token takes its parent's that predicts the same one."""
    rng = np.random.default_rng(3)
    draft = choose(Best((), 8, 2, 2, DEPTH), [marginals(rng), trie(rng)])
    tree = draft.tree
    for b in range(B):
        p = np.where(draft.valid[b], np.exp(draft.log_p[b]), 0.0)
        ends = [p[n] - sum(p[c] for c in range(1, 8) if tree.parent[b, c] == n) for n in range(8)]
        owners = sorted(np.argsort(ends)[-2:].tolist())
        assert sorted(set(np.asarray(tree.probe_owner)[b].tolist())) == owners
        for node in range(8):
            first, second = np.asarray(tree.probe_of)[b, node]
            if node in owners:
                assert tree.probe_owner[b, first] == tree.probe_owner[b, second] == node
                assert (tree.probe_distance[b, first], tree.probe_distance[b, second]) == (1, 2)
            else:
                of_parent = np.asarray(tree.probe_of)[b, tree.parent[b, node]]
                assert second == -1 and first == (of_parent[1] if node else -1)


def test_a_fixed_tree_takes_candidates_by_rank():
    """Of marginals by distance, of paths below the parent's own candidate; what is not offered stays empty."""
    paths = [(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]
    shape = StaticTree(stack_trees([build_tree(paths)]))
    draft_of = quick_jit(lambda offer: shape.draft(shape.begin(B), jnp.full(B, 9), [offer]))
    rng = np.random.default_rng(4)
    for offer in (marginals(rng), trie(rng)):
        draft = draft_of(offer)
        for b in range(B):
            places = {(): 0}
            for node, path in enumerate(paths, 1):
                children = below(offer, b, len(path) - 1, places.get(path[:-1]))
                marginal = offer.parent is None  # in the order of its ranks; a trie's siblings by their chances
                ranked = sorted(children.items(), key=lambda item: item[1][1] if marginal else -item[1][0])
                found = ranked[path[-1] : path[-1] + 1]
                there = bool(found) and (marginal or path[:-1] in places)  # which may lack a distance between
                assert bool(draft.valid[b, node]) == there
                if there:
                    assert int(draft.tokens[b, node]) == found[0][0]
                    places[path] = found[0][1][1]


def test_nothing_offered_is_the_root_alone():
    offer = marginals(np.random.default_rng(5))
    none = offer.replace(known=np.zeros_like(offer.known))
    draft = choose(Best((), 6, 1, 2, DEPTH), [none])
    assert np.asarray(draft.valid).tolist() == [[True] + [False] * 5] * B
    assert np.asarray(draft.tree.probe_owner).tolist() == [[0, 0]] * B and bool(jnp.all(draft.tree.probe_live))
