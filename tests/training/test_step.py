"""One update: learning rates by hand, and what it leaves alone."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.config import TrainConfig
from jaxspec.methods import PPD, SPACE, Eagle, HiddenTransfer
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.training.batches import TrainingData
from jaxspec.training.data import Answer
from jaxspec.training.step import first_state, moving, optimizer, stage_optimizer, train_step
from tests.helpers.methods import settings

SCHEDULES = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1,
}


TRAIN = TrainConfig(steps=12, batch_size=4, sequence_length=32, insertions=32)


def assert_rates(adamw, rates):
    """A gradient that is always the same moves a weight by the rate."""
    weight, moved = jnp.zeros(()), []
    state = adamw.init(weight)
    for _ in rates:
        update, state = adamw.update(jnp.ones(()), state, weight)
        moved.append(-float(update))
    np.testing.assert_allclose(moved, rates, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_rise_to_the_peak_and_follow_the_schedule_from_there(schedule, warmup):
    train = TrainConfig(learning_rate=0.5, schedule=schedule, warmup=warmup)
    rise = [0.05 * step / warmup for step in range(warmup)]
    rest = [0.05 * SCHEDULES[schedule](step / (20 - warmup)) for step in range(21 - warmup)]
    assert_rates(optimizer(train, 20, 0.1), rise + rest)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_ends_where_it_is_told_to(schedule):
    train = TrainConfig(learning_rate=0.5, schedule=schedule, warmup=2, final_learning_rate=0.3)
    rest = [0.05 * (0.3 + 0.7 * SCHEDULES[schedule](step / 8)) for step in range(9)]
    assert_rates(optimizer(train, 10, 0.1), [0, 0.025, *rest, 0.015])


def test_stages_share_the_warm_up():
    """Twelve updates in three stages: four of each, two of which rise to the peak."""
    train = TrainConfig(steps=12, learning_rate=0.5, schedule="constant", warmup=6)
    for stage in range(3):
        assert_rates(stage_optimizer(HiddenTransfer(layers=(0, 1, 2)), train, stage), [0, 0.25, 0.5, 0.5])


def begin(method, train, base, count, stage=0):
    """The first state, and batches of so many random answers of one length."""
    rng = np.random.default_rng(0)
    answers = [Answer(rng.integers(0, 16, 4).tolist(), rng.integers(0, 16, 24).tolist()) for _ in range(count)]
    return first_state(method, train, stage, base), TrainingData(answers, train)


@pytest.mark.parametrize(
    ("method", "stage"),
    [
        pytest.param(PPD(head="one_stage"), 0, marks=pytest.mark.slow),
        (PPD(head="two_stage"), 0),
        pytest.param(HiddenTransfer(distances=2, layers=(0, 1)), 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: settings(value) if not isinstance(value, int) else str(value),
)
def test_an_update_moves_what_its_stage_trains_and_nothing_else(tiny, method, stage):
    """Not the base either, whose memory a state that began as a part of it must not give away."""
    frozen = jax.tree.map(np.array, tiny.params)
    state, data = begin(method, TRAIN, tiny.base, 8, stage)
    before = jax.tree.map(np.array, state.trainable)
    for step in range(3):
        state, _ = train_step(method, TRAIN, stage, tiny.base, state, data.batch(step))
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.tree.map(np.array, tiny.params))
    trained = moving(method, before, stage)
    assert trained.keys() <= before.keys() == state.trainable.keys()
    for name, part in before.items():
        same = jax.tree.map(lambda x, y: np.array_equal(x, y), part, state.trainable[name])
        assert jax.tree.leaves(same) == [name not in trained] * len(jax.tree.leaves(same)), name


@pytest.mark.slow
def test_a_base_of_16_bits_trains_an_adapter_of_32(tiny, monkeypatch):
    """Beside float32's: the same loss but for rounding. Products are in 16 bits, and nothing of what is trained."""
    found, multiplied, method = {}, {}, Eagle(depth=2, unroll=2)

    def loss(eagle, trainable, *args, real=Eagle.loss):
        names = flatten_dict(jax.tree.map(lambda x: x.dtype, trainable), sep="/")
        multiplied[args[0].dtype] = {dtype for name, dtype in names.items() if "norm" not in name}
        return real(eagle, trainable, *args)

    monkeypatch.setattr(Eagle, "loss", loss)
    for dtype in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
        base = Base(jax.tree.map(lambda x, d=dtype: x.astype(d), tiny.params), tiny.decoder)
        state, data = begin(method, TRAIN, base, 4)
        found[dtype.name] = train_step(method, TRAIN, 0, base, state, data.batch(0))
        assert multiplied[dtype] == {dtype}
    (state, metrics), (_, whole) = found["bfloat16"], found["float32"]
    floats = [x for x in jax.tree.leaves((state.trainable, state.optimizer)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) == 3 * len(jax.tree.leaves(state.trainable)) and all(x.dtype == jnp.float32 for x in floats)
    assert metrics["loss"] != whole["loss"]
    np.testing.assert_allclose(metrics["loss"], whole["loss"], rtol=0.02)
    np.testing.assert_allclose(metrics["gradient_norm"], whole["gradient_norm"], rtol=0.1)


@pytest.mark.parametrize(
    "method", [PPD(), pytest.param(SPACE(distances=2, rank=2), marks=pytest.mark.slow)], ids=lambda m: m.name
)
def test_microbatches_average_to_the_gradient_of_the_whole_batch(tiny, method):
    """Answers of one length and every insertion point, so that every part has as many targets."""
    updated = []
    for size, remat in ((0, False), (1, True)):
        train = dataclasses.replace(TRAIN, microbatch=size)
        base = Base(tiny.params, Decoder(tiny.config, remat=remat))
        state, data = begin(method, train, base, 4)
        _, metrics = train_step(method, train, 0, base, state, data.batch(0))
        updated.append([float(metrics[name]) for name in ("loss", "gradient_norm", "top1@1")])
    np.testing.assert_allclose(updated[1], updated[0], rtol=1e-4)


def test_one_gradient_is_held_however_many_are_added(tiny):
    """Gradients of microbatches are summed one by one: there is no stack of them."""
    train, method = TrainConfig(batch_size=3, microbatch=1, sequence_length=32), SPACE(distances=2, tuning="full")
    state, data = begin(method, train, tiny.base, 3)
    update = functools.partial(train_step, method, train, 0)
    program = str(jax.make_jaxpr(update)(tiny.base, state, data.batch(0)))
    rows, columns = state.trainable["base"]["lm_head"].shape
    assert f"f32[{rows},{columns}]" in program and f"f32[3,{rows},{columns}]" not in program
