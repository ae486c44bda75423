"""GPUs that are not here: programs can be compiled for them."""

import pytest

from jaxspec.parallel.chips import absent_mesh


def absent_gpus(config):
    """A mesh of H100s; skips the test where the compiler for them is not installed."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    return absent_mesh(config, "h100")[0]


def compiled(lowered):
    """The text of a program; without trying its products' variants, for which a GPU is needed."""
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()
