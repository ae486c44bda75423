"""How many steps a sample times."""

import itertools
import types

import jaxspec.tuning.latency as latency
from jaxspec.tuning.latency import STEPS, bare, step_times


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
