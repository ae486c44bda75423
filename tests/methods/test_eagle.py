"""EAGLE-3: what is trained decodes, its memory is exact, and its layer is the paper's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Batch, ReadChunk, abstract_trainable
from jaxspec.decoding.tree import select_trees
from jaxspec.drafters.adapter import Adapter, load_adapter, save_adapter
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import Eagle
from jaxspec.model.rows import read_layers
from jaxspec.trees import chain
from tests.helpers.decoding import begin
from tests.helpers.drafting import drafting_of
from tests.helpers.marks import EXHAUSTIVE
from tests.helpers.methods import batch_of, predict, sequence, trained
from tests.helpers.model import plain, quick_jit, random_base
from tests.helpers.tiny import TINY, make_prompts

EAGLE = Eagle(depth=3, unroll=3, reads=(1, 3), even=True)
OWN = dataclasses.replace(EAGLE, vocabulary=6, own_head=True)
SHAPES = dataclasses.replace(TINY, num_heads=2, num_kv_heads=1, head_dim=6, intermediate_size=40, rope_theta=500.0)
# EAGLE 3.1's norms and those of the package speculators, a layer and embeddings of its own
NORMED = Eagle(
    **dict(depth=3, unroll=3, reads=(1, 3), fc_norm=True, norm_output=True, norm_before_residual=True),
    **dict(own_embedding=True, shapes=SHAPES, start="random"),
)
IDS = np.array([7, 0, 3, 12, 5, 9, 1, 2], np.int32)  # by frequency
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]


def drafter_of(method, model, tree=PATHS, count=None):
    """A drafter with random weights that is sure enough of itself to draft deep."""
    info = {"tree": [list(path) for path in PATHS]}
    return make_drafter(Adapter(method, sure(method, model), model.fingerprint, info, IDS), model, tree, count)


def sure(method, model):
    """Random weights whose distributions are far from flat."""
    trainable = trained(method, model.base)
    return trainable | {"norm": {"scale": 3 * trainable["norm"]["scale"]}}


def run(drafter, prompts, steps):
    """The state of the loop after some steps."""
    decoding, state = begin(drafter, prompts, 60, SamplingConfig(), seeds=3, chunk=8)
    return decode(decoding, state, np.int32(steps))


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        pytest.param(EAGLE, PATHS, marks=pytest.mark.slow, id="fixed"),
        pytest.param(EAGLE, "best:9", id="best"),
        pytest.param(NORMED, "best:9", marks=pytest.mark.slow, id="normed"),
    ],
)
def test_the_draft_is_what_training_would_predict(tiny, method, tree):
    """Three levels on real and own states: every node is among the best by the logits of training for its path."""
    [prompt], model = make_prompts(1), dataclasses.replace(tiny, eos=())
    state = run(drafter_of(method, model, tree), [prompt], 4)
    text = [*prompt, *np.asarray(state.tokens)[0, : int(state.counts[0])].tolist()]
    draft, last = jax.tree.map(lambda x: np.asarray(x)[0], state.draft), len(text) - 1
    assert draft.valid.all() and draft.tree.depth.max() == 3 and draft.tokens[0] == text[-1]
    paths = [np.flatnonzero(above)[np.argsort(draft.tree.depth[above])] for above in draft.tree.ancestors]
    tokens = np.zeros((len(paths), 64), np.int32)
    for row, path in enumerate(paths):
        known = [*text[:-1], *draft.tokens[path]]
        tokens[row, : len(known)] = known
    batch = Batch(tokens, np.full(len(paths), 64), np.ones(len(paths), int), np.full((len(paths), 1), last - 1))
    log_p = np.asarray(jax.nn.log_softmax(predict(method, sure(method, tiny), tiny.base, batch)[:, 0]))
    for node, path in list(enumerate(paths))[1:]:
        at = log_p[node, len(path) - 2]  # [V]
        if tree == PATHS:
            assert np.argsort(-at)[draft.tree.rank[node]] == draft.tokens[node]
        else:
            whole = sum(log_p[node, i][draft.tokens[n]] for i, n in enumerate(path[1:]))
            np.testing.assert_allclose(draft.log_p[node], whole, atol=1e-3)


def test_the_most_probable_nodes_of_each_level_expand(tiny):
    """EAGLE-2, 4.1: as many as the tree has inner nodes there; the eight best of all their children are drafted."""
    model = dataclasses.replace(tiny, eos=())
    drafter, [prompt] = drafter_of(EAGLE, model, "best:9"), make_prompts(1)
    state = run(drafter, [prompt], 0)
    trainable = sure(EAGLE, tiny)

    def log_p(path):  # of what follows a path of tokens behind the prompt and its first token
        text = [*prompt, int(state.tokens[0, 0]), *path]
        tokens = np.array([(text + [0] * 64)[:64]])
        batch = Batch(tokens, np.array([64]), np.array([1]), np.array([[len(prompt) - 1]]))
        return np.asarray(jax.nn.log_softmax(predict(EAGLE, trainable, tiny.base, batch)[0, 0, len(path)]))

    level, found = {(): 0.0}, {}
    for width in (1, 2, 2):  # inner nodes of PATHS
        expand = sorted(level, key=lambda path: -level[path])[:width]
        level = {(*path, t): level[path] + p for path in expand for t, p in enumerate(log_p(path))}
        found |= level
    best = sorted(found.values(), reverse=True)[:8]
    np.testing.assert_allclose(np.asarray(state.draft.log_p)[0, 1:], best, atol=1e-3)


@pytest.mark.slow
def test_with_confidence_it_follows_only_probable_paths(tiny):
    """Without it every step drafts all levels; the first one costs no pass."""
    model, prompts = dataclasses.replace(tiny, eos=()), make_prompts(3)
    careful = drafter_of(dataclasses.replace(EAGLE, confidence=0.3), model, "best:9")
    answers = generate(careful, prompts, 25, batch_size=3)
    assert [a.tokens for a in answers] == [a.tokens for a in generate(autoregressive(model), prompts, 25)]
    assert all(a.offered[0] == a.steps for a in answers)
    assert 0 < sum(a.offered[1] for a in answers) < sum(a.steps for a in answers)


@pytest.mark.slow
def test_it_starts_as_the_bases_last_layer(tiny):
    """On the states before it alone: the base's own distribution of the token after, which it has yet to look past."""
    method, batch = Eagle(reads=(TINY.num_layers - 1,), depth=1), batch_of(sequence(tiny), [[3, 8, 15]])
    base = random_base(dataclasses.replace(TINY, head_norms=True))
    logits = predict(method, method.init(jax.random.key(0), base), base, batch)
    np.testing.assert_allclose(logits[0, :, 0], plain(base, batch.tokens)[0, batch.points[0]], atol=1e-4)


