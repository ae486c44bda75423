"""Acceptance on small trees worked out by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match, Rejection, Typical
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD
from jaxspec.trees import from_paths
from jaxspec.trees.arrays import build_tree
from tests.helpers.drafting import batched, draft_of
from tests.helpers.methods import untrained_drafter
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
        ([7, 2, 2, 3, 4, 5], [2, 0, 4, 0, 6, 0], [0, 2, 4], 6),  # twins: the one that leads further wins
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
    noise = 5.0 * jax.nn.one_hot(jnp.array([[2, 4, 6, 1]]), 8)
    sampler = SimpleNamespace(filtered=lambda logits: logits, noise=lambda seeds, positions, size: noise)
    draft = draft_of(batched(TREE), [[7, 1, 2, 3, 4, 5]])
    accepted = Match()(draft, jnp.zeros((1, 6, 8)), sampler, SEEDS, POSITIONS)
    assert accepted.path[0, :3].tolist() == [0, 2, 4] and int(accepted.length[0]) == 2
    assert int(accepted.bonus[0]) == 6


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
