"""Rejection sampling and block verification preserve the base's distribution: chi-square tests against enumeration."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import drafters
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Block, Rejection
from jaxspec.decoding.draft import Drawn
from jaxspec.decoding.loop import decode
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, stream
from jaxspec.methods import (
    PPD,
    SPACE,
    Amphista,
    BiTA,
    DFlash,
    DraftModel,
    Eagle,
    HiddenTransfer,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    Mtp,
    PromptLookup,
    Rest,
    SelfSpeculative,
    Suffix,
    TokenRecycling,
)
from jaxspec.trees import State, from_paths, make_plan
from jaxspec.trees.arrays import build_tree
from tests.helpers.decoding import begin
from tests.helpers.drafting import draft_of
from tests.helpers.marks import EXHAUSTIVE, slow_ones
from tests.helpers.methods import trained, untrained_drafter
from tests.helpers.model import plain
from tests.helpers.tiny import TINY, make_prompts, make_tiny

V, TOKENS, TEXTS, FEWER = 9, 4, 10_000, 3_000
PROMPT = [3, 1, 4]
CHAIN = [(0,), (0, 0), (0, 0, 0)]
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (1, 0, 0)]
SMALL_TREE = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]
SLOW = pytest.mark.slow
MASKS, MEDUSA = SPACE(distances=3, tuning="none"), Medusa(heads=3)
DRAFT_MODEL = DraftModel(layers=(0, 2), length=3)
METHODS = [PPD(), BiTA(prompts=2), MASKS, HiddenTransfer(layers=(0, 1, 2))]
METHODS += [
    MEDUSA,
    Hydra(heads=3),
    Amphista(heads=3),
    DFlash(block=3, layers=2, markov_rank=4, selector_rank=4, selector_width=3),
    Eagle(depth=3),
    Mtp(),
]
METHODS += [PromptLookup(), Suffix(), Rest(size=300), TokenRecycling(), DRAFT_MODEL]
POINTS = ("prompt_lookup", "suffix", "rest", "token_recycling", "lookahead", "jacobi")  # nothing of theirs is drawn
METHODS += [Lookahead(), Jacobi(), SelfSpeculative(skip_attention=(1,), skip_mlp=(1,), threshold=0.3)]


@pytest.fixture(scope="module")
def model():
    """Nine tokens, none of which ends a text, and distributions that are neither flat nor nearly certain."""
    model = make_tiny(dataclasses.replace(TINY, vocab_size=V), eos=())
    return dataclasses.replace(model, params=model.params | {"lm_head": 0.3 * model.params["lm_head"]})


@pytest.fixture(scope="module")
def exact(model):
    """(sampling) to the probability of every text of four tokens, [V, V, V, V]."""
    texts = jnp.array([[*PROMPT, *text] for text in itertools.product(range(V), repeat=TOKENS - 1)])
    logits = plain(model.base, texts)[:, len(PROMPT) - 1 :]  # [V^3, 4, V]

    @functools.cache
    def joint(sampling):
        p = jax.nn.softmax(make_sampler(sampling).filtered(logits)).reshape(*[V] * (TOKENS - 1), TOKENS, V)
        p = np.asarray(p, np.float64)
        first, second = p[0, 0, 0, 0][:, None, None, None], p[:, 0, 0, 1][:, :, None, None]
        return first * second * p[:, :, 0, 2][..., None] * p[..., 3, :]

    return joint


def sample(drafter, sampling, acceptance, seed, count=TEXTS):
    """Texts of many seeds, [count, 4], and how many candidates were accepted and offered."""
    seeds = np.arange(count) + seed * count
    decoding, state = begin(drafter, [PROMPT] * count, TOKENS, sampling, acceptance, seeds, capacity=16)
    state = decode(decoding, state, np.int32(TOKENS))
    accepted, offered = (int(x[:, 0].sum()) for x in (state.stats.accepted, state.stats.offered))
    return np.asarray(state.tokens)[:, :TOKENS], accepted, offered


def p_value(texts, joint):
    """Of a chi-square test of texts [X, n] against their joint distribution; rare texts are counted together."""
    expected = joint.reshape(-1) * len(texts)
    found = np.bincount(np.ravel_multi_index(texts.T, joint.shape), minlength=joint.size)
    common = expected >= 10
    found, expected = (np.append(x[common], x[~common].sum()) for x in (found, expected))
    possible = expected > 0
    assert found[~possible].sum() == 0
    return stats.chisquare(found[possible], expected[possible] * found.sum() / expected[possible].sum()).pvalue


def drafter_of(method, model, paths):
    return untrained_drafter(method, model, from_paths(paths), trained(method, model.base))


def check(model, exact, method, paths, sampling, acceptance=None, count=TEXTS):
    """The smallest p-value of three tokens in a row together, and of every token by itself."""
    drafter = drafter_of(method, model, paths)
    texts, accepted, offered = sample(drafter, sampling, acceptance or Rejection(), 1, count)
    assert 0 < accepted < offered
    joint = exact(sampling)
    groups = [(0, 1, 2), (1, 2, 3), *((i,) for i in range(TOKENS))]
    others = [tuple(i for i in range(TOKENS) if i not in group) for group in groups]
    return min(p_value(texts[:, g], joint.sum(axis=rest)) for g, rest in zip(groups, others, strict=True))


P = np.array([0.35, 0.02, 0.05, 0.55, 0.02, 0.01])
LOG_Q = np.log([0.02, 0.5, 0.02, 0.36, 0.05, 0.05])


def one_level(paths, acceptance, independent=True, count=100_000, log_q=LOG_Q):
    """The p-value of the token behind the root, where the base has P and candidates are drawn from q."""
    single = build_tree(paths)
    tree = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *np.shape(x))), single)
    sampler, seeds = make_sampler(SamplingConfig(1.0)), jnp.arange(count, dtype=jnp.uint32)
    positions = jnp.broadcast_to(jnp.array([7, 8]), (count, 2))
    noise = sampler.replace(independent=independent).noise(seeds, positions[:, :1], jnp.arange(len(P)))[:, 0]
    candidates = jax.lax.top_k(log_q + noise, single.max_rank)[1]
    tokens = jnp.where(tree.depth == 1, jnp.take_along_axis(candidates, tree.rank, axis=1), 0)
    drawn = Drawn(jnp.broadcast_to(jnp.asarray(log_q, jnp.float32), (count, 1, len(P))), jnp.zeros_like(tokens))
    logits = jnp.broadcast_to(jnp.log(P), (count, single.num_nodes, len(P)))
    result = jax.jit(acceptance)(draft_of(tree, tokens, tree.live, drawn), logits, sampler, seeds, positions)
    accepted = jnp.take_along_axis(tokens, result.node[:, None], axis=1)[:, 0]
    first = np.asarray(jnp.where(result.length == 1, accepted, result.bonus))
    return p_value(first[:, None], P)


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([(0,), (1,), (2,)], id="three"),
        pytest.param([(0,), (1,), (2,), (3,), (4,), (5,)], id="all", marks=SLOW),
        pytest.param([(0,), (3,)], id="gap", marks=SLOW),
    ],
)
def test_one_level_of_candidates_leaves_the_bases_distribution(paths):
    """A draw behind a gap among the ranks depends on draws that were not offered: it must not be judged."""
    assert one_level(paths, Rejection()) > 1e-3


@pytest.mark.parametrize("gap", [40, 120])
def test_a_drafter_may_be_nearly_certain(gap):
    """What is left of q once its favourite is refused is 1e-17 of it, or 1e-52."""
    log_q = jax.nn.log_softmax(np.array([-gap - 4.0, 0.0, -gap, -gap - 3.0, -gap - 4.0, -np.inf]))
    assert one_level([(0,), (1,), (2,)], Rejection(), log_q=log_q) > 1e-3


def test_drafts_must_not_know_the_noise_of_the_text():
    assert one_level([(0,), (1,)], Rejection(), independent=False) < 1e-9


def test_every_method_that_samples_is_covered():
    assert {method.name for method in METHODS} | {"autoregressive"} == set(drafters.METHODS)


# PPD and Medusa below are fast; the others draw by the same code.
@pytest.mark.parametrize("method", slow_ones(METHODS, ("hydra", "dflash", "eagle", "draft_model", "suffix")))
def test_every_method_keeps_the_distribution(model, exact, method):
    """Fewer texts than below: what is the methods' own is what they say their candidates were drawn from."""
    assert check(model, exact, method, SMALL_TREE, SamplingConfig(0.9), count=FEWER) > 1e-3


