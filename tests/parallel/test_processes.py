"""Settings of several processes. What they do together is tested in tests/training/test_processes.py."""

import pytest

from jaxspec.errors import UserError
from jaxspec.parallel.processes import ProcessConfig, join_processes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ProcessConfig(count=2), "give --processes.coordinator HOST:PORT"),
        (ProcessConfig("localhost", 2, 0), "coordinator must be HOST:PORT or auto, got 'localhost'"),
        (ProcessConfig("localhost:", 2, 0), "got 'localhost:'"),
        (ProcessConfig("1234", 2, 0), "got '1234'"),
        (ProcessConfig(":1234", 2, 0), "got ':1234'"),
        (ProcessConfig("localhost:1234", 2, 2), "index must be from 0 to count - 1, got 2 of 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        join_processes(config)
