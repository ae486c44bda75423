"""DFlash 2's convolutions and selector and DSpark's heads: what they compute, and that they change nothing at first."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.arrays import best_of
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import DFlash
from jaxspec.methods.block_convolution import BlockConvolution, convolved
from jaxspec.methods.block_selector import reranked
from jaxspec.trees import from_paths
from jaxspec.weights.layouts import in_blocks
from tests.helpers.drafting import batched, drafting_of, paths_of
from tests.helpers.methods import batch_of, predict, sequence, trained, union
from tests.helpers.model import quick_jit
from tests.helpers.tiny import make_prompts

BLOCK = DFlash(block=3, layers=1, tapped=(1, 3))
DFLASH2 = dataclasses.replace(BLOCK, convolution=2, convolution_group=8, selector_rank=4, selector_width=3)
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


def of_few(rng, *shape):
    """float32 in which nothing is rounded: sums are the same in every order."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def test_a_convolution_mixes_rows_of_one_block():
    rng = np.random.default_rng(0)
    rows, taps, group = 3, 2, 2
    x, weights, changes = of_few(rng, 1, 6, 4), of_few(rng, taps, 4), of_few(rng, 1, 6, taps, 2)
    expected = np.zeros_like(x)
    for row in range(6):
        for tap in range(min(taps, row % rows + 1)):
            expected[0, row] += x[0, row - tap] * (weights[tap] + np.repeat(changes[0, row, tap], group))
    np.testing.assert_array_equal(convolved(jnp.array(x), jnp.array(weights), jnp.array(changes), rows), expected)


def test_at_first_nothing_is_changed(tiny):
    """With fewer candidates than there are tokens. A larger program may round otherwise, its parts change no bit."""
    batch = batch_of(sequence(tiny, 24), [[4, 6, 12]])
    key = jax.random.key(0)
    plain, dflash2 = (predict(method, method.init(key, tiny.base), tiny.base, batch) for method in (BLOCK, DFLASH2))
    np.testing.assert_allclose(plain, dflash2, atol=1e-5)
    logits, row = jnp.array([1.0, 2, 2, 0, 3]), jax.random.normal(key, (1, 3, 32))
    np.testing.assert_array_equal(reranked(logits, *best_of(logits, 3), jnp.zeros(2)), logits)  # a tie with the others
    conv = BlockConvolution(32, 2, 8)
    params = conv.init(key, row, lambda x: x, 3)
    np.testing.assert_array_equal(conv.apply(params, row, lambda x: x, 3), row)


def test_at_first_a_confidence_head_doubts_little(tiny):
    """Whatever the row: or every draft would be thought worth half of what it is."""
    method = dataclasses.replace(BLOCK, confidence_head="state")
    head = {"confidence": method.init_heads(jax.random.key(0), tiny.base)["confidence"]}
    states, before = jax.random.normal(jax.random.key(1), (1, 3, 32)), jnp.zeros((1, 3), jnp.int32)
    odds = method.log_odds(head, tiny.base, states, before)
    np.testing.assert_allclose(jax.nn.sigmoid(odds), 0.982, atol=1e-3)


@pytest.mark.parametrize("vocabulary", [0, 6])
def test_a_selector_ranks_the_best_anew(tiny, vocabulary):
    """By the token before and the row's state. All others stay behind these, of which one may fall far."""
    rng = np.random.default_rng(1)
    base = tiny.base.drafting(jnp.array([7, 0, 3, 12, 5, 9])) if vocabulary else tiny.base
    method = dataclasses.replace(DFLASH2, vocabulary=vocabulary)
    count = vocabulary or 16
    before, candidate, state = of_few(rng, 16, 4), of_few(rng, count, 4), of_few(rng, 32, 4)
    params = {"selector": {"before": before, "candidate": candidate, "state": {"kernel": state}}}
    logits, states = rng.permutation(count).astype(np.float32), of_few(rng, 32)
    tokens = np.array([[2, 11]])
    arrays = jax.tree.map(jnp.array, (params, logits[None, None], states[None, None], tokens))
    selected = np.asarray(method.selected(arrays[0], base, *arrays[1:]))[0]
    best, lost = np.argsort(-logits)[:3], []
    for token, row in zip(tokens[0], selected, strict=True):
        moved = logits[best] + (before[token] * (states @ state)) @ candidate[best].T
        np.testing.assert_array_equal(row[best], moved)
        rest = np.delete(np.arange(count), best)
        lost.append(max(logits[rest].max() - moved.min(), 0))
        np.testing.assert_allclose(row[rest], logits[rest] - lost[-1], rtol=1e-5, atol=1e-3)
        np.testing.assert_array_equal(np.argsort(row[rest]), np.argsort(logits[rest]))
        assert row[rest].max() < moved.min()
    assert max(lost) > 0 and np.any(selected[0, best] != selected[1, best])