@SLOW
@pytest.mark.parametrize(
    "method, paths, settings",
    [
        pytest.param(MEDUSA, TREE, [SamplingConfig(1.6), SamplingConfig(0.1)], id="hot-and-nearly-greedy-tree"),
        pytest.param(MEDUSA, TREE, [SamplingConfig(1.0, top_k=2)], id="fewer-tokens-than-ranks", marks=EXHAUSTIVE),
        pytest.param(MEDUSA, CHAIN, [SamplingConfig(0.4, top_p=0.95)], id="cold-chain-top-p"),
        pytest.param(MASKS, TREE, [SamplingConfig(1.2, top_k=6, top_p=0.8, min_p=0.05)], id="space-all-filters-tree"),
        pytest.param(DRAFT_MODEL, CHAIN, [SamplingConfig(0.9)], id="draft-model-chain", marks=EXHAUSTIVE),
        pytest.param(DRAFT_MODEL, TREE, [SamplingConfig(1.2, top_p=0.9)], id="draft-model-tree"),
    ],
)
def test_temperatures_and_filters(model, exact, method, paths, settings):
    for sampling in settings:
        assert check(model, exact, method, paths, sampling) > 1e-3


CHAINS = [method for method in METHODS if method.name not in (*POINTS, "medusa")]


