"""What is asked of the machine."""

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import threading

import numpy as np

from jaxspec.machine import keep_freed_memory


def faults():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(50_000_000, np.float32)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


faults()
keep_freed_memory()
thread = threading.Thread(target=faults)  # has an arena of its own where it may
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    """Page faults while 200 MB are written where as many have just been freed, before and after."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True, env=unset)
    before, after = map(int, done.stdout.split())
    assert after < 10 < before
