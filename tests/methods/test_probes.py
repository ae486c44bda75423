"""What all probe methods promise: what is trained is what decodes, and the base never notices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import log_softmax

from jaxspec.decoding.draft import Accepted
from jaxspec.decoding.method import Method, ReadChunk, Step, abstract_trainable
from jaxspec.decoding.tree import select_trees
from jaxspec.drafters.drafter import method_plan
from jaxspec.errors import UserError
from jaxspec.methods import PPD, SPACE, BiTA, HiddenTransfer
from jaxspec.methods.probes import text_states
from jaxspec.model.attention import causal_context
from jaxspec.model.base import Base
from jaxspec.model.cache import commit, empty_cache
from jaxspec.model.rows import run_rows
from jaxspec.trees import parse_tree
from jaxspec.trees.arrays import build_tree, stack_trees
from tests.helpers.drafting import draft_of, drafting_of
from tests.helpers.methods import batch_of, loss_and_gradient, predict, sequence, settings, trained
from tests.helpers.model import plain
from tests.helpers.tiny import TINY

METHODS = [
    PPD(),
    PPD(ensemble=3, multi_exit=2),
    PPD(ensemble=2, mask="decoder", aggregation="learned", prefix_tokens=1, entry=1, multi_exit=2, head="two_stage"),
    PPD(ensemble=2, mask="encoder", prefix_tokens=2, head="one_stage"),
    BiTA(prompts=4),
    BiTA(prompts=2, entry=1, objective="distillation"),
    BiTA(prompting="shallow", prompts=3),
    BiTA(prompting="shallow", prompts=3, entry=2),
    BiTA(prompting="none", distances=2),
    SPACE(distances=3, tuning="none"),
    HiddenTransfer(layers=(0, 1, 2), training="joint"),
    HiddenTransfer(layers=(1, 1, 2), training="joint"),
    HiddenTransfer(layers=(0, 2, 2), masked=True, training="joint"),
]


FAST = [PPD(), BiTA(prompts=4), METHODS[10]]
every_method = pytest.mark.parametrize(
    "method", [pytest.param(m, id=settings(m), marks=() if m in FAST else pytest.mark.slow) for m in METHODS]
)


@functools.partial(jax.jit, static_argnums=(0, 4))
def step_at(method, trainable, base, tokens, p, tree):
    """Hidden states of a decoding step whose second candidate at depth 1 is the token at p, and its cache."""
    prefix = tokens[:, : p - 1]
    _, rows = base.rows(base.embed(prefix), causal_context(1, p - 1))
    cache = commit(empty_cache(base.decoder.config, 1, 32, jnp.float32), rows, jnp.zeros(1, jnp.int32))
    filler = jnp.arange(3, 3 + tree.num_nodes)[None] % 16
    draft = filler.at[0, 0].set(tokens[0, p - 1]).at[0, 2].set(tokens[0, p])
    lengths = jnp.array([p - 1])
    context = drafting_of(tree, draft[:, 0], lengths, method.prepare(trainable, base), base)
    rows = method.rows(context, draft_of(tree, draft), {})
    states, kv = run_rows(base, rows, cache, lengths[:, None, None])
    return {layer: x[:, 0] for layer, x in states.items()}, kv


def stacked(method):
    """A tree behind whose third node all probes stand, padded by another one of quite different probes."""
    other = build_tree([(0,), (1,), (2,), (0, 0)], method.distances, [method.distances, 1, 0, 2, 1])
    wanted = build_tree([(0,), (1,), (1, 0)], method.distances, [method.distances] * 4)
    return select_trees(stack_trees([wanted, other]), jnp.zeros(1, int))


@every_method
def test_training_and_decoding_compute_the_same_predictions(tiny, method):
    """Logits of the loss at insertion point p equal those of a decoding step whose accepted node sits at p."""
    base, p = Base(tiny.params, tiny.decoder), 8
    tokens, trainable = sequence(tiny), trained(method, base)
    wanted = predict(method, trainable, base, batch_of(tokens, [[4, p]]))[0, 1]
    tree = stacked(method)
    states, _ = step_at(method, trainable, base, tokens, p, tree)
    accepted = Accepted(jnp.array([[0, 2, 2]]), jnp.array([1]), jnp.array([2]), jnp.array([0]))
    prepared, none = method.prepare(trainable, base), jnp.zeros(tree.depth.shape, jnp.int32)
    step = Step(draft_of(tree, none), states, None, accepted)
    chunk = ReadChunk(none[:, :3], None, jnp.array([p - 1]), jnp.array([2]), step=step)
    context = drafting_of(tree, [0], [p + 1], prepared, base)
    state = method.observe(context, chunk, method.init_state(base, 1, 32))
    offer = jax.jit(method.offer)(context, state)
    best = jnp.argsort(-wanted, axis=-1)[: tree.max_depth]
    assert offer.tokens[0].tolist() == best[:, : tree.max_rank].tolist() and bool(offer.known.all())
    chances = jnp.take_along_axis(jax.nn.log_softmax(wanted)[: len(best)], best, axis=-1)
    np.testing.assert_allclose(offer.log_p[0], chances[:, : tree.max_rank], rtol=1e-3, atol=1e-3)

    probes = tree.probe_of[0, 2, : len(wanted)]
    rows = tree.num_nodes + probes[:, None] * method.probe_rows + np.arange(method.probe_rows)
    exits = [states[layer][0, rows] for layer in method.exit_layers(base)]
    logits = jax.jit(method.read)(prepared, base, exits, np.arange(len(wanted)) + 1)
    np.testing.assert_allclose(logits, wanted, rtol=1e-3, atol=1e-3)


@every_method
def test_the_base_never_notices(tiny, method):
    """Bit for bit the same logits of real tokens whatever the probes are, and within 1e-5 without any."""
    base, p, tokens = Base(tiny.params, tiny.decoder), 8, sequence(tiny)
    tree, trainable = stacked(method), trained(method, base)
    others = jax.tree.map(lambda x: x * -3 + 1, trainable)
    one, kv = step_at(method, trainable, base, tokens, p, tree)
    two, kv_two = step_at(method, others, base, tokens, p, tree)
    one, two, N = one[tiny.config.num_layers], two[tiny.config.num_layers], tree.num_nodes
    assert not np.allclose(one[:, N:], two[:, N:], atol=1e-2)
    logits = jax.jit(Base.logits)
    np.testing.assert_array_equal(logits(base, one[:, :N]), logits(base, two[:, :N]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, :, :N], b[:, :, :N]), kv, kv_two)

    wanted = plain(base, tokens[:, : p + 1])
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(logits(base, one[:, :N])[:, [0, 2]] / scale, wanted[:, p - 1 :] / scale, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "there"),
    [
        (HiddenTransfer(layers=(0, 1, 2)), [4 + 4, 4 + 8, 4 + 12]),
        (HiddenTransfer(layers=(1, 2, 2)), [4, 4 + 4, 4 + 12]),
        (PPD(ensemble=2, entry=1), [4, 4 + 24, 4 + 24]),
        (BiTA(prompts=2, entry=2), [4, 4, 4 + 12]),
    ],
    ids=lambda value: settings(value) if isinstance(value, Method) else str(value),
)
def test_layers_below_do_not_compute_probes(tiny, method, there):
    """In a decoding step with three probes behind each of 4 nodes, a layer has those rows alone that have joined."""
    base, tree = Base(tiny.params, tiny.decoder), build_tree([(0,), (1,), (1, 0)], 3, [3] * 4)
    tree = select_trees(stack_trees([tree]), jnp.zeros(1, int))
    draft = draft_of(tree, jnp.arange(4)[None])
    trainable = method.prepare(trained(method, base), base)

    def step(base):
        context = drafting_of(tree, [0], [0], trainable, base)
        return run_rows(base, method.rows(context, draft, {}))

    _, kv = jax.eval_shape(step, base)
    assert [keys.shape[2] for keys in kv.keys] == there


def test_late_probes_start_as_states_of_a_text(tiny):
    """Read off a run through the layers below, in which the last token stands before the first, too."""
    base, tokens = Base(tiny.params, tiny.decoder), jnp.array([3, 1, 2])
    text = jnp.array([[2, 3, 1, 2]])
    states, _ = base.rows(base.embed(text), causal_context(1, 4), layers=(0, 2))
    np.testing.assert_allclose(text_states(base, tokens, 2), states[0, 1:], rtol=1e-5)
    np.testing.assert_array_equal(text_states(base, tokens, 0), base.embed(tokens))
    masks = [BiTA(initial=initial, entry=2).init(jax.random.key(0), base)["masks"] for initial in ("normal", "text")]
    assert np.std(masks[0]) < 0.05 and np.std(masks[1]) == pytest.approx(np.std(states), rel=0.5)


@every_method
def test_an_insertion_point_sees_nothing_behind_it(tiny, method):
    base, tokens = Base(tiny.params, tiny.decoder), sequence(tiny)
    trainable = trained(method, base)
    changed = tokens.at[:, 9:].set((tokens[:, 9:] + 1) % 16)
    same = [predict(method, trainable, base, batch_of(t, [[8, 2]])) for t in (tokens, changed)]
    np.testing.assert_array_equal(*same)
    other = predict(method, trainable, base, batch_of(tokens.at[:, 8].set(15 - tokens[:, 8]), [[8, 2]]))
    assert not np.allclose(other[0, 0], same[0][0, 0]) and np.array_equal(other[0, 1], same[0][0, 1])


OPTIMIZER = optax.adam(1e-2)


@functools.partial(jax.jit, static_argnums=(0, 3))
def update(method, trainable, base, stage, batch, state):
    """What training and the optimizer hold after one update, its loss, and whether each leaf had a gradient."""
    (loss, _), gradients = loss_and_gradient(method, trainable, base, stage, batch)
    updates, state = OPTIMIZER.update(gradients, state)
    moved = jnp.array([jnp.any(gradient != 0) for gradient in jax.tree.leaves(gradients)])
    return optax.apply_updates(trainable, updates), state, loss, moved


def loss_by_hand(method, trainable, base, batch):
    """One insertion point and distance at a time."""
    student = log_softmax(np.asarray(predict(method, trainable, base, batch), np.float64), axis=-1)
    teacher = log_softmax(np.asarray(plain(base, batch.tokens), np.float64), axis=-1)
    tokens = np.asarray(batch.tokens)
    total, count = 0.0, 0
    for row, points in enumerate(np.asarray(batch.points)):
        for group, p in enumerate(points):
            for d in range(1, method.distances + 1):
                if p < 0 or p + d + 1 >= batch.lengths[row]:
                    continue
                q, t = student[row, group, d - 1], teacher[row, p + d]
                if method.objective == "hard":
                    each = -q[tokens[row, p + d + 1]]
                elif method.direction == "forward":
                    each = np.sum(np.exp(t) * (t - q))
                else:
                    each = np.sum(np.exp(q) * (q - t))
                total, count = total + each * method.decay ** (d - 1), count + 1
    return total / count


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(PPD(), marks=pytest.mark.slow),
        pytest.param(PPD(direction="reverse", decay=0.5), marks=pytest.mark.slow),
        pytest.param(PPD(objective="hard", distances=2), marks=pytest.mark.slow),
        pytest.param(BiTA(prompts=2), marks=pytest.mark.slow),
        pytest.param(BiTA(prompts=2, objective="distillation"), marks=pytest.mark.slow),
        HiddenTransfer(layers=(0, 1, 2), training="joint"),
    ],
    ids=settings,
)
def test_loss_by_hand(tiny, method):
    """PPD equation 4.1, BiTA equation 1, Hidden Transfer section 3.3."""
    base = Base(tiny.params, tiny.decoder)
    tokens = jnp.concatenate([sequence(tiny, seed=0), sequence(tiny, seed=1)])
    batch = batch_of(tokens, [[3, 17, -1], [2, 9, 13]], lengths=[20, 14])
    trainable = trained(method, base)
    loss, metrics = jax.jit(method.loss)(trainable, base, batch)
    np.testing.assert_allclose(loss, loss_by_hand(method, trainable, base, batch), rtol=1e-4)
    assert set(metrics) == {f"top1@{d}" for d in range(1, method.distances + 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stage"),
    [
        (PPD(ensemble=2, aggregation="learned", prefix_tokens=1, head="one_stage"), 0),
        (PPD(objective="hard"), 0),
        (PPD(entry=1, multi_exit=2), 0),
        (PPD(head="two_stage"), 1),
        (BiTA(prompts=2), 0),
        (BiTA(prompts=2, prompting="shallow", objective="distillation", entry=1), 0),
        (HiddenTransfer(layers=(0, 1, 2), training="joint"), 0),
        (HiddenTransfer(layers=(0, 1, 2), training="joint", masked=True), 0),
        (HiddenTransfer(layers=(0, 1, 2), training="joint", train_visibility="real", direction="reverse"), 0),
    ],
    ids=lambda value: settings(value) if isinstance(value, Method) else str(value),
)
def test_training_lowers_the_loss_and_every_part_learns(tiny, method, stage):
    base, batch = Base(tiny.params, tiny.decoder), batch_of(sequence(tiny, 40), [list(range(2, 34))])
    trainable = jax.jit(method.init)(jax.random.key(0), base)
    state, losses = jax.jit(OPTIMIZER.init)(trainable), []
    for _ in range(60):
        trainable, state, loss, moved = update(method, trainable, base, stage, batch, state)
        assert np.all(moved)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PPD(distances=0), "ppd: distances must be at least 1, got 0"),
        (lambda: PPD(ensemble=0), "ensemble must be at least 1"),
        (lambda: PPD(prefix_tokens=-1), "prefix_tokens must be at least 0"),
        (lambda: PPD(multi_exit=0), "multi_exit must be at least 1"),
        (lambda: PPD(decay=0.0), "decay must be above 0"),
        (lambda: PPD(head="three_stage"), "head must be one of none, one_stage, two_stage"),
        (lambda: BiTA(prompts=0), "bita: prompts must be at least 1"),
        (lambda: BiTA(prompting="wide"), "prompting must be one of deep, shallow, none"),
        (lambda: HiddenTransfer(layers=(3, 2, 4)), r"ascending order, got \[3, 2, 4\]"),
        (lambda: HiddenTransfer(layers=(3, 4)), r"layers must be 3 layers"),
    ],
)
def test_settings_that_make_no_sense_are_named(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_probes_count_for_the_layers_that_they_run_through():
    half, accuracy = PPD(ensemble=2, entry=2), [[0.4, 0.2, 0.1]] * 3
    four = dataclasses.replace(TINY, num_layers=4)
    costs = [method.facts(four).probe_cost for method in (Method(), PPD(), half, HiddenTransfer(layers=(1, 1, 3)))]
    assert costs == pytest.approx([0, 1, 1, 7 / 12])
    assert method_plan(half, four, "dynamic:20", accuracy) == parse_tree("dynamic:20", "ppd", 3, accuracy, probe_cost=1)


@pytest.mark.parametrize(
    "method",
    [PPD(entry=3), PPD(entry=-1), PPD(entry=2, multi_exit=2), BiTA(entry=3), HiddenTransfer(layers=(0, 1, 3))],
    ids=settings,
)
def test_layers_that_the_base_does_not_have_are_named(tiny, method):
    with pytest.raises(UserError, match=r"probes can join at layers 0 to [12] of this base, got (-1|2|3|0, 1, 3)\b"):
        abstract_trainable(method, tiny.config)


def test_more_exits_than_layers_are_named(tiny):
    with pytest.raises(UserError, match="ppd: 4 exits need as many layers, this base has 3"):
        abstract_trainable(PPD(multi_exit=4), tiny.config)


def test_settings_survive_json(tiny):
    method = HiddenTransfer(layers=[0, 1, 2])
    assert method == HiddenTransfer(**dataclasses.asdict(method)) and hash(method) and method.layers == (0, 1, 2)