@pytest.mark.parametrize(
    "method", [pytest.param(MEDUSA, id="medusa"), *slow_ones(CHAINS, ("ppd", "dflash", "draft_model"))]
)
def test_blocks_keep_the_distribution(model, exact, method):
    """Three tokens at once: what decides about the first of a chain depends on those behind it."""
    count = TEXTS if method is MEDUSA else FEWER
    assert check(model, exact, method, CHAIN, SamplingConfig(0.9), Block(), count=count) > 1e-3


@SLOW
@pytest.mark.parametrize(
    "settings", [SamplingConfig(1.6), SamplingConfig(0.4, top_p=0.95), SamplingConfig(1.0, top_k=2)]
)
def test_blocks_of_any_temperature_and_filter(model, exact, settings):
    assert check(model, exact, MEDUSA, CHAIN, settings, Block(), TEXTS) > 1e-3


@dataclasses.dataclass(frozen=True)
class Stale(Block):
    """Draws what is behind the accepted path again from the same streams, although it has been looked at."""

    def drafting_seeds(self, seeds, position):
        return seeds


@SLOW
def test_blocks_need_new_draws_in_every_step(model, exact):
    assert check(model, exact, MEDUSA, CHAIN, SamplingConfig(0.9), Stale(), 10 * TEXTS) < 1e-3


def judged(acceptance, p, q, count=100_000):
    """Accepted lengths and tokens of chains of two drawn from q [2, V], behind which the base has p [3, V]."""
    single = build_tree([(0,), (0, 0)])
    tree = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *np.shape(x))), single)
    rng, seeds = np.random.default_rng(0), jnp.arange(count, dtype=jnp.uint32)
    drawn = np.stack([rng.choice(len(row), count, p=row) for row in q], axis=1)
    tokens = jnp.array(np.concatenate([np.zeros((count, 1), int), drawn], axis=1))
    place = jnp.broadcast_to(jnp.array([0, 0, 1]), tokens.shape)
    of_drafter = Drawn(jnp.broadcast_to(jnp.log(q), (count, *q.shape)), place)
    logits, positions = jnp.broadcast_to(jnp.log(p), (count, *p.shape)), jnp.broadcast_to(jnp.arange(7, 10), (count, 3))
    sampler = make_sampler(SamplingConfig(1.0))
    result = jax.jit(acceptance)(draft_of(tree, tokens, tree.live, of_drafter), logits, sampler, seeds, positions)
    lengths = np.asarray(result.length)
    emitted = np.where(
        np.arange(3) < lengths[:, None], np.pad(drawn, ((0, 0), (0, 1))), np.asarray(result.bonus)[:, None]
    )
    rest = np.stack([rng.choice(p.shape[1], count, p=row) for row in p], axis=1)
    return lengths, np.where(np.arange(3) <= lengths[:, None], emitted, rest)


