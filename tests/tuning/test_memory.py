"""The most memory that was used, since it was last asked to be forgotten."""

import sys

import numpy as np
import pytest

from jaxspec.tuning.memory import forget_peak, peak_memory


@pytest.mark.skipif(sys.platform != "linux", reason="no other system forgets")
def test_a_peak_is_forgotten():
    size = 1 << 28
    filled = np.ones(size, np.int8)
    before = peak_memory()
    assert before >= filled.nbytes
    del filled
    forget_peak()
    assert peak_memory() < before - size // 2
