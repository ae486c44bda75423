"""Times of the sizes of a drafter's steps, measured with the program that decodes; sizes priced by first steps."""

import dataclasses

import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.drafters.costs import RowCosts
from jaxspec.drafters.defaults import cost_name, with_default
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation import sizes
from jaxspec.generation.generate import generate, stream
from jaxspec.generation.job import Job, Settings
from jaxspec.generation.sizes import SizeTimer
from jaxspec.methods import PPD, Hydra, Suffix
from tests.helpers.methods import union
from tests.helpers.tiny import make_prompts, make_text_model


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(make_text_model(num_layers=1), eos=())


@pytest.fixture
def drafter(model):
    return with_default(union([PPD(), Suffix()], model, 8))


@pytest.fixture
def late(monkeypatch):
    """A clock on which a step takes as many seconds as the list says that is returned, the last of them again."""
    clock, seconds = [0.0], [1.0]
    monkeypatch.setattr(sizes.time, "perf_counter", lambda: clock[0])

    def timed(decoding, state, steps):
        clock[0] += seconds.pop(0) if len(seconds) > 1 else seconds[0]
        return decode(decoding, state, steps)

    monkeypatch.setattr(sizes, "decode", timed)
    return seconds


@pytest.mark.parametrize("trial", [0.1, 0.8, 3.0])
def test_every_size_is_forced_and_the_smallest_rests(drafter, monkeypatch, trial):
    """What runs is told by the pace: its time grows by the cost of the size, and it counts steps without a draft."""
    ran = []

    def counted(decoding, state, steps):
        size = int(state.draft.size[0])
        state = decode(decoding, state, steps)
        ran.append((size, bool(state.pace.rests(trial))))
        return state

    monkeypatch.setattr(sizes, "decode", counted)
    job = Job(drafter, Settings(SamplingConfig()), 2)
    state = job.begin([[1, 2, 3]] * 2, 8, 2, *job.sizes(3, 8)).state
    timer = SizeTimer(job.decoding)
    timer.measure(timer.measure(state))
    assert ran == 2 * [(0, True), (0, False), (1, False), (2, False), (3, False)]
    assert timer.times.sizes.shape == (4,) and (timer.times.sizes > 0).all() and timer.times.drafting >= 0


def test_the_spread_is_that_of_the_two_fastest_steps_of_a_kind(drafter, late):
    """The first step may compile, and is left out where two others are faster."""
    late[:] = [9.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.1, 1.0, 1.0, 2.5, 4.0, 1.0, 1.0, 1.0]
    job = Job(drafter, Settings(SamplingConfig()), 1)
    state, timer = job.begin([[1, 2, 3]], 8, 1, *job.sizes(3, 8)).state, SizeTimer(job.decoding)
    for _ in range(3):
        state = timer.measure(state)
    assert timer.times.spread == pytest.approx(1.25)


@pytest.mark.parametrize(("temperature", "batch_size"), [(0.0, 1), (0.8, 2)])
def test_first_steps_price_sizes_and_change_no_text(drafter, model, late, temperature, batch_size):
    """Of three rounds with five kinds of steps the fastest count: 4, 5, 6 and 9 seconds."""
    settings = {"sampling": SamplingConfig(temperature), "seed": 3, "batch_size": batch_size}
    late[:] = [9.0, 9.0, 9.0, 9.0, 9.0, 4.0, 4.5, 5.0, 6.0, 9.0, 7.0, 7.0, 7.0, 7.0, 9.0]
    ours, plain = (generate(each, make_prompts(3), 40, **settings) for each in (drafter, autoregressive(model)))
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    [(circumstances, times)] = drafter.times.items()
    assert circumstances == (batch_size, int(temperature > 0)) and times.tolist() == [4000, 5000, 6000, 9000]
    job = Job(drafter, Settings(SamplingConfig(temperature)), batch_size)
    assert np.asarray(job.decoding.costs).tolist() == [[4000, 5000, 6000, 9000]]


def test_nothing_is_drafted_once_first_steps_were_dear(model, late):
    drafter = with_default(union([Suffix()], model, 8))
    late[:] = [1.0, 1.0, 50.0, 90.0] * 3
    [answer] = generate(drafter, [[1, 2, 3, 4] * 8], 40)
    [again] = generate(drafter, [[1, 2, 3, 4] * 8], 40)
    assert again.tokens == answer.tokens and again.candidates == 0


def test_a_drafter_measures_once(drafter, monkeypatch):
    generate(drafter, [[1, 2, 3]], 40)
    monkeypatch.setattr(sizes, "decode", lambda *args: pytest.fail("measured again"))
    assert len(drafter.times) == 1 and list(stream(drafter, [1, 2, 3], 20))


def test_an_answer_that_is_too_short_to_measure_leaves_prices_as_they_are(drafter, model):
    pieces = list(stream(drafter, [1, 2, 3], 5))
    assert pieces[-1].tokens == generate(autoregressive(model), [[1, 2, 3]], 5)[0].tokens and not drafter.times


@pytest.mark.parametrize("drafting", [True, False], ids=["all is measured", "drafting is guessed"])
def test_what_was_measured_is_not_measured_again(model, drafting):
    drafter = union([Hydra(), Suffix()], model, 8)
    name = cost_name(drafter) if drafting else "another drafter"
    drafter = with_default(drafter, costs=RowCosts((1.0, 8.0), ((1.0, 1.1),) * 2, {name: (0.1, 0.1)}))
    generate(drafter, [[1, 2, 3]], 40)
    assert len(drafter.times) == (0 if drafting else 1)


def test_sizes_that_a_user_has_priced_keep_their_prices(model):
    drafter = union([Suffix()], model, 8).with_tree("best:1@20,4@30")
    generate(drafter, [[1, 2, 3]], 40)
    assert not drafter.times