def test_a_prediction_reads_the_text_up_to_its_own_token(tiny):
    """At distance d behind point p the d tokens from p + 1 on, whatever other points there are."""
    tokens, trainable, at = sequence(tiny), trained(EAGLE, tiny.base), 5
    before = predict(EAGLE, trainable, tiny.base, batch_of(tokens, [[2, at, 9]]))[0, 1]  # [M, V]
    others = predict(EAGLE, trainable, tiny.base, batch_of(tokens, [[4, at, 6]]))[0, 1]
    np.testing.assert_allclose(before, others, atol=1e-5)
    for later in range(at + 1, at + 5):
        changed = tokens.at[0, later].add(1) % 16
        moved = jnp.any(predict(EAGLE, trainable, tiny.base, batch_of(changed, [[2, at, 9]]))[0, 1] != before, axis=-1)
        np.testing.assert_array_equal(moved, np.arange(1, 4) >= later - at)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(EAGLE, id="whole", marks=EXHAUSTIVE),
        pytest.param(dataclasses.replace(OWN, features=0.3), id="own_head"),
        pytest.param(NORMED, id="normed"),
        pytest.param(dataclasses.replace(EAGLE, norm_before_fc=True), id="norm_before_fc", marks=EXHAUSTIVE),
    ],
)
def test_training_moves_every_part(tiny, method):
    base = jax.jit(type(tiny.base).drafting)(tiny.base, IDS[: method.vocabulary]) if method.vocabulary else tiny.base
    tokens = jnp.concatenate([sequence(tiny, 18, seed) for seed in (0, 1)])
    batch, trainable = batch_of(tokens, [[2, 5, 9, 11], [3, 4, 12, -1]], [18, 14]), trained(method, base)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(trainable, state):
        found, gradient = jax.value_and_grad(lambda t: method.loss(t, base, batch), has_aux=True)(trainable)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(trainable, updates), state, found, gradient

    state, losses = optimizer.init(trainable), []
    for _ in range(12):
        trainable, state, (loss, metrics), gradient = update(trainable, state)
        for name, leaf in jax.tree.leaves_with_path(gradient):
            assert np.max(np.abs(leaf)) > 0, name
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert set(metrics) == {"top1@1", "top1@2", "top1@3"}


