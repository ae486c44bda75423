"""The decoder over a cache, in trees, groups and segments, against its own plain forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.attention import Context, causal_context, causal_mask
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit, empty_cache, gather_rows
from jaxspec.model.decoder import Decoder, Skip
from jaxspec.model.rope import rope_angles
from jaxspec.trees.arrays import build_tree
from tests.helpers.model import VARIANTS, plain, quick_jit, random_base, random_tokens, run_layers, tiny_config

CAPACITY = 20
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 2), (0, 1, 0, 0)]
FAST = ("llama", "dynamic", "qwen2_window")  # what the others add, the golden logits show too
every_variant = pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in VARIANTS]
)


@quick_jit
def step(base, tokens, positions, mask, cache, visible):
    """Logits and the rows' own keys and values of one pass over a cache."""
    hidden, rows = base.rows(base.embed(tokens), Context(positions, mask, cache, visible))
    return base.logits(hidden), rows


write = quick_jit(commit)


def garbage_cache(config, batch, seed=0):
    """A cache full of large numbers."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: empty_cache(config, batch, CAPACITY, jnp.float32))
    return jax.tree.map(lambda x: 100 * rng.standard_normal(x.shape).astype(x.dtype), shapes)


def prefilled(base, tokens):
    """A cache with all of `tokens` [B, T] committed, garbage after them."""
    B, T = tokens.shape
    cache = garbage_cache(base.decoder.config, B)
    _, rows = run_layers(base, base.embed(tokens), causal_context(B, T))
    return write(cache, rows, np.zeros(B, np.int32))


def behind(base, tokens, count):
    """Where `count` rows stand behind tokens [B, T] in a cache."""
    B, T = tokens.shape
    positions = T + np.broadcast_to(np.arange(count), (B, count))
    return Context(positions, causal_mask(B, count), prefilled(base, tokens), np.full((B, 1), T))


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("chunk", "lengths"), [(4, [3, 6]), (1, [0, 2])], ids=["chunk by chunk", "token by token"])
@every_variant
def test_rows_after_a_cache_give_the_logits_of_the_whole_sequence(variant, chunk, lengths):
    """Batch rows of unequal lengths."""
    base, tokens = random_base(VARIANTS[variant]), random_tokens((2, 18))
    expected, lengths = plain(base, tokens), np.array(lengths)
    cache = prefilled(base, tokens[:, :9])  # a batch row shorter than that starts inside of it and overwrites
    while lengths.max() + chunk <= tokens.shape[1]:
        at = lengths[:, None] + np.arange(chunk)
        ids = np.take_along_axis(tokens, at, axis=1)
        logits, rows = step(base, ids, at, causal_mask(2, chunk), cache, lengths[:, None])
        close(logits, np.take_along_axis(expected, at[..., None], axis=1))
        cache, lengths = write(cache, rows, lengths), lengths + chunk
    assert lengths.max() >= 16


@every_variant
def test_every_node_of_a_tree_gives_the_logits_of_its_path(variant):
    base, tree = random_base(VARIANTS[variant]), build_tree(PATHS)
    prefix, lengths = random_tokens((2, 9)), np.array([6, 9])
    nodes = random_tokens((2, tree.num_nodes), seed=1)
    logits, _ = step(
        base,
        nodes,
        lengths[:, None] + tree.depth,
        np.broadcast_to(tree.ancestors, (2, 1, *tree.ancestors.shape)),
        prefilled(base, prefix),
        lengths[:, None],
    )
    sequences = np.zeros((2, tree.num_nodes, 9 + 5), np.int32)
    for b, length in enumerate(lengths):
        for n in range(tree.num_nodes):
            path = nodes[b, np.flatnonzero(tree.ancestors[n])]  # levels in order
            sequences[b, n, : length + len(path)] = [*prefix[b, :length], *path]
    expected = plain(base, sequences.reshape(-1, 14)).reshape(2, tree.num_nodes, 14, -1)
    last = lengths[:, None] + tree.depth
    close(logits, np.take_along_axis(expected, last[..., None, None], axis=2)[:, :, 0])


@pytest.mark.parametrize("variant", [pytest.param("llama", marks=pytest.mark.slow), "qwen2_window"])
def test_committed_path_of_a_tree_is_as_good_as_autoregressive_decoding(variant):
    """After the rows of one path are gathered and committed, the next token sees that path and nothing else."""
    base, tree = random_base(VARIANTS[variant]), build_tree(PATHS)
    prefix, nodes = random_tokens((1, 9)), random_tokens((1, tree.num_nodes), seed=1)
    cache, mask = prefilled(base, prefix), tree.ancestors[None, None]
    _, rows = step(base, nodes, 9 + tree.depth[None], mask, cache, np.array([[9]]))
    path = np.flatnonzero(tree.ancestors[-1])[None]
    cache = write(cache, quick_jit(gather_rows)(rows, path), np.array([9]))
    end, newest = 9 + path.shape[1], np.array([[3]], np.int32)
    logits, _ = step(base, newest, np.array([[end]]), causal_mask(1, 1), cache, np.array([[end]]))
    whole = np.concatenate([prefix, nodes[:, path[0]], newest], axis=1)
    close(logits[:, 0], plain(base, whole)[:, -1])


@pytest.mark.parametrize("variant", ["llama", pytest.param("mistral", marks=pytest.mark.slow), "dynamic"])
def test_groups_equal_separate_runs(variant):
    """Groups of rows at insertion points 0, 4 and 8 of one cached sequence, each seeing only what precedes it."""
    base, tokens, points = random_base(VARIANTS[variant]), random_tokens((2, 9)), np.array([0, 4, 8])
    cache, rows = prefilled(base, tokens), random_tokens((2, 3, 3), seed=1)
    positions = np.broadcast_to(points[:, None] + np.arange(3), (2, 3, 3))
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    visible = np.broadcast_to(np.repeat(points, 3), (2, 9))
    grouped = jnp.broadcast_to(mask, (2, 3, 3, 3))
    logits, own = step(base, rows.reshape(2, 9), positions.reshape(2, 9), grouped, cache, visible)
    for g, point in enumerate(points):
        apart = (jnp.broadcast_to(mask, (2, 1, 3, 3)), cache, np.full((2, 1), point))
        expected, expected_own = step(base, rows[:, g], positions[:, g], *apart)
        close(logits.reshape(2, 3, 3, -1)[:, g], expected)
        close(own.keys[-1][:, :, 3 * g : 3 * g + 3], expected_own.keys[-1])
        close(own.values[-1][:, :, 3 * g : 3 * g + 3], expected_own.values[-1])


def test_each_row_may_see_its_own_part_of_the_cache():
    """`visible` per row with a single group: three lone rows at different points."""
    base, tokens, points = random_base(VARIANTS["llama"]), random_tokens((1, 12)), np.array([[2, 5, 11]])
    cache = prefilled(base, tokens)
    ids = np.take_along_axis(tokens, points, axis=1)
    logits, _ = step(base, ids, points, np.eye(3, dtype=bool)[None, None], cache, points)
    close(logits[0], plain(base, tokens)[0, points[0]])


@pytest.mark.parametrize("variant", ["llama", "qwen2_window"])
def test_layers_in_two_segments_equal_one_run(variant):
    base, tokens, rows = random_base(VARIANTS[variant]), random_tokens((2, 9)), random_tokens((2, 4), seed=1)
    context = behind(base, tokens, 4)
    x = base.embed(rows)
    whole, own = run_layers(base, x, context)
    middle, below = run_layers(base, x, context, layers=(0, 1))
    top, above = run_layers(base, middle, context, layers=(1, 2))
    assert len(below.keys) == len(above.keys) == 1 and len(own.keys) == 2
    close(top, whole)
    jax.tree.map(close, Cache(below.keys + above.keys, below.values + above.values), own)


def test_rows_that_join_at_a_later_layer_leave_the_others_alone():
    """Pseudo hidden states after the nodes: nodes do not see them, they see the nodes."""
    base, x = random_base(VARIANTS["llama"]), random_base(VARIANTS["llama"]).embed(random_tokens((1, 4)))
    short, longer = causal_context(1, 4), causal_context(1, 6)
    expected, _ = run_layers(base, x, short)
    middle, _ = run_layers(base, x, short, layers=(0, 1))
    joined = np.concatenate([middle, np.ones_like(middle[:, :2])], axis=1)
    top, _ = run_layers(base, joined, longer, layers=(1, 2))
    close(top[:, :4], expected)
    joined[:, 0] *= -1
    moved, _ = run_layers(base, joined, longer, layers=(1, 2))
    assert (np.abs(moved - top)[0, 4:].max(axis=-1) > 1e-3).all()


@every_variant
def test_cache_beyond_the_length_is_never_read(variant):
    base, tokens = random_base(VARIANTS[variant]), random_tokens((2, 9))
    cache, lengths = prefilled(base, tokens), np.array([[3], [9]])
    other = garbage_cache(base.decoder.config, 2, seed=1)
    used = np.arange(CAPACITY)[:, None] < lengths[..., None, None]  # [B, 1, S, 1]
    changed = jax.tree.map(lambda a, b: np.where(used, a, b), cache, other)
    rest = (random_tokens((2, 4), seed=1), lengths + np.arange(4), causal_mask(2, 4))
    a, b = (step(base, *rest, c, lengths)[0] for c in (cache, changed))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("first", "sees"), [(0, False), (1, True)])
def test_sliding_window_hides_old_positions_except_below_its_first_layer(first, sees):
    config = tiny_config(num_layers=1, sliding_window=4, first_window_layer=first)
    base, tokens = random_base(config), random_tokens((1, 8))
    changed = tokens.copy()
    changed[0, 3] = (tokens[0, 3] + 1) % 48
    gap = np.abs(np.asarray(plain(base, tokens)) - plain(base, changed))[0].max(axis=-1)
    assert (gap[:3] == 0).all()
    assert (gap[3:7] > 1e-4).all()  # the window is position 3 and the three after it
    assert (gap[7] > 1e-4) == sees


@pytest.mark.slow
def test_remat_changes_neither_output_nor_gradient():
    base, tokens = random_base(VARIANTS["qwen2_window"]), random_tokens((2, 9))
    remat = Base(base.params, Decoder(base.decoder.config, remat=True))
    context = behind(base, tokens, 3)

    def loss(x, base):
        hidden, _ = base.rows(x, context)
        return jnp.sum(hidden**3), hidden

    gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))
    x = base.embed(random_tokens((2, 3), seed=1))
    plainly, again = gradient(x, base), gradient(x, remat)
    np.testing.assert_allclose(plainly[0][0], again[0][0], rtol=1e-4)
    close(again[0][1], plainly[0][1])
    scale = np.abs(plainly[1]).max()
    close(again[1] / scale, plainly[1] / scale)
    traced = [str(jax.make_jaxpr(lambda x, b=b: loss(x, b)[0])(x)) for b in (base, remat)]
    assert ["remat" in text or "checkpoint" in text for text in traced] == [False, True]


def test_tied_and_untied_embeddings_agree_when_the_matrices_do():
    tied = random_base(tiny_config(tie_embeddings=True))
    untied = tied.params | {"embedding": tied.params["lm_head"].T}
    base = Base(untied, Decoder(tiny_config(tie_embeddings=False)))
    tokens = random_tokens((2, 7))
    np.testing.assert_array_equal(tied.embed(tokens), base.embed(tokens))
    close(plain(tied, tokens), plain(base, tokens))
    other = Base(untied | {"embedding": untied["embedding"] + 1}, base.decoder)
    assert np.abs(np.asarray(plain(other, tokens)) - plain(base, tokens)).max() > 1e-2


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_rope_scaling_bends_the_angles_only_where_it_should(kind):
    config = VARIANTS[kind]
    positions = np.arange(30)[None]
    scaled, unscaled = (
        np.asarray(rope_angles(c, positions))[0] for c in (config, dataclasses.replace(config, rope_scaling=None))
    )
    if kind == "linear":
        np.testing.assert_allclose(scaled, unscaled / 4, rtol=1e-5)
    elif kind == "dynamic":  # the base grows from the first position past the original context on
        np.testing.assert_allclose(scaled[:10], unscaled[:10], rtol=1e-5)
        np.testing.assert_allclose(scaled[:, 0], unscaled[:, 0], rtol=1e-5)
        assert (scaled[10:, 1:] < unscaled[10:, 1:] * 0.999).all()
    else:
        ratio = (unscaled / np.maximum(scaled, 1e-9))[1]
        np.testing.assert_allclose([ratio[0], ratio[-1]], [1, 8], rtol=1e-5)
        assert (np.diff(ratio) > -1e-4).all() and ((ratio > 1.1) & (ratio < 7.9)).any()


@pytest.mark.parametrize("variant", ["llama", pytest.param("qwen2_window", marks=pytest.mark.slow)])
def test_a_prefix_is_what_rows_see_before_themselves(variant):
    """Keys and values of two tokens, given as a prefix instead of as rows; who does not see them feels nothing."""
    base = random_base(dataclasses.replace(VARIANTS[variant], sliding_window=None))
    first, second = random_tokens((1, 2)), np.repeat(random_tokens((1, 4), seed=1), 2, axis=0)
    whole = np.concatenate([np.repeat(first, 2, axis=0), second], axis=1)
    expected, _ = run_layers(base, base.embed(whole), causal_context(2, 6))
    context = Context(np.tile(np.arange(2, 6), (2, 1)), causal_mask(2, 4))
    alone, _ = run_layers(base, base.embed(second), context)

    _, rows = run_layers(base, base.embed(first), causal_context(1, 2))
    prefix = jax.tree.map(lambda x: x[0], rows)
    seen = np.zeros((2, 4, 2), bool)
    seen[0] = True
    hidden, own = run_layers(base, base.embed(second), context.replace(prefix=prefix, sees_prefix=seen))
    close(hidden[0], expected[0, 2:])
    close(hidden[1], alone[1])
    assert own.keys[0].shape[2] == 4  # the prefix is never committed


def test_a_prefix_stands_before_every_group_and_beside_a_cache():
    base, tokens = random_base(VARIANTS["llama"]), random_tokens((1, 6))
    cache = jax.tree.map(np.asarray, prefilled(base, tokens))
    prefix = jax.tree.map(lambda c: c[0, :, 2:5], cache)
    # two groups of one row each see one slot of the cache and, as a prefix, different ones of three further tokens
    seen = np.array([[[True, False, True], [False, True, False]]])
    x, positions = base.embed(tokens[:, [5, 5]]), np.array([[5, 5]])
    hidden, _ = run_layers(
        base, x, Context(positions, np.ones((1, 2, 1, 1), bool), cache, np.array([[1]]), prefix, seen)
    )
    for row, slots in enumerate([[0, 2, 4], [0, 3]]):  # the same with the slots themselves in a cache
        kept = jax.tree.map(lambda c: c[:, :, slots], cache)  # noqa: B023
        context = Context(positions[:, :1], np.ones((1, 1, 1, 1), bool), kept, np.array([[len(slots)]]))
        alone, _ = run_layers(base, x[:, :1], context)
        close(hidden[0, row], alone[0, 0])


def test_a_part_that_is_skipped_adds_nothing_to_the_rows():
    """As with zeros in place of its last matrix; keys and values of skipped attention do not exist."""
    base = random_base(VARIANTS["llama"])
    x, context = base.embed(random_tokens((2, 6))), causal_context(2, 6)
    params = jax.tree.map(np.array, base.params)
    params["layers_0"]["attention"]["o"]["kernel"] *= 0
    params["layers_1"]["mlp"]["down"]["kernel"] *= 0
    rows_of = quick_jit(lambda base, skip: base.rows(x, context, skip=skip), static_argnums=1)
    hidden, rows = rows_of(base, Skip(attention=(0,), mlp=(1,)))
    close(hidden, run_layers(base.replace(params=params), x, context)[0])
    assert rows.keys[0] is rows.values[0] is None and rows.keys[1] is not None
    close(rows_of(base, Skip((0, 1), (0, 1)))[0], x)


def test_rows_of_a_batch_may_have_a_prefix_of_their_own():
    """Keys and values of older rows say the same there as in a cache."""
    base, tokens = random_base(VARIANTS["llama"]), random_tokens((2, 6))

    @quick_jit
    def behind_older_rows(base):
        _, kv = base.rows(base.embed(tokens[:, :4]), causal_context(2, 4))
        positions, mask = jnp.broadcast_to(jnp.arange(4, 6), (2, 2)), causal_mask(2, 2)
        context = Context(positions, mask, prefix=kv, sees_prefix=jnp.ones((1, 2, 4), bool))
        return base.logits(base.rows(base.embed(tokens[:, 4:]), context)[0])

    close(behind_older_rows(base), plain(base, tokens)[:, 4:])
