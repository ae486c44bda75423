"""What all methods with heads promise: they start as the base, what is trained decodes, and their memory is exact."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Batch
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, generate_many
from jaxspec.methods import PPD, Amphista, BiTA, HiddenTransfer, Hydra, Medusa
from jaxspec.model.attention import causal_context, causal_mask, normalised
from jaxspec.model.base import Base
from jaxspec.model.layers import Layer
from jaxspec.model.rope import rope_angles
from jaxspec.trees import from_paths
from jaxspec.trees.arrays import build_tree, pad_tree, stack_trees
from tests.helpers.decoding import begin
from tests.helpers.marks import EXHAUSTIVE, slow_ones
from tests.helpers.methods import predict, settings, trained, untrained_drafter
from tests.helpers.model import plain, run_layers
from tests.helpers.tiny import TINY, make_prompts, make_tiny

METHODS = [
    Medusa(),
    Medusa(lm_head="full", blocks=2),
    Medusa(lm_head="low_rank", rank=3),
    Hydra(),
    Hydra(prefix_attention=True, blocks=2, lm_head="low_rank", rank=2),
    Hydra(prefix_attention=True, prefix_norm=True, blocks=2, lm_head="full", even=False, bias=True),
    Amphista(),
    Amphista(lm_head="full", self_attention_layers=2),
    Amphista(adaptation_layers=1, heads=3, position_encoding=False),
    Amphista(adaptation_layers=0, self_attention_layers=0, lm_head="low_rank", rank=2),
    Amphista(sampled_token=False, heads=2, blocks=2),
]
PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)]


FAST = [METHODS[2]]  # what Hydra and Amphista add is computed by hand below
SLOW = [settings(METHODS[i]) for i in (4, 7)]  # the others are exhaustive
every_method = pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(m, id=settings(m)) for m in FAST),
        *slow_ones([m for m in METHODS if m not in FAST], SLOW, settings),
    ],
)


def two_texts(tiny, length=18, seed=0):
    tokens = jnp.array(np.random.default_rng(seed).integers(0, tiny.config.vocab_size, (2, length)), jnp.int32)
    lengths, points = jnp.array([length, length - 4]), jnp.array([[2, 5, 9, 11], [3, 4, 12, -1]])
    return Batch(tokens, lengths, jnp.ones(2, jnp.int32), points)


@every_method
def test_new_heads_give_the_bases_own_distribution(tiny, method):
    """Zero blocks, zero layers and projections that start as the base's: every head predicts the next token."""
    base, batch = Base(tiny.params, tiny.decoder), two_texts(tiny)
    logits = predict(method, method.init(jax.random.key(0), base), base, batch)
    expected = plain(base, batch.tokens)[jnp.arange(2)[:, None], batch.points]  # [B, G, V]
    if getattr(method, "prefix_norm", False):  # which normalises what the base's norm has scaled
        states = run_layers(base, base.embed(batch.tokens), causal_context(*batch.tokens.shape))[0]
        again = normalised(base.normed(states), jnp.ones(32), TINY.rms_norm_eps)
        expected = base.project(again)[jnp.arange(2)[:, None], batch.points]
    for head in range(method.heads):
        np.testing.assert_allclose(logits[0, :, head], expected[0], atol=1e-4)
        np.testing.assert_allclose(logits[1, :3, head], expected[1, :3], atol=1e-4)


@every_method
def test_a_prediction_depends_on_nothing_later_but_what_the_method_reads(tiny, method):
    """Heads at p see tokens up to p; the sampled token p + 1 or the path beyond only where the paper says so."""
    base, batch = Base(tiny.params, tiny.decoder), two_texts(tiny)
    trainable, at = trained(method, base), 5
    before = predict(method, trainable, base, batch)[0, 1]  # [K, V]
    for later in range(at + 1, at + 6):
        changed = dataclasses.replace(batch, tokens=batch.tokens.at[0, later].add(1) % 16)
        moved = jnp.any(predict(method, trainable, base, changed)[0, 1] != before, axis=-1)
        if isinstance(method, Hydra):  # the head at distance d reads the d tokens from p + 1 on
            reads = np.arange(1, method.heads + 1) >= later - at
        else:
            sampled = getattr(method, "sampled_token", False) and method.adaptation_layers > 0
            reads = np.full(method.heads, sampled and later == at + 1)
        np.testing.assert_array_equal(moved, reads)