@pytest.mark.slow
def test_the_loss_by_hand(tiny):
    """KL to the base's softmax over the draft vocabulary, where the base's best token lies in it; half of the next.

    HASS adds the cross-entropy with the base's two likeliest tokens.
    """
    method = dataclasses.replace(OWN, decay=0.5)
    base = tiny.base.drafting(jnp.asarray(IDS[:6]))
    tokens, points = sequence(tiny, 24), [[2, 5, 9, 14, 21, -1]]  # the last point's third token lies beyond the text
    batch, trainable = batch_of(tokens, points), trained(method, base)
    student = np.asarray(predict(method, trainable, base, batch), np.float64)[0]
    assert np.isneginf(np.delete(student, IDS[:6], axis=-1)).all()
    teacher = np.asarray(plain(tiny.base, tokens), np.float64)[0]
    expected, likeliest, left_out = np.zeros(3), np.zeros(3), 0
    for d in (1, 2, 3):
        each, best = [], []
        for g, point in enumerate(points[0][:5]):
            if point + d + 1 < 24:
                row = teacher[point + d]
                p, q = (np.exp(x[IDS[:6]]) / np.exp(x[IDS[:6]]).sum() for x in (row, student[g, d - 1]))
                covered = np.argmax(row) in IDS[:6]
                each.append(np.sum(p * np.log(p / q)) if covered else 0.0)
                best.append(-np.sum((p * np.log(q))[np.argsort(-p)[:2]]) if covered else 0.0)
                left_out += not covered
        expected[d - 1], likeliest[d - 1] = (0.5 ** (d - 1) * np.mean(x) for x in (each, best))
    assert len(each) == 4 and 0 < left_out < 14
    both = (method, dataclasses.replace(method, top_k=2))
    losses = quick_jit(lambda trainable, base, batch: [m.loss(trainable, base, batch)[0] for m in both])
    by_hand = [expected.sum(), (expected + likeliest).sum()]
    np.testing.assert_allclose(losses(trainable, base, batch), by_hand, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SamplingConfig(), marks=EXHAUSTIVE), SamplingConfig(1.2, top_k=7)],
    ids=["greedy", "sampling"],
)
def test_its_own_projection_drafts_its_own_tokens(tiny, sampling):
    """Or fewer of them: nothing else is drafted, and the text stays the base's."""
    prompts, settings = make_prompts(8), {"sampling": sampling, "seed": 3}
    ours = generate(drafter_of(OWN, tiny, PATHS, 4), prompts, 24, batch_size=4, **settings)
    assert [a.tokens for a in ours] == [a.tokens for a in generate(autoregressive(tiny), prompts, 24, **settings)]
    taken = {token for a in ours for token, drafted in zip(a.tokens, a.drafted, strict=True) if drafted}
    assert taken and taken <= set(IDS[:4].tolist())


