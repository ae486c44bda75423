"""How long steps take: what a sample times, the curve through measured sizes, and what sources add."""

import itertools
import re
import types

import pytest

import jaxspec.tuning.latency as latency
from jaxspec.config import SamplingConfig
from jaxspec.methods import Medusa, PromptLookup
from jaxspec.trees import chain
from jaxspec.tuning.latency import STEPS, bare, fit_latency, step_times
from tests.helpers.methods import union


def test_a_sample_times_as_many_steps_as_asked_for(tiny, monkeypatch):
    """And says how long one of them took."""
    ran, clock = [], itertools.count()
    monkeypatch.setattr(latency, "decode", lambda decoding, state, steps: ran.append(int(steps)) or state)
    monkeypatch.setattr(latency, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))  # a second a look
    latency.StepTimer(bare(tiny, 2), 1, 64)
    timer = latency.StepTimer(bare(tiny, 2), 1, 64, steps=16)
    assert ran == [STEPS, 16] and timer() == 1 / 16
    step_times({"two": bare(tiny, 2)}, 64, 1, steps=8)
    assert ran[-1] == 8


def test_latency_is_increasing_and_straight_between_and_beyond_the_measured_sizes():
    latency = fit_latency({8: 3.0, 1: 1.0, 4: 2.0, 6: 1.8})
    assert latency.rows == (1, 4, 6, 8) and latency.seconds == (1.0, 2.0, 2.0, 3.0)
    assert [latency(r) for r in (1, 2.5, 5, 7, 10)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 4.0])


def test_costs_are_those_of_rows_and_of_what_each_source_adds(tiny, monkeypatch):
    """Heads take longer by the depth of a fixed tree; a lookup fills none."""
    drafter, timed = union([Medusa(heads=3), PromptLookup(length=4)], tiny, 8), []

    def step_times(drafters, *circumstances):
        timed.extend(drafters)
        heads = {(("medusa", 0), 0): 1.0, (("medusa", 0), 1): 1.0, (("medusa", 0), 3): 3.0}
        return {key: 1.0 + 0.5 * made.num_nodes + heads.get(key, 0) for key, made in drafters.items()}

    monkeypatch.setattr(latency, "step_times", step_times)
    costs = latency.measure_costs([drafter], 1, 64, 6, SamplingConfig())
    assert costs.latency.rows == (1, 2, 3, 4, 5, 6) and len(timed) == 10
    assert costs.drafting == {("medusa", 0): {0: 1.0, 1: 1.0, 3: 3.0}, ("prompt_lookup", 0): {0: 0.0}}
    assert costs(drafter, 4) == 1.0 + 0.5 * 4 + 1.0 and costs(drafter) == 1.0 + 0.5 * 8 + 1.0
    heads = latency.with_sources(drafter, drafter.sources[:1], chain(2))
    assert costs(heads) == 1.0 + 0.5 * 3 + 2.0


def test_the_time_left_is_that_of_what_is_going_on(capsys, monkeypatch):
    """Programs that take half a minute to compile do not make runs of a second long."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Timer:
        def __init__(self, *how):
            now[0] += 30

        def __call__(self):
            now[0] += 1
            return 1.0

    monkeypatch.setattr(latency, "StepTimer", Timer)
    step_times(dict.fromkeys("abcdef"), 64, 10)
    lines = re.findall(r"(\w+): (\d+)/(\d+) .*, ([\d.]+) min left", capsys.readouterr().err)
    assert {label for label, *_ in lines} == {"compiling", "measuring"} and len(lines) > 6
    for label, done, total, left in lines:
        seconds = (int(total) - int(done)) * (30 if label == "compiling" else 1)
        assert float(left) == pytest.approx(seconds / 60, abs=0.06)
