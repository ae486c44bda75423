"""Acceptance on small trees worked out by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match, Typical
from jaxspec.drafting.sampling import make_sampler
from jaxspec.drafting.tree import build_tree
from jaxspec.errors import UserError
from tests.helpers.drafting import batched, draft_of

# nodes: 0 root, 1 (0), 2 (1), 3 (0, 0), 4 (1, 0), 5 (1, 0, 0)
TREE = build_tree([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
GREEDY = make_sampler(SamplingConfig())
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
        accepted = Typical(epsilon=1.0, delta=delta)(draft, logits, GREEDY, SEEDS, POSITIONS)
        assert int(accepted.length[0]) == taken
        assert int(accepted.bonus[0]) == 1  # greedy
        accepted = Typical(epsilon=0.25 * factor, delta=1e9)(draft, logits, GREEDY, SEEDS, POSITIONS)
        assert int(accepted.length[0]) == taken


def test_typical_defaults_are_medusas_and_must_be_positive():
    assert (Typical().epsilon, Typical().delta) == (0.09, 0.3)
    for bad in ({"epsilon": 0.0}, {"delta": -1.0}):
        with pytest.raises(UserError, match="must be positive"):
            Typical(**bad)
