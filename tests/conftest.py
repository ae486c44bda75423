"""Tests run on CPU, without network."""

import contextlib
import ctypes
import gc
import itertools
import os
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what one worker has compiled the others read, until all are done
    _PROGRAMS = tempfile.TemporaryDirectory(prefix="jaxspec-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

import jaxspec.drafters.costs
import jaxspec.tuning.layouts
import jaxspec.weights.layouts
from jaxspec.machine import make_room_for_programs
from jaxspec.tuning.layouts import ROWS
from jaxspec.weights.shapes import SHAPES
from tests.helpers.tiny import TINY, TINY_TEXT, make_tiny

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 8)  # for tests of meshes


def pytest_configure(config):
    """Tests on tiny models wait for the compiler, not for its code: compile them without optimisation.

    Eight devices on two cores wait for each other, and XLA ends a process in which one is 40 seconds late.
    """
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {patient}"
    tests = config.getoption("markexpr")
    if "not slow" in tests or "not optimized" in tests:
        quick = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        if jax.__version_info__ < (0, 11):  # later ones end a process that is given this flag
            quick += " --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] += f" {quick}"
        jaxspec.weights.layouts.BLOCK = 8  # which divides the kernels of tiny models


SHAPES.update({"tiny": TINY, "tiny-text": TINY_TEXT})  # so that a RunConfig can name them


def pytest_collection_finish():
    """What is loaded by now stays: no need to look through it for garbage again and again."""
    gc.freeze()
    gc.set_threshold(20_000)


_TESTS, _COSTS = itertools.count(1), itertools.count()


def give_back_memory():
    """Hand freed memory back to the system, which glibc keeps: compilers leave gigabytes of it."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def pytest_runtest_teardown():
    """Every compiled program holds memory mappings, of which systems grant only so many: forget some now and then."""
    number = next(_TESTS)
    if number % 10 == 0:
        make_room_for_programs(30_000)
        give_back_memory()
    if number % 30 == 0 and sys.platform != "linux":
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def devices():
    """Eight, whichever test comes first: a dry run sets their number where JAX has not begun."""
    assert jax.device_count("cpu") == 8


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Tests neither read nor write layouts and costs in the user's cache, but in this folder."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxspec.weights.layouts, "FILE", folder / "layouts.json")
        patch.setattr(jaxspec.drafters.costs, "FILE", folder / "costs.json")
        yield folder


@pytest.fixture(autouse=True)
def no_costs(cache, monkeypatch):
    """Each test has a file of costs of its own: what one measures decides no drafts of another."""
    monkeypatch.setattr(jaxspec.drafters.costs, "FILE", cache / f"costs-{next(_COSTS)}.json")


@pytest.fixture
def equal_layouts(tmp_path, monkeypatch):
    """All layouts are found equally fast, and a file of the test's own remembers the default."""
    monkeypatch.setattr(jaxspec.weights.layouts, "FILE", tmp_path / "layouts.json")
    times = {(rows, n): [1.0] * 3 for rows in ROWS for n in (0, jaxspec.weights.layouts.BLOCK)}
    monkeypatch.setattr(jaxspec.tuning.layouts, "measure_products", lambda kernels, dtype: times)


@pytest.fixture(scope="session")
def tiny():
    """A random model over a vocabulary of 16, so that acceptances, rejections, EOS and token 0 are all common."""
    return make_tiny(seed=1)
