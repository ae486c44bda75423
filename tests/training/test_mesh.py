"""Training over several devices: the same losses and the same adapter as on one, to the rounding of float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import MeshConfig
from jaxspec.decoding.method import Stage
from jaxspec.methods import PPD, SPACE, Amphista, BiTA, DFlash, Eagle, HiddenTransfer, Medusa
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.parallel.sharding import in_mesh, make_mesh, put, put_batch, tree_shardings
from jaxspec.training.data import AnsweredPrompt, TrainingData
from jaxspec.training.folder import state_shardings
from jaxspec.training.settings import TrainConfig
from jaxspec.training.step import Update, first_state, learning_rates, train_step
from tests.helpers.marks import slow_ones
from tests.helpers.tiny import TINY

TRAIN = TrainConfig(
    steps=20, batch_size=8, sequence_length=32, insertions=4, learning_rate=1e-3, clip=1.0, remat=True, ema=0.9
)


def train(model, method, settings, mesh_config=MeshConfig(), steps=3):
    """Losses of the updates, and the last state."""
    mesh = make_mesh(mesh_config)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), model.params)
    rng = np.random.default_rng(0)
    answers = [AnsweredPrompt(rng.integers(0, 16, 4).tolist(), rng.integers(0, 16, 24).tolist()) for _ in range(24)]
    data, update, losses = (
        TrainingData(answers, settings),
        Update.of(method, TINY, settings, 0, mesh_config.zero == 2),
        [],
    )
    if mesh is not None:
        params = put(params, tree_shardings(mesh, params))
    base = Base(params, Decoder(model.config, remat=settings.remat))
    with in_mesh(mesh):
        state = first_state(update, settings.seed, base)
        if mesh is not None:
            state = put(state, state_shardings(mesh, state, update.whole))
        for step, rate in enumerate(learning_rates((Stage(),), settings)[:steps]):
            batch = put_batch(data.batch(step), mesh)
            state, metrics = train_step(update, base, state, batch, rate)
            losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def assert_alike(one, many):
    np.testing.assert_allclose(many[0], one[0], rtol=1e-9)
    assert one[0][-1] != one[0][0]
    ours, theirs = (jax.tree.leaves((state.trainable, state.average.ema)) for _, state in (one, many))
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == jnp.float64
        np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-9)


MESHES = [MeshConfig(data=8), MeshConfig(fsdp=8), MeshConfig(tensor=8), MeshConfig(2, 2, 2)]


@pytest.mark.slow
def test_every_mesh_trains_like_one_device(tiny):
    one = train(tiny, PPD(ensemble=2), TRAIN, steps=20)
    for mesh in MESHES:
        assert_alike(one, train(tiny, PPD(ensemble=2), TRAIN, mesh, steps=20))


OTHERS = (Medusa(lm_head="full"), BiTA(), HiddenTransfer(layers=(0, 1, 1), training="joint"), Amphista(), SPACE())
OTHERS += (Eagle(unroll=2, own_head=True), DFlash(block=3, layers=1, markov_rank=4, convolution=2, selector_rank=4))


@pytest.mark.parametrize("method", slow_ones([PPD(), *OTHERS], ("hidden_transfer", "space", "dflash")))
def test_every_method_trains_on_a_mesh_like_on_one_device(tiny, method):
    assert_alike(train(tiny, method, TRAIN), train(tiny, method, TRAIN, MeshConfig(2, 2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_a_whole_base_with_its_optimizer_divided(tiny, zero):
    """SPACE's full fine-tuning: of ZeRO-3 everything, of ZeRO-2 only what the optimizer holds is divided."""
    method, mesh = SPACE(distances=2, tuning="full"), MeshConfig(fsdp=4, tensor=2, zero=zero)
    one = train(tiny, method, dataclasses.replace(TRAIN, microbatch=4))
    many = train(tiny, method, dataclasses.replace(TRAIN, microbatch=1), mesh)  # in each of four parts
    assert_alike(one, many)
    kernel = many[1].trainable["base"]["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == ((32, 24) if zero == 2 else (8, 24))
    moments = [x for x in jax.tree.leaves(many[1].optimizer) if x.shape == kernel.shape]
    assert moments and all(x.sharding.shard_shape(x.shape) == (8, 24) for x in moments)
