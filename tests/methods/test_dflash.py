"""A block drafter: what is trained decodes, blocks see the text before them alone, and bad settings are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Batch, abstract_trainable
from jaxspec.errors import UserError
from jaxspec.methods import DFlash
from jaxspec.methods.context_layer import DraftLayer, copied_layer
from jaxspec.model.attention import causal_context, causal_mask
from jaxspec.model.rope import rope_angles
from jaxspec.model.rows import read_layers
from jaxspec.trees import from_paths
from tests.helpers.decoding import begin
from tests.helpers.methods import batch_of, loss_and_gradient, predict, sequence, settings, trained, untrained_drafter
from tests.helpers.model import quick_jit, random_base
from tests.helpers.tiny import TINY, make_prompts

PLAIN = DFlash(block=4, layers=2, tapped=(1, 3), sample_from_anchor=False, from_newest=False, head_norms=True)
MARKOV = DFlash(block=3, layers=2, tapped=(1, 3), markov_rank=4)
TABLES = dataclasses.replace(MARKOV, markov_tables=True, confidence_head="markov")
DFLASH2 = DFlash(block=3, layers=2, tapped=(1, 3), convolution=2, selector_rank=4, selector_width=5)
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]
PROMPTS = make_prompts(2)

both = pytest.mark.parametrize("method", [pytest.param(PLAIN, marks=pytest.mark.slow), MARKOV], ids=settings)
every = pytest.mark.parametrize(
    "method", [PLAIN, pytest.param(MARKOV, marks=pytest.mark.exhaustive), TABLES, DFLASH2], ids=settings
)


def run(method, tiny, paths, steps, chunk=8, trainable=None):
    """The state after some steps, the prompts read in chunks."""
    model = dataclasses.replace(tiny, eos=())
    trainable = trained(method, model.base) if trainable is None else trainable
    drafter = untrained_drafter(method, model, from_paths(paths), trainable)
    decoding, state = begin(drafter, PROMPTS, 40, chunk=chunk)
    return decode(decoding, state, np.int32(steps))


def text_of(state, row):
    """Prompt and answer so far."""
    return [*PROMPTS[row], *np.asarray(state.tokens)[row, : int(state.counts[row])].tolist()]


def check_draft(method, predicts, tiny, paths, steps=3):
    """Every node holds the token of its rank by the logits that `predicts` has in training, given its own path."""
    state = run(method, tiny, paths, steps)
    for row in range(len(PROMPTS)):
        text = text_of(state, row)
        drafted = dict(zip([(), *paths], np.asarray(state.draft.tokens)[row].tolist(), strict=True))
        tokens = np.zeros((len(paths), 64), np.int32)
        for i, path in enumerate(paths):
            known = [*text, *(drafted[path[:n]] for n in range(1, len(path) + 1))]
            tokens[i, : len(known)] = known
        points = np.full((len(paths), 1), len(text) - 2)  # the token that owns the block; the anchor follows it
        batch = Batch(tokens, np.full(len(paths), 64), np.ones(len(paths), int), points)
        logits = predict(predicts, trained(method, tiny.base), tiny.base, batch)
        for i, path in enumerate(paths):
            assert drafted[path] == int(jnp.argsort(-logits[i, 0, len(path) - 1])[path[-1]])


@pytest.mark.slow
@every
def test_the_draft_is_what_training_would_predict(tiny, method):
    check_draft(method, method, tiny, PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("method", [MARKOV, DFLASH2], ids=settings)
def test_at_first_drafts_are_those_of_a_plain_block(tiny, method):
    """What is added changes nothing before it is trained, though drafts are made level by level."""
    drafts = []
    for each in (DFlash(block=3, layers=2, tapped=(1, 3)), method):
        trainable = jax.jit(lambda base, each=each: each.init(jax.random.key(0), base))(tiny.base)
        drafts.append(np.asarray(run(each, tiny, PATHS, 4, trainable=trainable).draft.tokens))
    np.testing.assert_array_equal(*drafts)


@pytest.mark.slow
@both
def test_a_shallow_tree_drafts_a_shorter_block(tiny, method):
    """Which is what a method of that block predicts with the same weights."""
    paths = [path for path in PATHS if len(path) < 3]
    check_draft(method, dataclasses.replace(method, block=method.block - 1), tiny, paths)


@pytest.mark.slow
def test_what_it_remembers_is_what_its_tokens_make_it(tiny):
    """After accepted paths, in every row, however the prompt was cut into chunks."""
    method, base = PLAIN, tiny.base
    trainable, state = trained(method, base), run(PLAIN, tiny, PATHS, 5, chunk=4)
    for row in range(len(PROMPTS)):
        text = text_of(state, row)
        padded = jnp.array([(text + [0] * 64)[:64]])
        _, _, read = read_layers(base, padded, method.tapped)
        expected = method.remember(trainable, base, read, jnp.arange(64)[None])
        length = int(state.lengths[row])
        assert length == len(text) - 1
        for ours, theirs in zip(
            jax.tree.leaves(state.method_states[0]["memory"]), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(ours[row, :, :length], theirs[0, :, :length], atol=2e-4)


@both
def test_blocks_do_not_see_each_other_nor_what_comes_later(tiny, method):
    trainable, text = trained(method, tiny.base), sequence(tiny, 24)
    together = predict(method, trainable, tiny.base, batch_of(text, [[4, 6, 12, -1]]))[0]
    for place, point in enumerate((4, 6, 12)):
        alone = predict(method, trainable, tiny.base, batch_of(text, [[point]]))[0, 0]
        np.testing.assert_allclose(together[place], alone, atol=1e-4)
    for later in range(3, 12):  # the owner at 6, its anchor at 7
        changed = predict(method, trainable, tiny.base, batch_of(text.at[0, later].add(1) % 16, [[6]]))[0, 0]
        moved = np.any(np.abs(changed - together[1]) > 1e-5, axis=-1)
        before = np.arange(1, 4) + 6  # the token before each distance
        np.testing.assert_array_equal(moved, (later <= 7) | ((before == later) if method.markov_rank else False))


@pytest.mark.slow
def test_a_block_sees_what_is_strictly_before_its_anchor(tiny):
    """The state of the anchor itself is not known yet when the block is drafted."""
    method, base = PLAIN, tiny.base
    trainable, text = trained(method, base), sequence(tiny, 16)
    _, _, read = read_layers(base, text, method.tapped)
    memory = method.remember(trainable, base, read, jnp.arange(16)[None])
    anchors, positions = text[:, 8:9], jnp.array([[8]])
    newest = read[3][:, 7:8]
    expected = method.fill(trainable, base, anchors, positions, newest, memory, 3)
    for slot, sees in ((7, True), (8, False), (9, False)):
        other = jax.tree.map(lambda x, slot=slot: x.at[:, :, slot].add(1.0), memory)
        states = method.fill(trainable, base, anchors, positions, newest, other, 3)
        assert bool(jnp.any(jnp.abs(states - expected) > 1e-5)) == sees


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"qkv_bias": True}, {"head_norms": True}],
    ids=["plain", "bias", "norms"],
)
def test_a_copied_layer_is_the_bases(tiny, changes):
    """With the base's own normed states as its context."""
    config = dataclasses.replace(TINY, **changes)
    base = random_base(config)

    @quick_jit
    def both(base, tokens):
        x, angles = base.embed(tokens), rope_angles(config, jnp.arange(9)[None])
        params, layer = copied_layer(config, base.params["layers_2"]), DraftLayer(config)
        normed = layer.apply({"params": params}, x[:, :6], method=lambda layer, x: layer.attention_norm(x))
        cached = layer.apply({"params": params}, normed, angles[:, :6], method="remember")
        rows = (x[:, 6:], angles[:, 6:], causal_mask(1, 3), cached, jnp.ones((1, 1, 6), bool))
        return layer.apply({"params": params}, *rows), base.rows(x, causal_context(1, 9), layers=(2, 3))[0][:, 6:]

    np.testing.assert_allclose(*both(base, sequence(tiny, 9)), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        dataclasses.replace(PLAIN, start="random", mask_token=15),
        pytest.param(dataclasses.replace(MARKOV, alignment=1.0), marks=pytest.mark.exhaustive),
        TABLES,
        DFLASH2,
    ],
    ids=settings,
)
def test_training_moves_every_part_and_learns(tiny, method):
    batch = batch_of(sequence(tiny, 24), [[2, 5, 8, 11, 14]])
    trainable = trained(method, tiny.base)
    (first, metrics), gradient = loss_and_gradient(method, trainable, tiny.base, 0, batch)
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert float(jnp.max(jnp.abs(leaf))) > 0, path
    of_head = set() if method.confidence_head == "none" else {"confidence", "overlap"}
    assert set(metrics) == {"top1@1", "top1@2", "top1@3"} | of_head
    for _ in range(20):
        _, gradient = loss_and_gradient(method, trainable, tiny.base, 0, batch)
        trainable = jax.tree.map(lambda x, g: x - 0.05 * jnp.sign(g) * jnp.minimum(jnp.abs(g), 1), trainable, gradient)
    (last, _), _ = loss_and_gradient(method, trainable, tiny.base, 0, batch)
    assert last < 0.8 * first


