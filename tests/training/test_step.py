"""Learning rates by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import TrainConfig
from jaxspec.methods import HiddenTransfer
from jaxspec.training.step import optimizer, stage_optimizer

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