def test_a_tie_with_the_last_of_the_best(tiny):
    """Which a token of a smaller number, one of the others, would win. Every logit learns by its own gradient."""
    method = dataclasses.replace(BLOCK, selector_rank=1, selector_width=2, vocabulary=4)
    selector = {"before": jnp.ones((16, 1)), "candidate": jnp.array([[0.0], [-1], [0], [0]])}
    trainable = {"selector": selector | {"state": {"kernel": jnp.ones((32, 1))}}}

    def selected(logits):
        return method.selected(trainable, tiny.base, logits, jnp.full(32, 1 / 32), jnp.array(7))

    logits = jnp.array([1.0, 2, 0, 3])
    np.testing.assert_array_equal(jnp.argsort(-selected(logits)), [3, 1, 0, 2])
    np.testing.assert_array_equal(jax.jacobian(selected)(logits), np.eye(4))


@pytest.mark.parametrize("head", ["state", "markov"])
def test_chances_are_scaled_by_the_confidence_head(tiny, head):
    """Of every candidate by that of the row that predicts it, behind the token before. A fixed tree does not ask."""
    rank = 4 * (head == "markov")
    method = dataclasses.replace(BLOCK, markov_rank=rank, confidence_head=head)
    trainable = method.prepare(trained(method, tiny.base), tiny.base)
    states, tree = jax.random.normal(jax.random.key(0), (1, 3, 32)), batched(from_paths(PATHS[:-1]).arrays(0))

    @quick_jit
    def offers(trainable, base):
        def offer(method, fixed):
            rows = jax.tree.map(lambda x: x[:, 0], tree)
            context = drafting_of(rows, [3], [5], trainable, base, width=4, fixed=fixed)
            return method.offer_behind(context, states)

        without = dataclasses.replace(method, confidence_head="none")
        return offer(method, False), offer(without, False), offer(method, True), offer(without, True)

    scaled, plain, *fixed = offers(trainable, tiny.base)
    np.testing.assert_array_equal(*(offer.log_p for offer in fixed))
    odds = quick_jit(method.log_odds)
    if head == "state":
        np.testing.assert_array_equal(scaled.tokens, plain.tokens)
        factor = jax.nn.sigmoid(odds(trainable, tiny.base, states, jnp.zeros((1, 3), jnp.int32)))[..., None]
        np.testing.assert_allclose(jnp.exp(scaled.log_p), factor * jnp.exp(plain.log_p), rtol=1e-4)
        return
    scaled, plain = paths_of(scaled, 2), paths_of(plain, 2)
    assert scaled.keys() == plain.keys() and {len(path) for path in plain} == {1, 2}
    for path in plain:
        before = jnp.array([[path[-2] if len(path) > 1 else 3]])
        row = states[:, len(path) - 1, None]
        factor = float(jax.nn.sigmoid(odds(trainable, tiny.base, row, before))[0, 0])
        assert scaled[path] == pytest.approx(factor * plain[path], rel=1e-3)


