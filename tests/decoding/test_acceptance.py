"""Acceptance on small trees worked out by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match, Rejection, Typical
from jaxspec.decoding.paths import follow, walk
from jaxspec.decoding.sampling import make_row_sampler, make_sampler
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD
from jaxspec.trees import from_paths, random_tree
from jaxspec.trees.arrays import build_tree, stack_trees
from tests.helpers.drafting import batched, draft_of
from tests.helpers.methods import untrained_drafter
from tests.helpers.model import quick_jit
from tests.helpers.tiny import make_prompts

# nodes: 0 root, 1 (0), 2 (1), 3 (0, 0), 4 (1, 0), 5 (1, 0, 0)
TREE = build_tree([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
GREEDY, SAMPLING = make_sampler(SamplingConfig()), make_sampler(SamplingConfig(1.0))
SEEDS, POSITIONS = jnp.zeros(1, jnp.uint32), jnp.arange(4)[None]


def run(acceptance, tokens, targets, valid=None, vocab=8):
    """Accept with the base's argmax after each node given."""
    valid = None if valid is None else jnp.array([valid])
    logits = 10.0 * jax.nn.one_hot(jnp.array([targets]), vocab)
    return acceptance(draft_of(batched(TREE), [tokens], valid), logits, GREEDY, SEEDS, POSITIONS)


@pytest.mark.parametrize(
    ("tokens", "targets", "path", "bonus"),
    [
        ([7, 1, 2, 3, 4, 5], [6, 0, 0, 0, 0, 0], [0], 6),  # the root's token is not among the candidates
        ([7, 1, 2, 3, 4, 5], [1, 3, 0, 6, 0, 0], [0, 1, 3], 6),
        ([7, 1, 2, 3, 4, 5], [2, 3, 4, 0, 5, 6], [0, 2, 4, 5], 6),
        ([7, 1, 2, 3, 4, 5], [2, 3, 1, 0, 5, 6], [0, 2], 1),  # right below a wrong node does not count
        ([7, 1, 2, 0, 4, 5], [1, 0, 0, 6, 0, 0], [0, 1, 3], 6),  # token 0 is a token like any other
        ([7, 2, 2, 3, 4, 5], [2, 4, 4, 0, 6, 0], [0, 2, 4], 6),  # twins: the one that leads further wins
    ],
)
def test_match_follows_the_base(tokens, targets, path, bonus):
    accepted = run(Match(), tokens, targets)
    length = len(path) - 1
    assert int(accepted.length[0]) == length and int(accepted.bonus[0]) == bonus
    assert accepted.path[0, : length + 1].tolist() == path
    assert int(accepted.node[0]) == path[-1]


def test_invalid_nodes_are_never_accepted():
    """A node without a candidate holds token 0; a base that wants token 0 must not take it."""
    accepted = run(Match(), [7, 0, 0, 0, 0, 0], [0] * 6, valid=[True, False, False, True, True, True])
    assert int(accepted.length[0]) == 0 and int(accepted.bonus[0]) == 0


def test_noise_belongs_to_the_position_a_node_predicts():
    """Node at depth d is judged with noise[d]: noise that forbids the argmax moves the target."""
    noise = 5.0 * jax.nn.one_hot(jnp.array([2, 4, 6, 1]), 8)
    sampler = SimpleNamespace(filtered=lambda logits: logits, noise=lambda seeds, positions, tokens: noise[positions])
    draft = draft_of(batched(TREE), [[7, 1, 2, 3, 4, 5]])
    accepted = Match()(draft, jnp.zeros((1, 6, 8)), sampler, SEEDS, POSITIONS)
    assert accepted.path[0, :3].tolist() == [0, 2, 4] and int(accepted.length[0]) == 2
    assert int(accepted.bonus[0]) == 6


def random_trees(batch, seed):
    """Trees of several shapes and sizes, padded to one, with a batch axis."""
    sizes = np.random.default_rng(seed).integers(2, 12, batch)
    plans = [random_tree(4, 3, int(size), seed=seed + row) for row, size in enumerate(sizes)]
    return jax.tree.map(jnp.asarray, stack_trees([build_tree(plan.states[0].paths) for plan in plans]))


def random_draft(tree, targets, vocab, seed):
    """Candidates one of which is often right, below nodes with the targets [B, N]; some nodes have none."""
    rng, rows = np.random.default_rng(seed), np.arange(len(targets))[:, None]
    right = rng.integers(3, size=targets.shape)  # the rank of the right one below a node
    tokens = (np.asarray(targets)[rows, tree.parent] + tree.rank - right[rows, tree.parent]) % vocab
    return draft_of(tree, tokens, jnp.asarray(rng.random(tokens.shape) < 0.9))


@quick_jit
def walked(draft, targets):
    return walk(draft, lambda node: targets[jnp.arange(len(node)), node])


@pytest.mark.parametrize("seed", range(8))
def test_a_walk_finds_the_longest_path(seed):
    tree, vocab = random_trees(64, seed), 7
    targets = jax.random.randint(jax.random.key(seed), tree.parent.shape, 0, vocab)
    draft = random_draft(tree, targets, vocab, seed)
    accepted, expected = walked(draft, targets), follow(draft, targets)
    jax.tree.map(np.testing.assert_array_equal, accepted, expected)
    assert set(expected.length.tolist()) >= {0, 1, 2}


MIXED = [SamplingConfig(), SamplingConfig(0.8), SamplingConfig(1.2, 3), SamplingConfig(0.8, 0, 0.7, 0.05)]