def test_a_tree_deeper_than_it_has_learned_is_allowed_with_a_warning(tiny):
    method = Eagle(depth=3, unroll=2)
    assert drafter_of(method, tiny, "chain:3").note == "warning: a tree of 3 levels, and eagle has learned 2"
    assert not drafter_of(method, tiny, "chain:2").note and not drafter_of(method, tiny, None).note


def test_settings_that_make_no_sense(tiny, tmp_path):
    for settings, message in [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"unroll": 0}, "unroll must be at least 1, got 0"),
        ({"vocabulary": -1}, "vocabulary must be at least 0, got -1"),
        ({"features": -0.5}, "features must be at least 0, got -0.5"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"reads": (2, 1)}, r"reads must be different and in ascending order, got \[2, 1\]"),
        ({"decay": 0}, "decay must be above 0"),
        ({"confidence": 1}, "confidence must be at least 0 and below 1, got 1"),
        ({"start": "zero"}, "start must be one of base, random, got 'zero'"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm exclude each other"),
    ]:
        with pytest.raises(UserError, match=message):
            Eagle(**settings)
    with pytest.raises(UserError, match=r"eagle: reads must be 0 to 3 on this base, got \[1, 4\]"):
        abstract_trainable(Eagle(reads=(1, 4)), TINY)
    with pytest.raises(UserError, match="its width must be the base's 32, got 64"):
        abstract_trainable(Eagle(shapes=dataclasses.replace(TINY, hidden_size=64)), TINY)
    with pytest.raises(UserError, match="layers of other shapes than the base's cannot start as these; use start"):
        abstract_trainable(Eagle(shapes=SHAPES), TINY)
    with pytest.raises(UserError, match="projection is for 6 tokens: draft-vocabulary must be 1 to 6, not 0, all"):
        _ = drafter_of(OWN, tiny, PATHS, 0).on_device
    with pytest.raises(UserError, match="projection is for 6 tokens: draft-vocabulary must be 1 to 6, not 8"):
        _ = drafter_of(OWN, tiny, PATHS, 8).on_device
    one = dataclasses.replace(EAGLE, reads=(3,))
    save_adapter(tmp_path, Adapter(EAGLE, one.init(jax.random.key(0), tiny.base), tiny.fingerprint, {}))
    with pytest.raises(UserError, match=r"'fc/kernel' has shape \[32, 32\], eagle on this base needs \[64, 32\]"):
        load_adapter(tmp_path, TINY)


def in_numpy(*given):
    """The layer with every key and mask written out."""
    return Reference(*given)


def in_torch(*given):
    """The layer of PyTorch's own modules."""
    pytest.importorskip("torch")
    from tests.helpers.torch_eagle import EagleLayer

    return EagleLayer(TINY, *given).unrolled


