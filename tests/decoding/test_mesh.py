"""Decoding over several devices writes what one device writes."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxspec.generation.generate as generate_module
from jaxspec.config import MeshConfig, SamplingConfig
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate, generate_many
from jaxspec.methods import PPD, Amphista
from jaxspec.model.cache import Cache, commit_after
from jaxspec.parallel.sharding import in_mesh, make_mesh
from jaxspec.trees import sparse_tree
from tests.helpers.decoding import begin
from tests.helpers.methods import trained, untrained_drafter
from tests.helpers.tiny import TINY, make_prompts, make_tiny, on_mesh

SHAPES = {"tensor 2": MeshConfig(tensor=2), "tensor 4": MeshConfig(tensor=4), "2 x 2 x 2": MeshConfig(2, 2, 2)}


@pytest.fixture(scope="module")
def model():
    return make_tiny(dataclasses.replace(TINY, num_kv_heads=4), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        (None, "tensor 2"),
        (PPD(distances=2), "tensor 4"),
        (PPD(distances=2), "2 x 2 x 2"),
        (Amphista(heads=2), "tensor 2"),
    ],
    ids=["autoregressive", "ppd", "ppd", "amphista"],
)
def test_the_same_tokens(model, method, shape):
    many = on_mesh(model, SHAPES[shape])
    prompts, settings = make_prompts(4), dict(max_new_tokens=20, batch_size=4)
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8)):
        expected = generate(autoregressive(model), prompts, sampling=sampling, **settings)
        drafter = autoregressive(many)
        if method is not None:
            tree = sparse_tree([[0.5, 0.3, 0.1]] * 2, 5)
            drafter = untrained_drafter(method, many, tree, trained(method, model.base))
        answers = generate(drafter, prompts, sampling=sampling, **settings)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


@pytest.mark.slow
def test_refilled_rows_too(model):
    prompts = make_prompts(9)
    expected = dict(generate_many(autoregressive(model), prompts, 12, batch_size=4, refill=2))
    many = on_mesh(model, SHAPES["2 x 2 x 2"])
    assert dict(generate_many(autoregressive(many), prompts, 12, batch_size=4, refill=2)) == expected


@pytest.mark.slow
def test_few_rows_are_divided_too(model, monkeypatch):
    """Three prompts on a mesh that divides the batch into four parts."""
    caches, insert = [], generate_module.insert

    def watched(state, fresh, rows):
        caches.append(fresh.cache.keys[0])
        return insert(state, fresh, rows)

    monkeypatch.setattr(generate_module, "insert", watched)
    prompts = make_prompts(3)
    expected = dict(generate_many(autoregressive(model), prompts, 8, batch_size=3, refill=1))
    many = on_mesh(model, MeshConfig(data=2, fsdp=2))
    assert dict(generate_many(autoregressive(many), prompts, 8, batch_size=3, refill=1)) == expected
    assert 4 * caches[-1].sharding.shard_shape(caches[-1].shape)[0] == caches[-1].shape[0]


@pytest.mark.slow
def test_prompts_do_not_wait_until_a_row_is_free_in_every_part(model, monkeypatch):
    """Four rows in four parts, two of which have short answers: those make room while the others go on."""
    taken, insert = [], generate_module.insert

    def watched(state, fresh, rows):
        taken.append((int((rows < 4).sum()), int(np.sum(~np.asarray(state.done)))))
        return insert(state, fresh, rows)

    monkeypatch.setattr(generate_module, "insert", watched)
    prompts = make_prompts(12)
    many = on_mesh(model, MeshConfig(data=2, fsdp=2))
    found = dict(generate_many(autoregressive(many), prompts, 24, batch_size=4, refill=1, steps_per_chunk=2))
    assert taken[0] == (4, 0) and sum(count for count, _ in taken) == 12
    assert any(going_on for _, going_on in taken)
    assert [found[i] for i in range(12)] == [a.tokens for a in generate(autoregressive(model), prompts, 24)]


@pytest.mark.slow
def test_heads_that_the_mesh_does_not_divide():
    """Two key/value heads over four devices: the cache is whole, the tokens are the same."""
    model = make_tiny(seed=1)
    prompts = make_prompts(2)
    one, four = (generate(autoregressive(m), prompts, 16) for m in (model, on_mesh(model, MeshConfig(tensor=4))))
    assert [answer.tokens for answer in four] == [answer.tokens for answer in one]


def test_the_cache_is_divided(model):
    many = on_mesh(model, MeshConfig(tensor=4))
    assert many.base_for(1) is many.base  # blocks are for one processor
    _, state = begin(autoregressive(many), [[1, 2, 3]], 4)
    keys = state.cache.keys[0]
    assert keys.sharding.shard_shape(keys.shape) == (1, 1, 128, 8)


def test_what_is_written_into_the_cache_is_not_gathered():
    """Although its layout is constrained."""
    mesh = make_mesh(MeshConfig(tensor=4))
    heads, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "tensor"), ()))
    cache, rows = ((jax.ShapeDtypeStruct((2, 4, n, 8), "float32", sharding=heads),) * 2 for n in (64, 3))
    at = jax.ShapeDtypeStruct((2,), "int32", sharding=whole)
    with in_mesh(mesh):
        program = jax.jit(commit_after).lower(Cache(cache, cache), Cache(rows, rows), at, at).compile().as_text()
    assert "f32[2,1,64,8]" in program and "all-gather" not in program