@pytest.mark.slow
def test_a_learned_vocabulary_teaches_its_tokens_alone(tiny):
    """Logits of other tokens are -inf, and where the text has one of these there is nothing to learn."""
    ids, text = jnp.array([7, 0, 3, 12, 5, 9]), sequence(tiny, 24)
    base, method = tiny.base.drafting(ids), dataclasses.replace(MARKOV, vocabulary=6)
    trainable = trained(method, tiny.base)
    whole = predict(method, trainable, tiny.base, batch_of(text, [[3, 7, 9]]))
    part = predict(method, trainable, base, batch_of(text, [[3, 7, 9]]))
    np.testing.assert_allclose(part[..., ids], whole[..., ids], atol=1e-4)
    assert np.isneginf(np.delete(np.asarray(part), ids, axis=-1)).all()
    outside = text.at[:, 12:].set(1)  # of the distances 2 and 3 at 9
    losses = [loss_and_gradient(method, trainable, base, 0, batch_of(t, [[9]]))[0][0] for t in (outside, text)]
    assert np.isfinite(losses).all()
    none = loss_and_gradient(method, trainable, base, 0, batch_of(text.at[:, 11:].set(1), [[9]]))
    assert float(none[0][0]) == 0


def test_taps_are_spread_as_in_the_paper():
    """Outputs 1, 9, 17, 25 and 33 of Qwen3-8B's 36 layers; here they are counted before the layer that follows."""
    assert DFlash(taps_count=5).taps(36) == (2, 10, 18, 26, 34)
    assert DFlash(taps_count=3).taps(30) == (2, 15, 28)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DFlash(block=0), "block must be 1 to 16, got 0"),
        (lambda: DFlash(block=17), "block must be 1 to 16, got 17"),
        (lambda: DFlash(block=1, sample_from_anchor=False), "block must be 2 to 16, got 1"),
        (lambda: DFlash(layers=0), "layers must be at least 1, got 0"),
        (lambda: DFlash(taps_count=0), "taps_count must be at least 1"),
        (lambda: DFlash(markov_rank=-1), "markov_rank must be at least 0, got -1"),
        (lambda: DFlash(mask_token=-2), "mask_token must be at least -1, got -2"),
        (
            lambda: abstract_trainable(DFlash(selector_rank=2, selector_width=17), TINY),
            "selector_width must be 1 to 16, the tokens of this base, got 17",
        ),
        (
            lambda: abstract_trainable(DFlash(mask_token=16), TINY),
            "mask_token must be -1 to 15, the tokens of this base, got 16",
        ),
        (
            lambda: abstract_trainable(DFlash(shapes=dataclasses.replace(TINY, hidden_size=64)), TINY),
            "dflash: its width must be the base's 32, got 64",
        ),
        (
            lambda: abstract_trainable(DFlash(shapes=dataclasses.replace(TINY, num_heads=2)), TINY),
            "dflash: layers of other shapes than the base's cannot start as these; use start random",
        ),
        (lambda: DFlash(vocabulary=-1), "vocabulary must be at least 0, got -1"),
        (lambda: DFlash(tapped=(2, 2)), "tapped names a layer twice, got 2, 2"),
        (lambda: DFlash(start="warm"), "start must be one of base, random"),
        (lambda: DFlash(decay=1.5), "decay must be above 0 and at most 1"),
        (lambda: DFlash(labels=0.0), "not both 0"),
        (
            lambda: abstract_trainable(DFlash(tapped=(1, 4)), TINY),
            "tapped must be 0 to 3, the layers of this base, got 1, 4",
        ),
        (lambda: abstract_trainable(DFlash(layers=4), TINY), "4 layers cannot be copies of the 3 that this base has"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_tree_deeper_than_the_block_is_refused(tiny):
    drafter = untrained_drafter(MARKOV, tiny, from_paths(PATHS))
    with pytest.raises(UserError, match="a tree of dflash is 1 to 3 candidates deep, not 4"):
        drafter.with_tree([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])


def test_tables_of_few_tokens_draft_no_others(tiny):
    method = dataclasses.replace(TABLES, vocabulary=6)
    trainable = jax.eval_shape(lambda base: method.init(jax.random.key(0), base), tiny.base)
    assert trainable["markov"]["before"]["table"].shape == (16, 4)
    assert trainable["markov"]["after"]["kernel"].shape == (4, 6)
    trainable = trained(method, tiny.base)
    for base, got in ((tiny.base, "0, all"), (tiny.base.drafting(jnp.arange(8)), "8")):
        with pytest.raises(UserError, match=f"Markov term is for 6 tokens: draft-vocabulary must be 1 to 6, not {got}"):
            method.prepare(trainable, base)
