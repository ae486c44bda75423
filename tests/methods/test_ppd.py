"""PPD: what is trained is what decodes, masks are the thesis's, gradients stay in the prompt tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Accepted
from jaxspec.decoding.sampling import make_sampler
from jaxspec.methods import PPD
from jaxspec.methods.base import Batch, Draft, Verified
from jaxspec.model.base import Base
from jaxspec.model.cache import commit, empty_cache
from jaxspec.model.decoder import causal_mask
from jaxspec.model.rows import run_rows
from jaxspec.tree import build_tree, select_trees, stack_trees

METHODS = [
    PPD(),
    PPD(ensemble=3),
    PPD(ensemble=2, mask="decoder", aggregation="learned"),
    PPD(ensemble=2, mask="encoder"),
]


def sequence(tiny, length=20, seed=0):
    return jnp.array(np.random.default_rng(seed).integers(0, tiny.config.vocab_size, (1, length)), jnp.int32)


def batch_of(tokens, points, lengths=None):
    lengths = [tokens.shape[1]] * tokens.shape[0] if lengths is None else lengths
    return Batch(tokens, jnp.array(lengths), jnp.ones(tokens.shape[0], jnp.int32), jnp.array(points))


def trained(method, base, seed=3):
    """A pytree that is not symmetric in its ensemble."""
    trainable = method.init(jax.random.key(seed), base)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(9), x.shape), trainable)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.ensemble}-{m.mask}-{m.aggregation}")
def test_training_and_decoding_compute_the_same_predictions(tiny, method):
    """Logits of the loss at insertion point p equal those of a decoding step whose accepted node sits at p."""
    base, p = Base(tiny.params, tiny.decoder), 8
    tokens, trainable = sequence(tiny), trained(method, base)
    wanted = method.predictions(trainable, base, batch_of(tokens, [[4, p]]))[0, 1]

    # the same text up to p - 1 in the cache; p is the second of two candidates at depth 1 and carries probes
    prefix = tokens[:, : p - 1]
    positions = jnp.arange(p - 1)[None]
    _, rows = base.rows(base.embed(prefix), positions, causal_mask(1, p - 1))
    cache = commit(empty_cache(tiny.config, 1, 32, jnp.float32), rows, jnp.zeros(1, jnp.int32))
    tree = select_trees(stack_trees([build_tree([(0,), (1,), (1, 0)], method.distances)]), jnp.zeros(1, int))
    draft = Draft(jnp.array([[tokens[0, p - 1], 3, tokens[0, p], 7]]), jnp.ones((1, 4), bool))
    lengths = jnp.array([p - 1])
    step = method.rows(trainable, base, tree, draft, lengths)
    exits, _ = run_rows(base, step, cache, lengths[:, None, None])
    exits = tuple(x[:, 0] for x in exits)
    accepted = Accepted(jnp.array([[0, 2, 2]]), jnp.array([1]), jnp.array([2]), jnp.array([0]))
    verified = Verified(exits, accepted, jnp.zeros((1, 3), jnp.int32), jnp.array([p + 1]))
    seeds, greedy = jnp.zeros(1, jnp.uint32), make_sampler(SamplingConfig())
    new, _ = method.propose(trainable, base, tree, tree, verified, greedy, seeds, {})
    best = jnp.argsort(-wanted, axis=-1)
    assert new.tokens[0].tolist() == [0, best[0, 0], best[0, 1], best[1, 0]]
    logits = base.logits(exits[-1][:, :4])  # the nodes themselves never see a probe
    plain = tiny.decoder.apply({"params": tiny.params}, tokens[:, : p + 1])
    np.testing.assert_allclose(logits[0, 2], plain[0, p], rtol=1e-4, atol=1e-4)


def test_masks_are_those_of_the_thesis():
    """Section 4.4.3 with two prompt tokens of two EPTs: rows V1 V2 (distance 1), V3 V4 (distance 2)."""
    distance, ept = np.array([1, 1, 2, 2]), np.array([0, 1, 0, 1])
    sees = lambda mask: np.asarray(PPD(mask=mask).sees(distance, ept)).astype(int).tolist()  # noqa: E731
    assert sees("ensemble") == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert sees("decoder") == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert sees("encoder") == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_an_ensemble_of_equal_tokens_is_one_token(tiny):
    base, batch = Base(tiny.params, tiny.decoder), batch_of(sequence(tiny), [[3, 11]])
    one = trained(PPD(), base)
    five = {"embeddings": jnp.repeat(one["embeddings"], 5, axis=1)}
    single = PPD().predictions(one, base, batch)
    np.testing.assert_allclose(PPD(ensemble=5).predictions(five, base, batch), single, rtol=1e-4, atol=1e-4)


def test_an_insertion_point_sees_nothing_behind_it(tiny):
    base, method = Base(tiny.params, tiny.decoder), PPD()
    trainable, tokens = trained(method, base), sequence(tiny)
    changed = tokens.at[:, 9:].set((tokens[:, 9:] + 1) % 16)
    same = [method.predictions(trainable, base, batch_of(t, [[8, 2]])) for t in (tokens, changed)]
    np.testing.assert_array_equal(*same)
    other = method.predictions(trainable, base, batch_of(tokens.at[:, 8].set(15 - tokens[:, 8]), [[8, 2]]))
    assert not np.allclose(other[0, 0], same[0][0, 0]) and np.array_equal(other[0, 1], same[0][0, 1])


def loss_by_hand(method, trainable, base, batch):
    """Equation 4.1 one insertion point and distance at a time."""
    student = np.asarray(jax.nn.log_softmax(method.predictions(trainable, base, batch)), np.float64)
    teacher = np.asarray(jax.nn.log_softmax(base.decoder.apply({"params": base.params}, batch.tokens)), np.float64)
    total, count = 0.0, 0
    for row, points in enumerate(np.asarray(batch.points)):
        for group, p in enumerate(points):
            for d in range(1, method.distances + 1):
                if p < 0 or p + d + 1 >= batch.lengths[row]:
                    continue
                q, t = student[row, group, d - 1], teacher[row, p + d]
                if method.objective == "hard":
                    each = -q[batch.tokens[row, p + d + 1]]
                elif method.direction == "forward":
                    each = np.sum(np.exp(t) * (t - q))
                else:
                    each = np.sum(np.exp(q) * (q - t))
                total, count = total + each * method.decay ** (d - 1), count + 1
    return total / count


@pytest.mark.parametrize(
    "method", [PPD(), PPD(direction="reverse", decay=0.5), PPD(objective="hard", distances=2)], ids=str
)
def test_loss_is_equation_4_1(tiny, method):
    base = Base(tiny.params, tiny.decoder)
    tokens = jnp.concatenate([sequence(tiny, seed=0), sequence(tiny, seed=1)])
    batch = batch_of(tokens, [[3, 17, -1], [2, 9, 13]], lengths=[20, 14])
    trainable = trained(method, base)
    loss, metrics = method.loss(trainable, base, batch)
    np.testing.assert_allclose(loss, loss_by_hand(method, trainable, base, batch), rtol=1e-4)
    assert set(metrics) == {f"top1@{d}" for d in range(1, method.distances + 1)}


@pytest.mark.parametrize("objective", ["distillation", "hard"])
def test_training_lowers_the_loss_and_touches_the_pytree_alone(tiny, objective):
    base, method = Base(tiny.params, tiny.decoder), PPD(ensemble=2, aggregation="learned", objective=objective)
    batch = batch_of(sequence(tiny, 40), [list(range(2, 34))])
    trainable = method.init(jax.random.key(0), base)
    step = jax.jit(jax.value_and_grad(lambda t, b: method.loss(t, b, batch)[0]))
    optimizer = optax.adam(3e-2)
    state, losses = optimizer.init(trainable), []
    for _ in range(50):
        loss, gradients = step(trainable, base)
        assert all(np.any(g != 0) for g in jax.tree.leaves(gradients))
        updates, state = optimizer.update(gradients, state)
        trainable = optax.apply_updates(trainable, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_prompt_tokens_start_as_text_tokens(tiny):
    base = Base(tiny.params, tiny.decoder)
    embeddings = np.asarray(PPD(ensemble=4).init(jax.random.key(0), base)["embeddings"]).reshape(-1, 32)
    table = np.asarray(tiny.params["embedding"])
    assert all(np.any(np.all(np.isclose(table, e), axis=1)) for e in embeddings)


def test_settings_are_hashable_and_shapes_follow_them(tiny):
    method = dataclasses.replace(PPD(), ensemble=7, distances=2, aggregation="learned")
    shapes = jax.tree.map(lambda x: x.shape, method.abstract(tiny.config))
    assert shapes == {"embeddings": (2, 7, 32), "weights": (2, 7)} and hash(method)