@every_method
def test_training_moves_every_part_and_nothing_else(tiny, method):
    base, batch = Base(tiny.params, tiny.decoder), two_texts(tiny)
    method = dataclasses.replace(method, alignment=1.0)
    trainable = trained(method, base)
    frozen = jax.tree.map(np.array, base.params)

    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(trainable, params, state):
        of = jax.value_and_grad(lambda t: method.loss(t, base.replace(params=params), batch), has_aux=True)
        found, gradient = of(trainable)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(trainable, updates), state, found, gradient

    state, losses = jax.jit(optimizer.init)(trainable), []
    for _ in range(12):
        trainable, state, (loss, metrics), gradient = update(trainable, base.params, state)
        for name, leaf in jax.tree.leaves_with_path(gradient):  # every head of what is stacked by heads, too
            stacked = leaf.shape[0] == method.heads and leaf.ndim > 1
            size = np.max(np.abs(leaf), axis=tuple(range(1, leaf.ndim)) if stacked else None)
            assert np.all(size > 0), name
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert set(metrics) == {f"top1@{d}" for d in range(1, method.heads + 1)}
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.tree.map(np.array, base.params))


def numpy_of(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def silu(x):
    return x / (1 + np.exp(-x))


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + TINY.rms_norm_eps) * scale


def by_hand(tiny, method, seed=0):
    """A batch, the trained pytree, hidden states before and after the final norm, embeddings and what was predicted."""
    base, batch = Base(tiny.params, tiny.decoder), two_texts(tiny, seed=seed)
    trainable = trained(method, base)
    logits = np.asarray(predict(method, trainable, base, batch))
    hidden = numpy_of(run_layers(base, base.embed(batch.tokens), causal_context(*batch.tokens.shape))[0])
    parameters = numpy_of(tiny.params)
    normed = rms_norm(hidden, parameters["norm"]["scale"])
    return batch, numpy_of(trainable), hidden, normed, parameters["embedding"], parameters["lm_head"], logits


def test_medusa_by_hand(tiny):
    """Section 2.1.1, every head with its own weights."""
    method = Medusa(heads=3, blocks=2, lm_head="full")
    batch, t, _, normed, _, _, logits = by_hand(tiny, method)
    for g, point in enumerate(np.asarray(batch.points)[0]):
        for k in range(3):
            x = normed[0, point]
            for block in range(2):
                x = x + silu(x @ t["blocks"][k, block] + t["bias"][k, block])
            np.testing.assert_allclose(logits[0, g, k], x @ t["lm_head"][k], rtol=1e-3, atol=1e-3)


def test_hydra_by_hand(tiny):
    """Head d on the state and the d tokens after it, scaled to its size; its first block reads them all."""
    method = Hydra(heads=3, blocks=2, lm_head="low_rank", rank=2)
    batch, t, _, normed, embedding, lm_head, logits = by_hand(tiny, method)
    tokens = np.asarray(batch.tokens)[0]
    for g, point in enumerate(np.asarray(batch.points)[0]):
        for d in (1, 2, 3):
            h = normed[0, point]
            read = [embedding[tokens[point + i]] for i in range(1, d + 1)]
            read = [e * np.sqrt(np.mean(h * h) / np.mean(e * e)) for e in read]
            x = np.concatenate([h, *read])
            x = x @ t[f"first{d}"]["kernel"] + silu(x @ t[f"first{d}"]["inner"]["kernel"])
            x = x + silu(x @ t["blocks"][d - 1, 0] + t["bias"][d - 1, 0])
            expected = x @ lm_head + x @ t["down"][d - 1] @ t["up"][d - 1]
            np.testing.assert_allclose(logits[0, g, d - 1], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_dropout_leaves_values_out_of_updates_alone(tiny):
    """A new head of one block passes on the state, which is dropped from twice; its projection shows half of it."""
    method, base, batch = Hydra(heads=2, lm_head="full", dropout=0.2), tiny.base, two_texts(tiny)
    state, path = (
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 500, 32)), jnp.float32),
        jnp.zeros((2, 500, 2), int),
    )
    trainable = method.init(jax.random.key(0), base) | {"lm_head": jnp.tile(jnp.eye(32, 16), (2, 1, 1))}
    whole, once, again, other = (
        np.asarray(method.along(trainable, base, (state,), path, seeds))
        for seeds in (None, *jnp.array([[1, 2], [2, 1], [1, 3]], jnp.uint32))
    )
    kept = once != 0
    np.testing.assert_allclose(once[kept], whole[kept] / 0.8**2, rtol=1e-5)
    assert np.all(abs(np.mean(kept, axis=(1, 3)) - 0.8**2) < 0.02)  # of every text and head
    assert not np.array_equal(kept[:, :, 0], kept[:, :, 1]) and not np.array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(once[0] != 0, again[1] != 0)  # a seed is a text's own
    np.testing.assert_array_equal(once[0], other[0])

    seeded, plain = batch.replace(seeds=jnp.array([1, 2], jnp.uint32)), dataclasses.replace(method, dropout=0.0)
    losses = [m.loss(trainable, base, b)[0] for m, b in ((method, seeded), (method, batch), (plain, seeded))]
    assert losses[0] != losses[1] == losses[2]
    np.testing.assert_array_equal(predict(method, trainable, base, seeded), predict(plain, trainable, base, batch))


