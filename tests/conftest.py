"""Tests run on CPU, without network."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

import jaxspec.model.load
from tests.tiny import make_tiny

jax.config.update("jax_default_matmul_precision", "highest")


def pytest_configure(config):
    """Tests on tiny models wait for the compiler, not for its code: compile them without optimisation."""
    if config.getoption("markexpr") == "not slow":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
        jaxspec.model.load.BLOCK = 8  # which divides the kernels of tiny models


@pytest.fixture(scope="session")
def tiny():
    """A random model over a vocabulary of 16, so that acceptances, rejections, EOS and token 0 are all common."""
    return make_tiny(seed=1)
