"""Chances are calibrated for the temperature that a token is drawn at, in every row for its own."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import Offer
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.method import Facts, Method
from jaxspec.decoding.sampling import make_row_sampler, make_sampler
from jaxspec.decoding.shape import StaticTree
from jaxspec.decoding.source import Calibrations, DeviceSource
from jaxspec.trees import chain
from tests.helpers.drafting import drafting_of

GREEDY, COLD, WARM, HOT = np.array([[[9, -1], [8, -2]], [[1, 0], [2, -4]], [[3, -2], [6, -8]], [[4, 1], [6, 0]]], float)
FITTED = Calibrations(jnp.array([0, 0.5, 0.75, 1.25]), jnp.array([GREEDY, COLD, WARM, HOT], jnp.float32))
BETWEEN = {
    0: GREEDY,
    0.1: COLD,  # never between that and greedy decoding
    0.5: COLD,
    0.6: 0.6 * COLD + 0.4 * WARM,
    0.75: WARM,
    1.0: 0.5 * WARM + 0.5 * HOT,
    1.25: HOT,
    7: HOT,
}


@pytest.mark.parametrize(("temperature", "table"), BETWEEN.items())
def test_a_temperature_takes_values_between_those_beside_it(temperature, table):
    found = FITTED.at(make_sampler(SamplingConfig(temperature)))
    np.testing.assert_allclose(found, [table], rtol=1e-5, atol=1e-5)


def test_a_fitted_temperature_takes_its_own_values():
    for temperature, table in zip(FITTED.temperatures, FITTED.tables, strict=True):
        np.testing.assert_array_equal(FITTED.at(make_sampler(SamplingConfig(float(temperature))))[0], table)


def test_rows_take_the_values_of_their_temperatures():
    temperatures = [0.6, 0, 7, 1.0, 0]
    found = FITTED.at(make_row_sampler([SamplingConfig(t) for t in temperatures]))
    np.testing.assert_allclose(found, [BETWEEN[t] for t in temperatures], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda configs: make_sampler(configs[0]), make_row_sampler], ids=["all", "rows"])
@pytest.mark.parametrize("temperature", [0.3, 0.75, 2.0])
def test_with_few_fitted_temperatures_the_nearest_counts(make, temperature):
    """Of one above 0 its values, of none those of greedy decoding."""
    sampler = make([SamplingConfig(temperature)])
    for count, table in ((1, GREEDY), (2, COLD)):
        few = jax.tree.map(lambda x, count=count: x[:count], FITTED)
        np.testing.assert_array_equal(few.at(sampler), [table])


def test_all_temperatures_are_one_program():
    at = jax.jit(lambda calibrations, sampler: calibrations.at(sampler))
    for temperature in (0.3, 0.6, 1.0):
        np.testing.assert_allclose(
            at(FITTED, make_sampler(SamplingConfig(temperature))),
            FITTED.at(make_sampler(SamplingConfig(temperature))),
            rtol=1e-5,
        )
    assert at._cache_size() == 1


@dataclasses.dataclass(frozen=True)
class Certain(Method):
    """One candidate at each of two distances, always of the same chance."""

    name: ClassVar[str] = "certain"

    def facts(self, config):
        return Facts(2)

    def offer(self, context, method_state):
        tokens = jnp.ones((len(context.root), 2, 1), jnp.int32)
        return Offer(tokens, jnp.ones((1, 1, 1), bool), jnp.full(tokens.shape, -3.0))


def test_what_a_row_is_offered_is_calibrated_for_its_temperature(tiny):
    temperatures = [0, 0.6, 1.0]
    drafter = DeviceDrafter((DeviceSource({}, FITTED, Certain()),), StaticTree(chain(2).arrays(0)))
    context = drafting_of(None, [5] * 3, [9] * 3, base=tiny.base, width=1, depth=2)
    samplings = [SamplingConfig(temperature) for temperature in temperatures]
    [mixed] = drafter.offer([context.replace(sampler=make_row_sampler(samplings))], [()])
    for row, sampling in enumerate(samplings):
        a, b = BETWEEN[sampling.temperature].T
        np.testing.assert_allclose(mixed.log_p[row, :, 0], -3 * a + b, rtol=1e-5)
        [alone] = drafter.offer([context.replace(sampler=make_sampler(sampling))], [()])
        np.testing.assert_allclose(alone.log_p[row], mixed.log_p[row], rtol=1e-5)