def test_amphista_by_hand(tiny):
    """Equations 1 to 6 with three heads: the first on stage one, the others on stage two, and all see all."""
    method = Amphista(heads=3)
    batch, t, hidden, _, embedding, lm_head, logits = by_hand(tiny, method)
    base, scale = Base(tiny.params, tiny.decoder), np.asarray(tiny.params["norm"]["scale"], np.float64)
    tokens, length = np.asarray(batch.tokens)[0], batch.tokens.shape[1]
    x, stages = hidden[0], []
    for i in (1, 2):
        e = embedding[np.roll(tokens, -1)]
        e = e * np.sqrt(np.mean(x * x, -1, keepdims=True) / np.mean(e * e, -1, keepdims=True))
        joint = jnp.asarray(np.concatenate([x, e], -1) @ t[f"stage{i}"]["kernel"], jnp.float32)[None]
        layer = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), t[f"stage{i}"]["layer"])
        angles = rope_angles(TINY, jnp.arange(length)[None])
        x = np.asarray(Layer(TINY).apply({"params": layer}, joint, angles, causal_mask(1, length))[0][0], np.float64)
        stages.append(rms_norm(x, scale))
    attention = t["self_attention1"]
    for g, point in enumerate(np.asarray(batch.points)[0]):
        h = np.stack([stages[0][point], stages[1][point], stages[1][point]])
        h = h + silu(np.einsum("kd,kde->ke", h, t["blocks"][:, 0]) + t["bias"][:, 0]) + t["positions"]
        q, k, v = heads_of(rms_norm(h, attention["norm"]["scale"]) @ attention["attention"]["qkv"]["kernel"])
        weights = np.exp(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(TINY.head_dim))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(3, -1)
        expected = (h + mixed @ attention["attention"]["o"]["kernel"]) @ lm_head
        np.testing.assert_allclose(logits[0, g], expected, rtol=2e-3, atol=2e-3)
    assert base.vocab_size == logits.shape[-1]