def test_a_confidence_head_learns_the_chance_to_be_taken(tiny):
    """What it adds to the loss is the cross-entropy with the overlap of drafter and base, where there is a target."""
    method = dataclasses.replace(BLOCK, confidence_head="state")
    trainable, batch = trained(method, tiny.base), batch_of(sequence(tiny, 12), [[3, 8, -1]])  # of 8 but two distances

    @quick_jit
    def run(trainable, base):
        states, before, frozen = method.text_blocks(trainable, base, batch)
        plain = dataclasses.replace(method, confidence_head="none")
        parts = method.predictions(trainable, base, batch), frozen, method.log_odds(trainable, base, states, before)
        loss, metrics = method.loss(trainable, base, batch)
        return loss - plain.loss(trainable, base, batch)[0], metrics, parts

    more, metrics, (logits, frozen, odds) = run(trainable, tiny.base)
    expected, count, chances, overlaps = 0.0, 0, [], []
    for group, point in enumerate((3, 8)):
        for place, distance in enumerate((1, 2, 3)):
            if point + distance + 1 < 12:
                p, q = jax.nn.softmax(tiny.base.logits(frozen[0, point + distance])), logits[0, group, place]
                taken, chance = jnp.minimum(p, jax.nn.softmax(q)).sum(), jax.nn.sigmoid(odds[0, group, place])
                entropy = -taken * jnp.log(chance) - (1 - taken) * jnp.log(1 - chance)
                expected, count = expected + 0.8**place * entropy, count + 1
                chances, overlaps = [*chances, chance], [*overlaps, taken]
    assert count == 5 and float(more) == pytest.approx(float(expected) / 5, rel=1e-4)
    found = [metrics["confidence"], metrics["overlap"]]
    np.testing.assert_allclose(found, [np.mean(chances), np.mean(overlaps)], rtol=1e-4)


@pytest.mark.slow
def test_a_draft_ends_where_the_confidence_head_expects_nothing(tiny):
    """Where rows have a price, none are taken for candidates that it does not believe in."""
    offered = []
    for bias in (-20.0, 20.0):
        method = dataclasses.replace(BLOCK, markov_rank=4, confidence_head="markov")
        drafter = union([method], tiny, 8).with_tree("best:1@1,4@1.1,8@1.2")
        [source] = drafter.sources
        head = {"kernel": np.zeros((36, 1), np.float32), "bias": np.full(1, bias, np.float32)}
        source = dataclasses.replace(source, trainable=source.trainable | {"confidence": head})
        answers = generate(dataclasses.replace(drafter, sources=(source,)), make_prompts(2), 16)
        offered.append(sum(sum(answer.offered) for answer in answers))
    assert offered[0] < offered[1] / 4, offered


def test_tables_are_looked_up_whatever_their_width(tiny):
    """Kernels of 64 columns are held in blocks on processors; these are none."""
    method = dataclasses.replace(BLOCK, markov_rank=64, markov_tables=True, selector_rank=64)
    held = in_blocks(method.prepare(trained(method, tiny.base), tiny.base), lambda shape: 0 if shape[1] % 64 else 64)
    assert held["markov"]["before"]["table"].shape == held["selector"]["before"].shape == (16, 64)
    assert held["selector"]["state"]["kernel"].ndim == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"convolution": 4}, "convolution must be 0 to 3, the rows of a block, got 4"),
        ({"convolution": -1}, "convolution must be at least 0, got -1"),
        ({"convolution_group": 0}, "convolution_group must be at least 1, got 0"),
        ({"selector_rank": -1}, "selector_rank must be at least 0, got -1"),
        ({"selector_width": 0}, "selector_width must be at least 1, got 0"),
        ({"confidence_head": "both"}, "confidence_head must be one of none, state, markov"),
        ({"confidence_head": "markov"}, "confidence_head markov needs a markov_rank of at least 1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(UserError, match=f"dflash: {message}"):
        dataclasses.replace(BLOCK, **settings)


def test_groups_must_divide_the_width(tiny):
    method = dataclasses.replace(BLOCK, convolution=2, convolution_group=5)
    with pytest.raises(UserError, match="convolution_group must divide the width 32 of this base, got 5"):
        method.init(jax.random.key(0), tiny.base)


def test_a_selector_of_few_tokens_drafts_no_others(tiny):
    method = dataclasses.replace(DFLASH2, vocabulary=6)
    with pytest.raises(UserError, match="its selector is for 6 tokens: draft-vocabulary must be 1 to 6, not 0, all"):
        method.prepare(trained(method, tiny.base), tiny.base)
