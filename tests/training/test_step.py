"""One update: learning rates by hand, and what it leaves alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import TrainConfig
from jaxspec.methods import PPD, BiTA, HiddenTransfer
from jaxspec.model.base import Base
from jaxspec.training.batches import TrainingData
from jaxspec.training.data import Answer
from jaxspec.training.step import first_state, moving, optimizer, stage_optimizer, train_step
from tests.helpers.methods import settings
from tests.helpers.tiny import make_tiny

SCHEDULES = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1,
}


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_rise_to_the_peak_and_go_on_from_there(schedule, warmup):
    train = TrainConfig(learning_rate=0.5, schedule=schedule, warmup=warmup)
    adamw, weight, rates = optimizer(train, 20, 0.1), jnp.zeros(()), []
    state = adamw.init(weight)
    for _ in range(21):  # a gradient that is always the same moves a weight by the rate
        update, state = adamw.update(jnp.ones(()), state, weight)
        rates.append(-float(update))
    rise = [0.05 * step / warmup for step in range(warmup)]
    rest = [0.05 * SCHEDULES[schedule](step / (20 - warmup)) for step in range(21 - warmup)]
    np.testing.assert_allclose(rates, rise + rest, rtol=1e-4, atol=1e-7)


def test_stages_share_the_warm_up():
    """Twelve updates in three stages: four of each, two of which rise to the peak."""
    train = TrainConfig(steps=12, learning_rate=0.5, schedule="constant", warmup=6)
    method, weight = HiddenTransfer(layers=(0, 1, 2)), jnp.zeros(())
    for stage in range(3):
        adamw, rates = stage_optimizer(method, train, stage), []
        state = adamw.init(weight)
        for _ in range(4):
            update, state = adamw.update(jnp.ones(()), state, weight)
            rates.append(-float(update))
        np.testing.assert_allclose(rates, [0, 0.25, 0.5, 0.5], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "stage"),
    [
        (PPD(head="one_stage"), 0),
        (PPD(head="two_stage"), 0),
        (BiTA(prompts=2), 0),
        (HiddenTransfer(layers=(0, 1, 2)), 1),
    ],
    ids=lambda value: settings(value) if not isinstance(value, int) else str(value),
)
def test_an_update_moves_what_its_stage_trains_and_nothing_else(method, stage):
    """Not the base either, whose memory a state that began as a part of it must not give away."""
    model = make_tiny()
    base, frozen = Base(model.params, model.decoder), jax.tree.map(np.array, model.params)
    rng = np.random.default_rng(0)
    answers = [Answer(rng.integers(0, 16, 4).tolist(), rng.integers(0, 16, 24).tolist()) for _ in range(8)]
    train = TrainConfig(steps=12, batch_size=4, sequence_length=32, insertions=8, learning_rate=1e-2)
    data, state = TrainingData(answers, train), first_state(method, train, stage, base)
    before = jax.tree.map(np.array, state.trainable)
    for step in range(3):
        state, _ = train_step(method, train, stage, base, state, data.batch(step))
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.tree.map(np.array, base.params))
    trained = moving(method, before, stage)
    assert trained.keys() <= before.keys() == state.trainable.keys()
    for name, part in before.items():
        same = jax.tree.map(lambda x, y: np.array_equal(x, y), part, state.trainable[name])
        assert jax.tree.leaves(same) == [name not in trained] * len(jax.tree.leaves(same)), name
