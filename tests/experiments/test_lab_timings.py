"""Jobs that time: by rows and batch, in a process with other flags, and what XLA made of the loop."""

import gzip
import json
import os
import subprocess

import jax
import pytest

import experiments.lab.timings as timings
from experiments.lab.timings import count_instructions, count_thunks, dump_program, run_apart, time_drafter, time_steps
from jaxspec.errors import UserError
from jaxspec.machine import device_name
from tests.helpers.tiny import make_text_model

TINY = {"shapes": "tiny", "dtype": "float32", "rows": [2], "batch_sizes": [1], "cache_length": 64}
PROGRAM = """HloModule jit_decode, is_scheduled=true

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %add.9 = f32[2]{0} add(%p, %p)
}

%graph (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %fusion.1 = f32[2]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %gemm = (f32[2]{0}, s8[64]{0}) custom-call(%fusion.1), custom_call_target="__cublas$gemm"
}

%few (p: f32[2]) -> f32[2] {
  ROOT %fusion.2 = f32[2]{0} fusion(%p), kind=kLoop, calls=%fused
}

%many (p: f32[2]) -> f32[2] {
  ROOT %copy.1 = f32[2]{0} copy(%p)
}

%body (c: (s32[], /*index=1*/f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %x = f32[2]{0} get-tuple-element(%c), index=1
  %call = f32[2]{0} call(%x), to_apply=%graph
  %fusion.3 = f32[2]{0} fusion(%call), kind=kLoop, calls=%fused
  ROOT %switch = (s32[], f32[2]{0}) conditional(%x), branch_computations={%few, %many}
}

%condition (c: (s32[], f32[2])) -> pred[] {
  ROOT %less = pred[] compare(%c, %c), direction=LT
}

ENTRY %main (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %copy.2 = f32[2]{0} copy(%c)
  ROOT %while = (s32[], /*index=1*/f32[2]{0}) while(%c), condition=%condition, body=%body
}
"""


@pytest.fixture
def one_round(monkeypatch):
    monkeypatch.setattr(timings, "_ROUNDS", 1)
    monkeypatch.setattr(timings, "bandwidth", lambda rounds: 1e9)


def test_steps_are_timed_by_rows(one_round):
    found = time_steps("tiny", "float32", [1, 4], [2], 64)
    [curve] = found["curves"]
    assert curve["batch_size"] == 2 and curve["memory_milliseconds"] > 0
    assert curve["milliseconds"].keys() == {"1", "4"} and min(curve["milliseconds"].values()) > 0
    assert found["device"] == device_name() and found["gigabytes_per_second"] == 1


def test_a_batch_that_does_not_fit_leaves_the_others(one_round, monkeypatch):
    def times(drafters, cache_length, rounds, batch_size, steps):
        if batch_size == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return dict.fromkeys(drafters, 0.002)

    monkeypatch.setattr(timings, "step_times", times)
    one, two = time_steps("tiny", "float32", [1], [1, 2], 64)["curves"]
    assert one["milliseconds"] == {"1": 2} and "Out of memory" in two["error"]


def test_samples_have_as_many_steps_as_the_cache_has_room_for(one_round, monkeypatch):
    """A tree of one level accepts a candidate more than its root."""
    seen = []

    def times(drafters, cache_length, rounds, batch_size, steps):
        seen.append(steps)
        return dict.fromkeys(drafters, 0.002)

    monkeypatch.setattr(timings, "step_times", times)
    monkeypatch.setattr(timings.jax, "default_backend", lambda: "gpu")
    for cache_length in (64, 512):
        timings._milliseconds({"2": timings.bare(make_text_model(num_layers=1), 2)}, 1, cache_length)
    assert seen == [16, 32]


def test_drafting_is_timed_beside_autoregressive_steps(one_round, monkeypatch):
    monkeypatch.setattr(timings, "default_model", lambda dtype: make_text_model(num_layers=1))
    found = time_drafter("suffix", ["best:4"], "float32", 64)
    assert found["milliseconds"].keys() == {"autoregressive", "best:4"} and min(found["milliseconds"].values()) > 0


@pytest.mark.parametrize("timed", [time_steps, time_drafter])
def test_steps_without_graphs_are_timed_apart_with_the_same_settings(timed, monkeypatch):
    calls = []
    monkeypatch.setattr(timings, "run_apart", lambda *arguments: calls.append(arguments) or {"device": "apart"})
    drafting = {"drafter": "suffix", "trees": ["best:4"], "dtype": "float32", "cache_length": 64, "batch_size": 2}
    settings = drafting if timed is time_drafter else TINY
    assert timed(**settings, without_graphs=True, seconds=9) == {"device": "apart"}
    assert calls == [({"function": timed.__name__} | settings, timings.NO_GRAPHS, 9)]


@pytest.mark.slow
def test_the_program_of_the_loop_is_kept_and_counted(tmp_path, monkeypatch):
    """From a process with the flags of this one and its own, all known to XLA, which else would end it."""
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {timings.NO_GRAPHS}")
    found = dump_program({"function": "time_steps"} | TINY, str(tmp_path / "dump"))
    [name] = [name for name in found["files"] if name.endswith("after_optimizations.txt.gz")]
    assert "HloModule jit_decode" in gzip.decompress((tmp_path / "dump" / name).read_bytes()).decode()
    assert sum(found["counts"][name.removesuffix(".gz")]["body"].values()) > 10
    assert found["timed"]["curves"][0]["milliseconds"]["2"] > 0
    assert timings.NO_GRAPHS in found["timed"]["xla_flags"] and "xla_dump_to" in found["timed"]["xla_flags"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [(("", 1), "no such flag"), (('{"device": "another"}', 0), "ran on another")],
)
def test_a_process_that_fails_or_lacks_the_device_is_an_error(monkeypatch, returned, message):
    """JAX falls back to a CPU where the GPU's memory is taken."""
    done = subprocess.CompletedProcess([], returned[1], f"noise\n{returned[0]}\n", "no such flag")
    monkeypatch.setattr(timings.subprocess, "run", lambda command, **settings: done)
    with pytest.raises(UserError, match=message):
        run_apart(TINY, "", 1)


def test_a_process_that_takes_too_long_is_an_error():
    with pytest.raises(UserError, match=r"more than 0\.01 seconds"):
        run_apart(TINY, "", 0.01)


def test_the_result_is_the_last_line_printed(one_round, capsys):
    timings.main([json.dumps({"function": "time_steps"} | TINY)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["curves"][0]["batch_size"] == 1


def test_kernels_of_graphs_are_counted_and_those_of_branches_apart():
    """What stands outside of the loop or only names values does not count."""
    found = count_instructions(PROGRAM)
    assert found["body"] == {"fusion": 2, "custom-call": 1, "conditional": 1}
    assert found["nested"] == {"fusion": 1, "copy": 1}
    assert count_instructions("HloModule other\n") == {"body": {}, "nested": {}}


def test_thunks_are_counted_by_their_depth():
    text = "000: kCopy  copy.1\n001: kWhile  while\n  000: kCommandBuffer  a\n  001: kKernel  b\n  002: kKernel  c\n"
    assert count_thunks(text) == {"0": {"kCopy": 1, "kWhile": 1}, "1": {"kKernel": 2, "kCommandBuffer": 1}}