@pytest.mark.parametrize("make", [in_numpy, pytest.param(in_torch, marks=pytest.mark.slow)])
def test_against_a_reference(tiny, make):
    """Three unrolled steps and the cache, in double precision."""
    trainable, tokens = trained(EAGLE, tiny.base), sequence(tiny, 24)
    _, _, states = jax.jit(read_layers, static_argnums=2)(tiny.base, tokens, (1, 3))
    reference = make(trainable, tiny.params, [np.asarray(states[layer])[0] for layer in (3, 1)])
    logits, keys, values = reference(np.asarray(tokens)[0], 3)

    points = list(range(2, 20))
    ours = predict(EAGLE, trainable, tiny.base, batch_of(tokens, [points]))[0]  # [G, M, V]
    for unroll in range(3):
        np.testing.assert_allclose(ours[:, unroll], logits[unroll][points], atol=1e-4)

    length, tree, memory = 20, select_trees(chain(3).arrays(0), jnp.zeros(1, int)), EAGLE.init_state(tiny.base, 1, 32)
    context = drafting_of(tree, tokens[:, length], [length], trainable, tiny.base, width=16)
    for first in (0, 8, 16):
        part, taps = jnp.array([min(8, length - first)]), {k: v[:, first : first + 8] for k, v in states.items()}
        text = tokens[:, first : min(first + 8, length) + 1]
        chunk = ReadChunk(jnp.pad(text, ((0, 0), (0, 9 - text.shape[1]))), taps[3], jnp.array([first]), part, taps)
        memory = quick_jit(EAGLE.observe)(context, chunk, memory)
    np.testing.assert_allclose(memory["cache"].keys[0][0, :, :length], keys[:, :length], atol=1e-4)
    np.testing.assert_allclose(memory["cache"].values[0][0, :, :length], values[:, :length], atol=1e-4)

    offer, text = quick_jit(EAGLE.offer)(context, memory), np.asarray(tokens)[0].copy()
    for level in range(3):  # behind the best candidate of the level above
        expected = jax.nn.log_softmax(reference(text, level + 1)[0][level][length - 1])
        best = np.argsort(-expected)
        np.testing.assert_array_equal(offer.tokens[0, level], best)
        np.testing.assert_allclose(offer.log_p[0, level], expected[best], atol=1e-4)
        text[length + level + 1] = best[0]


class Reference:
    """EAGLE-3's layer over a whole text: all rows of every unroll, each with the keys and masks of all before."""

    def __init__(self, trainable, params, states):
        self.trainable, self.params, self.states = (
            jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (trainable, params, states)
        )

    def __call__(self, tokens, count):
        """Logits [count][T, V], and the keys and values [K, T, Dh] of the first unroll."""
        t, layer = self.trainable, self.trainable["layer"]
        T, H, K, Dh = len(tokens), TINY.num_heads, TINY.num_kv_heads, TINY.head_dim
        high, low = self.states
        low = low * np.sqrt(np.mean(high**2, -1, keepdims=True) / np.mean(low**2, -1, keepdims=True))
        h = np.concatenate([high, low], -1) @ t["fc"]["kernel"]
        logits, keys, values, masks = [], [], [], []
        for unroll in range(count):
            embedding = self.params["embedding"][np.roll(tokens, -1 - unroll)]
            both = [norm(embedding, t["embedding_norm"]), norm(h, layer["attention_norm"])]
            qkv = (np.concatenate(both, -1) @ layer["attention"]["qkv"]["kernel"]).reshape(T, K, H // K + 2, Dh)
            position = np.arange(T) + unroll
            q = rotated(qkv[:, :, :-2].reshape(T, H, Dh), position)
            keys.append(np.repeat(rotated(qkv[:, :, -2], position), H // K, axis=1))
            values.append(np.repeat(qkv[:, :, -1], H // K, axis=1))
            masks.append(np.eye(T, dtype=bool) if unroll else np.tri(T, dtype=bool))
            scores = np.einsum("qhd,khd->hqk", q, np.concatenate(keys)) / np.sqrt(Dh)
            weights = np.where(np.concatenate(masks, 1), np.exp(scores), 0)
            mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), np.concatenate(values))
            h = h + mixed.reshape(T, -1) @ layer["attention"]["o"]["kernel"]
            x = norm(h, layer["mlp_norm"])
            gate = x @ layer["mlp"]["gate"]["kernel"]
            gated = gate / (1 + np.exp(-gate)) * (x @ layer["mlp"]["up"]["kernel"])
            h = h + gated @ layer["mlp"]["down"]["kernel"]
            logits.append(norm(h, t["norm"]) @ self.params["lm_head"])
        return logits, *(x[0][:, :: H // K].swapaxes(0, 1) for x in (keys, values))


def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + TINY.rms_norm_eps) * scale["scale"]


def rotated(x, positions):
    """[T, heads, Dh]: the halves of every head as the two sides of complex numbers, turned by their positions."""
    half = TINY.head_dim // 2
    turn = np.exp(1j * positions[:, None, None] * TINY.rope_theta ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], -1)