def heads_of(qkv):
    """Queries, keys and values [K, H, Dh] of one product: per key/value head its queries, its key, its value."""
    grouped = qkv.reshape(len(qkv), TINY.num_kv_heads, -1, TINY.head_dim)
    shape = (len(qkv), TINY.num_heads, TINY.head_dim)
    k, v = (np.repeat(grouped[:, :, None, i], TINY.num_heads // TINY.num_kv_heads, 2) for i in (-2, -1))
    return grouped[:, :, :-2].reshape(shape), k.reshape(shape), v.reshape(shape)


def run(drafter, prompts, steps, sampling=SamplingConfig(), chunk=32):
    """The state of the loop after some steps."""
    decoding, state = begin(drafter, prompts, 60, sampling, seeds=3, chunk=chunk)
    return decode(decoding, state, np.int32(steps))


def on_paths(method, model, trainable, paths=PATHS):
    """A drafter with the paths that the method reaches."""
    plan = from_paths([path for path in paths if len(path) <= method.heads])
    return untrained_drafter(method, dataclasses.replace(model, eos=()), plan, trainable)


@functools.partial(jax.jit, static_argnums=0)
def recomputed(method, trainable, base, tokens):
    """What the method's own layers say of a whole text [1, T] at once: their features and cache."""
    context = causal_context(1, tokens.shape[1] - 1)
    hidden, _ = base.rows(base.embed(tokens[:, :-1]), context)
    return method.adapt(trainable, base, hidden, tokens[:, 1:], context)


OWN_LAYERS = [m for m in METHODS if m.own_layers]


@pytest.mark.parametrize(
    ("method", "chunk"),
    [
        pytest.param(Amphista(), 8, id="amphista-8", marks=pytest.mark.slow),
        *(
            pytest.param(m, 32, id=settings(m), marks=pytest.mark.slow if settings(m) in SLOW else EXHAUSTIVE)
            for m in OWN_LAYERS
        ),
    ],
)
def test_the_drafters_own_cache_is_what_its_tokens_make_it(tiny, method, chunk):
    """After any number of accepted paths, in every batch row, however the prompt was cut into chunks."""
    base = Base(tiny.params, tiny.decoder)
    trainable, prompts = trained(method, base), make_prompts(5)
    state = run(on_paths(method, tiny, trainable), prompts, 9, chunk=chunk)
    assert len(set(np.asarray(state.counts).tolist())) > 1  # rows accept at their own pace
    for row, prompt in enumerate(prompts):
        text = [*prompt, *np.asarray(state.tokens)[row, : int(state.counts[row])].tolist()]
        length = int(state.lengths[row])
        assert length == len(text) - 1
        padded = np.array([(text + [0] * 96)[:96]])  # nothing looks ahead
        _, expected = recomputed(method, trainable, base, padded)
        for ours, theirs in zip(
            jax.tree.leaves(state.method_states[0]["cache"]), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(ours[row, :, :length], theirs[0, :, :length], atol=2e-4)


@every_method
def test_the_draft_is_what_training_would_predict(tiny, method):
    """Every node holds the token of its rank by the logits that training computes for its own path."""
    base = Base(tiny.params, tiny.decoder)
    trainable, [prompt] = trained(method, base), make_prompts(1)
    paths = [path for path in PATHS if len(path) <= method.heads]
    for steps in (0, 3):
        state = run(on_paths(method, tiny, trainable), [prompt], steps)
        text = [*prompt, *np.asarray(state.tokens)[0, : int(state.counts[0])].tolist()]
        drafted = dict(zip([(), *paths], np.asarray(state.draft.tokens)[0].tolist(), strict=True))
        assert drafted[()] == text[-1] and bool(jnp.all(state.draft.valid))
        tokens, last = np.zeros((len(paths), 64), np.int32), len(text) - 1
        for row, path in enumerate(paths):
            known = [*text, *(drafted[path[:n]] for n in range(1, len(path) + 1))]
            tokens[row, : len(known)] = known
        batch = Batch(tokens, np.full(len(paths), 64), np.ones(len(paths), int), np.full((len(paths), 1), last - 1))
        logits = predict(method, trainable, base, batch)
        for row, path in enumerate(paths):
            assert drafted[path] == int(jnp.argsort(-logits[row, 0, len(path) - 1])[path[-1]])


@pytest.mark.slow
def test_padding_drafts_nothing(tiny):
    """Hydra fills padded trees too: padding is not valid and changes no other node."""
    base = Base(tiny.params, tiny.decoder)
    method = Hydra()
    trainable, prompts = trained(method, base), make_prompts(4)
    tight = generate(untrained_drafter(method, tiny, from_paths(PATHS), trainable), prompts, 24)
    padded = stack_trees([pad_tree(build_tree(PATHS), 16, 0, 4, 5)])
    loose = generate(untrained_drafter(method, tiny, padded, trainable), prompts, 24)
    assert [(a.tokens, a.steps) for a in tight] == [(a.tokens, a.steps) for a in loose]


RESTRICTED = [METHODS[1], METHODS[4], Amphista(), PPD()]
RESTRICTED += [METHODS[2], Hydra(), BiTA(), HiddenTransfer(layers=(0, 1, 2)), Hydra(lm_head="full")]
RESTRICTED += [Amphista(lm_head="low_rank", rank=2)]


@pytest.mark.parametrize(
    ("number", "method"),
    [
        pytest.param(number, method, id=settings(method), marks=EXHAUSTIVE if number > 3 else pytest.mark.slow)
        for number, method in enumerate(RESTRICTED)
    ],
)
def test_a_draft_vocabulary_is_lossless_and_drafts_nothing_else(tiny, number, method):
    sampling = (SamplingConfig(), SamplingConfig(1.2, top_k=7))[number % 2]
    ids = np.array([7, 0, 3, 12, 5, 9], np.int32)
    trainable = trained(method, tiny.base)
    paths = [path for path in PATHS if len(path) <= method.facts(TINY).distances]
    drafter = make_drafter(Adapter(method, trainable, tiny.fingerprint, {}, ids), tiny, paths, len(ids))
    prompts, settings = make_prompts(8), {"sampling": sampling, "seed": 3}
    ours = generate(drafter, prompts, 24, batch_size=4, **settings)
    reference = generate(autoregressive(tiny), prompts, 24, **settings)
    assert [a.tokens for a in ours] == [a.tokens for a in reference]
    taken = {token for a in ours for token, drafted in zip(a.tokens, a.drafted, strict=True) if drafted}
    assert taken and taken <= set(ids.tolist())
    assert {token for a in ours for token in a.tokens} - set(ids.tolist())  # the base goes on to say what it wants


@pytest.mark.slow
def test_a_draft_vocabulary_of_all_tokens_changes_no_draft(tiny):
    method, prompts, order = Hydra(lm_head="low_rank"), make_prompts(3), np.random.default_rng(0).permutation(16)
    adapter = Adapter(method, trained(method, tiny.base), tiny.fingerprint, {}, order.astype(np.int32))
    full, small = (
        run(make_drafter(adapter, tiny, PATHS, count), prompts, 5, sampling=SamplingConfig(1.0)) for count in (0, 16)
    )
    np.testing.assert_array_equal(full.draft.tokens, small.draft.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("method", [Amphista(), Hydra(prefix_attention=True)], ids=settings)
def test_a_base_with_a_sliding_window_and_rows_that_are_refilled(method):
    """The method's own layers look at everything; what a row remembers goes with it when prompts take turns."""
    model = make_tiny(dataclasses.replace(TINY, sliding_window=6))
    drafter = untrained_drafter(method, model, from_paths(PATHS), trained(method, model.base))
    prompts = [[*prompt, *range(12)] for prompt in make_prompts(7)]
    alone = generate(autoregressive(model), prompts, 20)
    turns = dict(generate_many(drafter, prompts, 20, batch_size=3, refill=2, steps_per_chunk=3))
    assert [turns[i] for i in range(7)] == [a.tokens for a in alone]


@pytest.mark.slow
@pytest.mark.parametrize("method", [Amphista(), Hydra(prefix_attention=True)], ids=settings)
def test_tied_embeddings_and_bfloat16(method):
    """All but the norms is in the base's dtype."""
    model = make_tiny(dataclasses.replace(TINY, tie_embeddings=True))
    base = Base(jax.tree.map(lambda x: jnp.asarray(np.asarray(x, jnp.bfloat16)), model.params), model.decoder)
    model = dataclasses.replace(model, params=base.params)
    drafter = on_paths(method, model, trained(method, base))
    for path, x in jax.tree.leaves_with_path(drafter.on_device.sources[0].trainable):
        assert x.dtype == ("float32" if "norm" in jax.tree_util.keystr(path) else "bfloat16")
    state = run(drafter, make_prompts(2), 4)
    assert {x.dtype for x in jax.tree.leaves(state.method_states)} <= {jnp.dtype(jnp.bfloat16)}


def test_a_projection_of_16_bits_gives_logits_of_32(tiny):
    """Of many rows, too, whose batched product XLA's CPU backend does not know."""
    method, base = Medusa(heads=2, lm_head="full"), tiny.base
    trainable, x = method.init_heads(jax.random.key(0), base, 0), jnp.ones((3, 5, 2, TINY.hidden_size))
    short = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (trainable, x))
    logits = method.project(short[0], base, short[1])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, method.project(trainable, base, x), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Medusa(heads=0), "heads must be at least 1, got 0"),
        (lambda: Hydra(blocks=0), "blocks must be at least 1, got 0"),
        (lambda: Hydra(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (lambda: Hydra(prefix_norm=True), "prefix_norm is of the layer that prefix_attention adds, which is off"),
        (lambda: Medusa(lm_head="thin"), "lm_head must be one of full, tied, low_rank"),
        (lambda: Medusa(rank=0), "rank must be at least 1"),
        (lambda: Medusa(decay=0), "decay must be above 0"),
        (lambda: Medusa(labels=0), "not both 0"),
        (lambda: Amphista(adaptation_layers=3), "must be 0, 1 or 2, got 3"),
        (lambda: Amphista(heads=1), "at least 2 heads"),
        (lambda: Amphista(self_attention_layers=-1), "self_attention_layers must be at least 0, got -1"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(UserError, match=message):
        make()
