"""Learning rates by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import TrainConfig
from jaxspec.training.step import optimizer

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