@pytest.mark.parametrize(
    "sampler",
    [GREEDY, SAMPLING, make_sampler(SamplingConfig(0.8, 4, 0.9, 0.01)), make_row_sampler(MIXED * 16)],
    ids=["greedy", "sampled", "filtered", "rows"],
)
def test_match_draws_at_a_node_what_it_draws_at_all_of_them(sampler):
    """A row accepts what autoregressive decoding draws: the noise of a node's own position, its row's settings."""
    tree, seeds, vocab = random_trees(64, 0), jnp.arange(64, dtype=jnp.uint32), 9
    logits = jax.random.normal(jax.random.key(0), (*tree.parent.shape, vocab))
    positions = jnp.arange(64)[:, None] + jnp.arange(tree.max_depth + 1)
    noise = jnp.broadcast_to(sampler.noise(seeds, positions, jnp.arange(vocab)), (*positions.shape, vocab))
    drawn = jnp.argmax(sampler.filtered(logits) + noise[jnp.arange(64)[:, None], tree.depth], axis=-1)
    draft = random_draft(tree, drawn, vocab, 0)
    accepted, expected = Match()(draft, logits, sampler, seeds, positions), follow(draft, drawn)
    jax.tree.map(np.testing.assert_array_equal, accepted, expected)
    assert set(expected.length.tolist()) >= {0, 1, 2}


@pytest.mark.parametrize(("platform", "loops"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_only_cpus_walk(platform, loops):
    """Elsewhere a loop takes longer than the noise of all nodes at once; what counts is where the program will run."""
    draft = draft_of(batched(TREE), [[7, 1, 2, 3, 4, 5]])
    arguments = (draft, jnp.zeros((1, 6, 8)), SAMPLING, SEEDS, POSITIONS)
    lowered = jax.jit(Match().__call__).trace(*arguments).lower(lowering_platforms=(platform,))
    assert ("stablehlo.while" in lowered.as_text()) == loops


def test_typical_threshold_is_the_published_one():
    """p > min(epsilon, delta * exp(-entropy)), checked on both sides of the threshold."""
    p = np.full(8, 0.05)
    p[[1, 2]] = 0.45, 0.25
    entropy = -(p * np.log(p)).sum()
    logits = jnp.broadcast_to(jnp.log(p), (1, 6, 8))
    draft = draft_of(batched(TREE), [[7, 2, 3, 3, 3, 3]])
    for factor, taken in ((0.99, 1), (1.01, 0)):
        delta = factor * 0.25 / np.exp(-entropy)
        accepted = Typical(epsilon=1.0, delta=delta)(draft, logits, SAMPLING, SEEDS, POSITIONS)
        assert int(accepted.length[0]) == taken
        assert int(accepted.bonus[0]) == 1  # greedy
        accepted = Typical(epsilon=0.25 * factor, delta=1e9)(draft, logits, SAMPLING, SEEDS, POSITIONS)
        assert int(accepted.length[0]) == taken


@pytest.mark.parametrize(
    ("temperature", "plausible", "path"),
    [
        (1.0, [1, 2, 3, 4], [0, 1, 3]),  # 0.28 * 0.86 > 0.6 * 0.3
        (0.5, [1, 2, 3, 4], [0, 2, 4]),
        (0.5, [1, 2, 3], [0, 1, 3]),  # a longer path wins, however likely the shorter one
        (1.0, [1, 2, 3, 4, 5], [0, 2, 4, 5]),
        (1.0, [1, 2], [0, 2]),
        (1.0, [3, 4, 5], [0]),
    ],
)
def test_of_the_longest_typical_paths_the_likeliest_wins(temperature, plausible, path):
    p = np.full((6, 8), 0.02)
    p[0, [1, 2]], p[1, 3], p[2, [4, 5, 6]], p[4, 5] = (0.28, 0.6), 0.86, 0.3, 0.86
    tokens, valid = [[7, 1, 2, 3, 4, 5]], jnp.array([[n in plausible for n in range(6)]])
    sampler = make_sampler(SamplingConfig(temperature))
    rule, draft = Typical(epsilon=1e-3, delta=1e-3), draft_of(batched(TREE), tokens, valid)
    accepted = rule(draft, jnp.log(p)[None], sampler, SEEDS, POSITIONS)
    assert accepted.path[0, : int(accepted.length[0]) + 1].tolist() == path
    assert int(accepted.bonus[0]) == p[path[-1]].argmax()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rejection(), Typical(epsilon=1e-3)], ids=["rejection", "typical"])
def test_at_temperature_0_every_rule_is_exact_matching(tiny, rule):
    drafter, prompts = untrained_drafter(PPD(), tiny, from_paths([(0,), (1,), (2,), (0, 0), (0, 1)])), make_prompts(6)
    answers, matched = (generate(drafter, prompts, 24, acceptance=each) for each in (rule, Match()))
    assert [a.tokens for a in answers] == [a.tokens for a in generate(autoregressive(tiny), prompts, 24)]
    assert [a.accepted for a in answers] == [a.accepted for a in matched] and any(sum(a.accepted) for a in answers)
    assert rule.same_text(0.0) and not rule.same_text(0.5)


def test_typical_defaults_are_medusas_and_must_be_positive():
    assert (Typical().epsilon, Typical().delta) == (0.09, 0.3)
    for bad in ({"epsilon": 0.0}, {"delta": -1.0}):
        with pytest.raises(UserError, match="must be positive"):
            Typical(**bad)
