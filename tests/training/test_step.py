"""Updates: learning rates by hand, what they leave alone, and how many programs they take."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.decoding.method import Method, Stage
from jaxspec.methods import PPD, SPACE, Eagle, HiddenTransfer
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder, for_products
from jaxspec.training.data import AnsweredPrompt, TrainingData
from jaxspec.training.settings import TrainConfig
from jaxspec.training.step import Update, first_state, learning_rates, train_step, train_steps
from tests.helpers.methods import batch_of, sequence, settings
from tests.helpers.tiny import TINY, make_tiny

SCHEDULES = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1,
}


TRAIN = TrainConfig(steps=12, batch_size=4, sequence_length=32, insertions=32)
RATE = np.float32(TRAIN.learning_rate)


class Slow(PPD):
    """At a tenth of the learning rate."""

    stages = (Stage(learning_rate=0.1),)


def assert_rates(method, train, rates):
    found = learning_rates(method.facts(TINY).stages, train)
    assert found.dtype == np.float32 and found.shape == (train.steps,)
    np.testing.assert_allclose(found, rates, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_rise_to_the_peak_and_follow_the_schedule_from_there(schedule, warmup):
    train = TrainConfig(steps=20, learning_rate=0.5, schedule=schedule, warmup=warmup)
    rise = [0.05 * step / warmup for step in range(warmup)]
    rest = [0.05 * SCHEDULES[schedule](step / (20 - warmup)) for step in range(20 - warmup)]
    assert_rates(Slow(), train, rise + rest)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_ends_where_it_is_told_to(schedule):
    train = TrainConfig(steps=10, learning_rate=0.5, schedule=schedule, warmup=2, final_learning_rate=0.3)
    rest = [0.05 * (0.3 + 0.7 * SCHEDULES[schedule](step / 8)) for step in range(8)]
    assert_rates(Slow(), train, [0, 0.025, *rest])


def test_stages_share_the_warm_up():
    """Twelve updates in three stages: four of each, two of which rise to the peak. In two, with a factor for one."""
    train = TrainConfig(steps=12, learning_rate=0.5, schedule="constant", warmup=6)
    assert_rates(HiddenTransfer(layers=(0, 1, 2)), train, 3 * [0, 0.25, 0.5, 0.5])
    rates = np.array([0, 0.5 / 3, 1 / 3, 0.5, 0.5, 0.5])
    assert_rates(PPD(head="two_stage"), train, [*rates, *0.1 * rates])


def begin(method, train, base, count, stage=0):
    """The first state, and batches of so many random answers of one length."""
    rng = np.random.default_rng(0)
    answers = [AnsweredPrompt(rng.integers(0, 16, 4).tolist(), rng.integers(0, 16, 24).tolist()) for _ in range(count)]
    return first_state(Update.of(method, base.decoder.config, train, stage), train.seed, base), TrainingData(
        answers, train
    )


@dataclasses.dataclass(frozen=True)
class Squares(Method):
    """A method whose gradients are known: of the sum of squares of what it trains."""

    name = "squares"

    def init(self, key, base):
        return {"weights": jnp.array([2.0, -1.0])}

    def loss(self, trainable, base, batch, stage=0):
        return jnp.sum(trainable["weights"] ** 2), {}


def test_updates_are_those_of_adamw(tiny):
    """With weight decay and a clip that is active, and another rate for each of them."""
    train = dataclasses.replace(TRAIN, weight_decay=0.3, beta1=0.8, beta2=0.95, clip=1.5)
    state, data = begin(Squares(), train, tiny.base, 4)
    adamw = optax.chain(
        optax.clip_by_global_norm(1.5), optax.adamw(lambda step: 0.1 / (1 + step), 0.8, 0.95, weight_decay=0.3)
    )
    theirs = jax.tree.map(jnp.copy, state.trainable)
    expected = adamw.init(theirs)
    for step in range(4):
        rate = np.float32(0.1 / (1 + step))
        state, metrics = train_step(Update.of(Squares(), tiny.config, train), tiny.base, state, data.batch(step), rate)
        assert metrics["gradient_norm"] > 1.5
        change, expected = adamw.update({"weights": 2 * theirs["weights"]}, expected, theirs)
        theirs = optax.apply_updates(theirs, change)
        np.testing.assert_allclose(state.trainable["weights"], theirs["weights"], rtol=1e-6)


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
    before, update = jax.tree.map(np.array, state.trainable), Update.of(method, tiny.config, TRAIN, stage)
    for step in range(3):
        state, _ = train_step(update, tiny.base, state, data.batch(step), RATE)
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.tree.map(np.array, tiny.params))
    trained = update.moving(before)
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
        found[dtype.name] = train_step(Update.of(method, tiny.config, TRAIN), base, state, data.batch(0), RATE)
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
        _, metrics = train_step(Update.of(method, tiny.config, train), base, state, data.batch(0), RATE)
        updated.append([float(metrics[name]) for name in ("loss", "gradient_norm", "top1@1")])
    np.testing.assert_allclose(updated[1], updated[0], rtol=1e-4)


def test_one_gradient_is_held_however_many_are_added(tiny):
    """Gradients of microbatches are summed one by one: there is no stack of them."""
    train, method = TrainConfig(batch_size=3, microbatch=1, sequence_length=32), SPACE(distances=2, tuning="full")
    state, data = begin(method, train, tiny.base, 3)
    update = functools.partial(train_step, Update.of(method, tiny.config, train))
    program = str(jax.make_jaxpr(update)(tiny.base, state, data.batch(0), RATE))
    rows, columns = state.trainable["base"]["lm_head"].shape
    assert f"f32[{rows},{columns}]" in program and f"f32[3,{rows},{columns}]" not in program


def test_runs_of_other_rates_lengths_and_seeds_share_a_program(tiny):
    """And calls with any number of updates. By the first one Adam moves every weight by the rate."""
    changes = ({}, {"learning_rate": 0.5, "schedule": "linear", "warmup": 3}, {"steps": 30, "seed": 5, "eval_every": 1})
    one, many = train_step._cache_size(), train_steps._cache_size()
    for count, changed in enumerate(changes, 1):
        train = dataclasses.replace(TRAIN, beta1=0.5, **changed)  # which no other test has
        state, data = begin(PPD(), train, tiny.base, 4)
        update, rates = Update.of(PPD(), tiny.config, train), learning_rates((Stage(),), train)
        before = np.array(state.trainable["embeddings"])
        state, _ = train_step(update, tiny.base, state, data.batch(0), rates[3])
        np.testing.assert_allclose(np.abs(state.trainable["embeddings"] - before), rates[3], rtol=0.01)
        batches = jax.tree.map(lambda x: np.stack([x] * 3), data.batch(1))
        train_steps(update, tiny.base, state, batches, rates[1:4], np.int32(count))
    assert train_step._cache_size() == one + 1 and train_steps._cache_size() == many + 1


def test_several_updates_in_one_call_are_those_of_several_calls(tiny):
    """With an average; what was asked for is done, and no more."""
    method, train = PPD(ensemble=2), dataclasses.replace(TRAIN, ema=0.5, clip=1.0, microbatch=2)
    update = Update.of(method, tiny.config, train)
    (state, data), (other, _) = (begin(method, train, tiny.base, 12) for _ in range(2))
    batches, rates = [data.batch(step) for step in range(3)], np.array([0.1, 0.03, 0.2], np.float32)
    losses = []
    for batch, rate in zip(batches[:2], rates, strict=False):
        state, metrics = train_step(update, tiny.base, state, batch, rate)
        losses.append(metrics["loss"])
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
    other, metrics = train_steps(update, tiny.base, other, stacked, rates, np.int32(2))
    assert losses[0] != losses[1] and set(metrics) >= {"loss", "gradient_norm", "top1@1"}
    np.testing.assert_allclose(metrics["loss"], [*losses, 0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), state, other)
    assert other.average.count == 2


class Faint(PPD):
    """With a loss so small that gradients in float16 need a scale."""

    def loss(self, trainable, base, batch, stage=0):
        value, metrics = super().loss(trainable, base, batch, stage)
        return 1e-6 * value, metrics


def test_small_gradients_reach_what_is_trained_in_float16():
    tiny = make_tiny()
    update, tokens = Update.of(Faint(), TINY, dataclasses.replace(TRAIN, batch_size=1)), sequence(tiny)
    norms = []
    for dtype in ("float32", "float16"):
        base = Base(for_products(tiny.params, jnp.dtype(dtype)), Decoder(TINY))
        state = first_state(update, 0, tiny.base)
        _, metrics = train_step(update, base, state, batch_of(tokens, [[3, 5, 9]]), RATE)
        norms.append(float(metrics["gradient_norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
