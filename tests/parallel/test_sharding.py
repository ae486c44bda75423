"""Where parameters lie on a mesh, and how they get there."""

import dataclasses
import weakref

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import PartitionSpec as P

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError
from jaxspec.model.base import Base
from jaxspec.parallel.sharding import (
    divided,
    in_mesh,
    make_mesh,
    mesh_of,
    partition,
    put_batch,
    tree_shardings,
)
from jaxspec.weights.checkpoint import load_checkpoint, save_checkpoint
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.params import HF_NAMES, load_params
from tests.helpers.model import named_tensors, plain
from tests.helpers.tiny import TINY, make_tiny, on_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def test_one_device_is_no_mesh():
    assert make_mesh(MeshConfig()) is None
    assert mesh_of(make_tiny().params) is None
    x = jnp.ones((2, 3))
    assert divided(x, "batch") is x


@pytest.mark.parametrize(
    ("config", "message"),
    [(MeshConfig(data=16), "needs 16 devices, and there are 8"), (MeshConfig(tensor=0), "at least 1")],
)
def test_meshes_that_cannot_be(config, message):
    with pytest.raises(UserError, match=message):
        make_mesh(config)


def test_three_of_four_tpus_make_no_box(monkeypatch):
    """As JAX says it of a slice 2 x 2."""

    def refuse(*args, **options):
        raise AssertionError

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(UserError, match="1 x 1 x 3 cannot be laid over 3 of these 8 devices"):
        make_mesh(MeshConfig(tensor=3))


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers_0/attention/qkv/kernel", (32, 64), P(("fsdp",), ("tensor",))),
        ("layers_0/attention/o/kernel", (32, 32), P(("tensor",), ("fsdp",))),
        ("layers_0/mlp/down/kernel", (48, 32), P(("tensor",), ("fsdp",))),
        ("mu/base/layers_0/mlp/up/kernel", (32, 48), P(("fsdp",), ("tensor",))),
        ("lm_head", (4, 32, 16), P(None, ("fsdp",), ("tensor",))),
        ("lm_head", (32, 15), P(("fsdp",), None)),
        ("layers_0/attention_norm/scale", (32,), P(None)),
        ("lora/layers_0/mlp/up/up", (16, 48), P(None, None)),
        ("step1", (2048, 1024), P(("fsdp",), None)),  # a large one of a name that the table lacks
        ("step1", (32, 16), P(None, None)),
        ("count", (), P()),
    ],
)
def test_parameters_are_divided_as_the_table_of_names_says(mesh, path, shape, spec):
    assert lies(mesh, path, shape) == spec


def test_zero_2_keeps_weights_whole_over_fsdp(mesh):
    assert lies(mesh, "mlp/up/kernel", (32, 48), whole=True) == P(None, ("tensor",))


def lies(mesh, path, shape, whole=False):
    tree = flax.traverse_util.unflatten_dict({path: jax.ShapeDtypeStruct(shape, jnp.float32)}, sep="/")
    return jax.tree.leaves(tree_shardings(mesh, tree, whole))[0].spec


def test_what_an_axis_does_not_divide_stays_whole(mesh):
    assert partition(mesh, (8, 3), ("batch", "heads")) == P(("data", "fsdp"), None)
    assert partition(mesh, (6, 3), ("batch",)) == P(None)


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(2, 2, 2),
        *(pytest.param(MeshConfig(**{axis: 8}), marks=pytest.mark.slow) for axis in ("data", "fsdp", "tensor")),
    ],
    ids=lambda config: f"{config.data}x{config.fsdp}x{config.tensor}",
)
def test_the_base_gives_the_same_logits_on_every_mesh(config):
    model = make_tiny(dataclasses.replace(TINY, num_layers=1, head_norms=True))
    mesh, params, tokens = make_mesh(config), on_mesh(model, config).params, np.arange(24).reshape(8, 3) % 16
    assert mesh_of(params) == mesh
    with in_mesh(mesh):
        logits = plain(Base(params, model.decoder), put_batch(tokens, mesh))
    np.testing.assert_allclose(logits, plain(model.base, tokens), rtol=2e-4, atol=2e-4)


def test_weights_are_read_straight_to_their_devices(mesh, tmp_path):
    model = make_tiny(dataclasses.replace(TINY, qkv_bias=True))
    save_directory(tmp_path / "hf", model.config, model.params)
    save_checkpoint(tmp_path / "orbax", model.config, model.params)
    for load, folder in ((load_directory, "hf"), (load_checkpoint, "orbax")):
        _, params, fingerprint = load(tmp_path / folder, jnp.float32, mesh)
        assert fingerprint == model.fingerprint
        kernel = params["layers_0"]["mlp"]["up"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (16, 24)
        jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_no_more_than_a_layer_is_held_on_the_way(mesh):
    """What has been read lies on its devices before the next is read; q, k and v wait for each other."""
    config = dataclasses.replace(TINY, num_layers=4)
    params = jax.tree.map(np.asarray, make_tiny(config).params)
    read, held = [], []

    def watched():
        for name, array in named_tensors(config, params):
            array = array.copy()
            held.append(sum(earlier() is not None for earlier in read))
            read.append(weakref.ref(array))
            yield name, array
            del array

    load_params(config, watched(), HF_NAMES, jnp.bfloat16, "here", mesh)  # no device shares the memory of another dtype
    tensors_per_layer = 9
    assert len(held) > 4 * tensors_per_layer and max(held) <= tensors_per_layer