def test_the_papers_example():
    """Section 2: p = (1/3, 2/3), q = (2/3, 1/3) twice: 10/9 tokens of a block are accepted by token, 11/9 together."""
    p, q = np.array([[1 / 3, 2 / 3]] * 3), np.array([[2 / 3, 1 / 3]] * 2)
    joint = np.einsum("i,j,k->ijk", *p)
    for acceptance, accepted in ((Rejection(), 10 / 9), (Block(), 11 / 9)):
        lengths, texts = judged(acceptance, p, q)
        assert lengths.mean() == pytest.approx(accepted, abs=0.01)
        assert p_value(texts, joint) > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: drafter_of(MEDUSA, model, TREE), "not a tree: give it --tree chain:N"),
        (lambda model: drafters.load_drafter("suffix", model, tree="chain:3"), "looks its candidates up"),
        (lambda model: drafters.load_drafter("prompt_lookup+suffix", model), "not drafts chosen in every step"),
    ],
)
def test_blocks_are_refused_what_is_no_drawn_chain(model, make, message):
    with pytest.raises(UserError, match=message):
        generate(make(model), [PROMPT], 4, acceptance=Block(), sampling=SamplingConfig(1.0))


@SLOW
def test_greedy_blocks_are_exact_matching(model):
    model = dataclasses.replace(model, eos=(5,))
    prompts = make_prompts(4, V)
    ours = generate(drafter_of(MEDUSA, model, CHAIN), prompts, 20, batch_size=4, acceptance=Block())
    assert [a.tokens for a in ours] == [a.tokens for a in generate(autoregressive(model), prompts, 20)]


@dataclasses.dataclass(frozen=True)
class Published(Rejection):
    """SPACE's Algorithm 1: after a rejection the token is drawn from all of p."""

    def residual(self, p, q):
        return p


@SLOW
@pytest.mark.parametrize("paths", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_published_rule_fails(model, exact, paths):
    assert check(model, exact, MEDUSA, paths, SamplingConfig(0.9), Published()) < 1e-9


@SLOW
def test_a_draft_vocabulary_changes_nothing(model, exact):
    frequent = np.array([7, 0, 2, 5], np.int32)
    adapter = Adapter(MEDUSA, trained(MEDUSA, model.base), model.fingerprint, {}, frequent)
    texts, accepted, _ = sample(make_drafter(adapter, model, TREE, 4), SamplingConfig(0.9), Rejection(), 2)
    assert accepted > 0 and p_value(texts[:, :3], exact(SamplingConfig(0.9)).sum(axis=3)) > 1e-3


@SLOW
def test_trees_that_depend_on_probes(model, exact):
    """PPD's dynamic tree: states of unequal depth and probes, borrowed ones too."""
    method = PPD()
    states = [
        State((), (1,), 0, False),
        State(((0,), (1,)), (2, 1, 3), 1, True),
        State(((0,), (1,), (0, 0), (0, 1)), (3, 2, 1, 2, 2), 2, True),
    ]
    drafter = untrained_drafter(method, model, make_plan(states), trained(method, model.base))
    texts, accepted, offered = sample(drafter, SamplingConfig(0.9), Rejection(), 3)
    joint = exact(SamplingConfig(0.9))
    assert 0 < accepted < offered
    assert min(p_value(texts[:, :3], joint.sum(axis=3)), p_value(texts[:, 1:], joint.sum(axis=0))) > 1e-3


def test_the_hand_worked_example():
    """p = [.5 .3 .2] and q = [.8 .1 .1]: the excess is [0 .2 .1], not p."""
    left = Rejection().residual(jnp.array([[0.5, 0.3, 0.2]]), jnp.array([[0.8, 0.1, 0.1]]))
    np.testing.assert_allclose(left, [[0, 2 / 3, 1 / 3]], rtol=1e-6)


@SLOW
def test_greedy_is_exact_matching(model):
    model = dataclasses.replace(model, eos=(5,))
    prompts = make_prompts(4, V)
    ours = generate(drafter_of(PPD(), model, SMALL_TREE), prompts, 20, batch_size=4, acceptance=Rejection())
    assert [a.tokens for a in ours] == [a.tokens for a in generate(autoregressive(model), prompts, 20)]


@SLOW
def test_the_text_is_fixed_by_the_seed(model):
    drafter, settings = (
        drafter_of(PPD(), model, SMALL_TREE),
        {"acceptance": Rejection(), "sampling": SamplingConfig(1.0)},
    )

    def run(seed):
        return [a.tokens for a in generate(drafter, make_prompts(3, V), 20, seed=seed, **settings)]

    assert run(1) == run(1) != run(2)
    together = generate(drafter, make_prompts(3, V), 20, seed=1, batch_size=3, **settings)
    assert [a.tokens for a in together] == run(1)
    *_, last = stream(drafter, make_prompts(3, V)[0], 20, seed=1, **settings)
    assert last.tokens == run(1)[0]
