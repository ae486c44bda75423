"""What is asked of the machine."""

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource

import numpy as np

from jaxspec.machine import keep_freed_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(50_000_000, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print(faults())
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    """Page faults while 200 MB are written where as many have just been freed, before and after."""
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 10 < before
