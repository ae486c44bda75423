"""Times of the sizes of a drafter's steps, measured with the program that decodes; sizes priced by first steps."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Typical
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


@pytest.mark.parametrize(("restarts", "texts"), [(True, 2), (False, 1)], ids=["restarts", "a row is spare"])
@pytest.mark.parametrize("trial", [0.1, 0.8, 3.0])
def test_every_size_is_forced_and_the_smallest_rests(drafter, monkeypatch, trial, restarts, texts):
    """In all steps, however dear a draft is; and drafts are due after them."""
    ran = []

    def counted(decoding, state, steps):
        size = int(state.draft.size[0])
        state = decode(decoding, state, steps)
        ran.append((size, bool(state.pace.rests(trial))))
        return state

    monkeypatch.setattr(sizes, "decode", counted)
    job = Job(drafter, Settings(SamplingConfig()), 2)
    state = job.begin([[1, 2, 3]] * texts, 60, 2, *job.sizes(3, 60)).state
    timer = SizeTimer(job.decoding, restarts=restarts)
    state = timer.measure(timer.measure(state))
    kinds = [(0, True), *([(0, False)] if restarts else []), (1, False), (2, False), (3, False), (4, False)]
    assert ran == 2 * kinds
    assert not decode(job.decoding, state, np.int32(1)).pace.rests(trial)
    assert timer.times.sizes.shape == (5,) and (timer.times.sizes > 0).all() and timer.times.drafting >= 0


def test_the_spread_is_that_of_the_two_fastest_steps_of_a_kind(drafter, late):
    """The first step may compile, and is left out where two others are faster."""
    late[:] = [9.0, *[1.0] * 5, 2.0, 1.0, 1.1, *[1.0] * 3, 2.5, 4.0, *[1.0] * 4]
    job = Job(drafter, Settings(SamplingConfig()), 1)
    state, timer = job.begin([[1, 2, 3]], 8, 1, *job.sizes(3, 8)).state, SizeTimer(job.decoding)
    for _ in range(3):
        state = timer.measure(state)
    assert timer.times.spread == pytest.approx(1.25)


def prices(drafter, temperature=0.0, batch_size=1):
    """What decoding goes by, greedy or sampled."""
    return np.asarray(Job(drafter, Settings(SamplingConfig(temperature)), batch_size).decoding.costs)[0].tolist()


@pytest.mark.parametrize(("temperature", "batch_size"), [(0.0, 1), (0.8, 2)])
def test_first_steps_price_sizes_and_change_no_text(drafter, model, late, temperature, batch_size):
    """Of four rounds the fastest step of each size counts; a larger size of the same kind is never cheaper."""
    settings = {"sampling": SamplingConfig(temperature), "seed": 3, "batch_size": batch_size}
    late[:] = [*[9.0] * 5, 4.0, 5.0, 7.0, 6.0, 5.5, 4.5, 6.0, 7.0, 6.5, 7.0, 9.0]
    ours, plain = (generate(each, make_prompts(3), 40, **settings) for each in (drafter, autoregressive(model)))
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert prices(drafter, temperature, batch_size) == [4000, 5000, 7000, 6000, 6000]
    assert prices(drafter, temperature, 3) != [4000, 5000, 7000, 6000, 6000]


def test_nothing_is_drafted_once_first_steps_were_dear(model, late):
    prompt, costs = [1, 2, 3, 4] * 8, RowCosts((1.0, 8.0), ((1.0, 1.1),) * 2)
    [answer] = generate(with_default(union([Suffix()], model, 8), costs=costs), [prompt], 40)
    assert answer.candidates > 0
    drafter = with_default(union([Suffix()], model, 8))
    late[:] = [1.0, 50.0, 90.0] * 4
    generate(drafter, [prompt], 40)
    [again] = generate(drafter, [prompt], 40)
    assert again.tokens == answer.tokens and again.candidates == 0


def test_a_drafter_measures_once_and_nothing_recompiles(drafter, late, monkeypatch):
    generate(drafter, [[1, 2, 3]], 40)
    monkeypatch.setattr(sizes, "decode", lambda *args: pytest.fail("measured again"))
    [answer] = generate(drafter, [[1, 2, 3]], 40)
    assert answer.compile_seconds == 0 and list(stream(drafter, [1, 2, 3], 20))


def test_times_add_up_over_short_answers(drafter, model, late):
    typical, plain = prices(drafter), generate(autoregressive(model), [[1, 2, 3]], 5)[0]
    late[:] = [1.0]
    pieces = list(stream(drafter, [1, 2, 3], 5))
    assert pieces[-1].tokens == plain.tokens and prices(drafter) == typical
    for _ in range(3):
        generate(drafter, [[1, 2, 3]], 5)
    assert prices(drafter) == [1000] * 5


def test_drafts_are_due_after_steps_were_timed(drafter):
    """Where an answer ended within a round, the steps that rest are the last of the next rounds."""
    job = Job(drafter, Settings(), 1)
    run = job.begin([[1, 2, 3]], 40, 1, *job.sizes(3, 40))
    [by_capacity], rests = drafter.samples.values(), [1.0]
    by_capacity[run.state.cache.capacity] = {(0, False): rests}
    for _ in job.price_sizes(run):
        assert int(run.state.pace.idle[0]) < 0
    assert len(rests) == 5


def test_forced_sizes_do_not_count_for_the_pace(drafter):
    job = Job(drafter, Settings(), 1)
    run = job.begin([[1, 2, 3]], 40, 1, *job.sizes(3, 40))
    job.decode(run, 3)
    before = jax.device_get(run.state.pace)
    for _ in job.price_sizes(run):
        assert run.state.pace.tokens == before.tokens and run.state.pace.time == before.time


def test_an_answer_that_is_complete_takes_no_steps(drafter):
    [answer] = stream(drafter, [1, 2, 3], 1)
    assert answer.steps == 0 and len(answer.tokens) == 1


def test_what_one_call_measures_prices_the_batches_of_another(drafter, late):
    late[:] = [1.0]
    early, other = (Job(drafter, Settings(), 1) for _ in range(2))
    batches = [job.begin([[1, 2, 3]], 40, 1, *job.sizes(3, 40)) for job in (early, other)]
    for job, run in zip((early, other), batches, strict=True):
        steps = sum(1 for _ in job.price_sizes(run))
        assert np.asarray(job.decoding.costs)[0].tolist() == [1000] * 5 and steps == (4 if job is early else 0)


def test_times_with_another_cache_are_measured_apart(drafter, late):
    """Where the answers before were too short."""
    late[:] = [1.0]
    list(stream(drafter, [1, 2, 3], 3))
    late[:] = [5.0]
    list(stream(drafter, [1, 2, 3], 200))
    assert prices(drafter) == [5000] * 5


def test_times_of_a_busy_machine_are_not_believed(drafter, late):
    typical = prices(drafter)
    late[:] = [1.0] * 5 + [2.0] * 15 + [1.2]
    generate(drafter, [[1, 2, 3]], 40)
    assert prices(drafter) == typical
    generate(drafter, [[1, 2, 3]], 40)
    assert prices(drafter) == [1200] * 5


@pytest.mark.parametrize("drafting", [True, False], ids=["all is measured", "drafting is guessed"])
def test_sizes_are_timed_where_a_part_of_their_costs_is_guessed(model, late, drafting):
    drafter = union([Hydra(), Suffix()], model, 8)
    name = cost_name(drafter) if drafting else "another drafter"
    drafter = with_default(drafter, costs=RowCosts((1.0, 8.0), ((1.0, 1.1),) * 2, {name: (0.1, 0.1)}))
    generate(drafter, [[1, 2, 3]], 40)
    assert (prices(drafter) == [1000] * 3) is not drafting


def test_prices_stay_where_a_user_gave_them_or_they_decide_the_text(model, drafter, late):
    priced = union([Suffix()], model, 8).with_tree("best:1@20,4@30")
    generate(priced, [[1, 2, 3]], 40)
    assert prices(priced) == [20, 30]
    typical = prices(drafter, 0.8)
    generate(drafter, [[1, 2, 3]], 40, sampling=SamplingConfig(0.8), acceptance=Typical())
    assert prices(drafter, 0.8) == typical
