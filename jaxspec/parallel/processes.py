"""Several processes, one run: a host of a TPU pod or of a GPU cluster each, or two on one machine for a test."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxspec.errors import UserError, first_line


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """Settings by which processes find each other.

    Attributes:
      coordinator: host:port of the first one; `auto` on TPU pods and under Slurm; empty: there is only one.
      count: how many there are.
      index: which of them this is, from 0.
    """

    coordinator: str = ""
    count: int = 1
    index: int = 0


def join_processes(config: ProcessConfig) -> None:
    """Meet the other processes, before JAX looks for devices. Raises UserError for bad settings, or if nobody comes."""
    if not config.coordinator:
        if config.count != 1 or config.index:
            raise UserError("processes: give --processes.coordinator HOST:PORT, the same for all of them")
        return
    settings = {}
    if config.coordinator != "auto":
        address, _, port = config.coordinator.rpartition(":")
        if not (address and port.isdecimal()):
            raise UserError(f"processes: coordinator must be HOST:PORT or auto, got {config.coordinator!r}")
        if not 0 <= config.index < config.count:
            raise UserError(f"processes: index must be from 0 to count - 1, got {config.index} of {config.count}")
        settings = dict(coordinator_address=config.coordinator, num_processes=config.count, process_id=config.index)
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is handled by whoever trains
    try:
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"processes: could not meet at {config.coordinator!r} ({first_line(error)})") from None


def is_leader() -> bool:
    """Whether this process is the one that writes files."""
    return jax.process_index() == 0


def wait_for_all(where: str) -> None:
    """Return when every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils  # slow to import, and only several processes need it

        multihost_utils.sync_global_devices(where)


def check_alike(content: bytes, what: str) -> None:
    """Raise UserError unless every process has the same: what they read must lie on a disk that all of them see."""
    if jax.process_count() > 1:
        digest = np.frombuffer(hashlib.sha256(content).digest()[:8], np.uint32)
        if (gathered(digest) != digest).any():
            raise UserError(f"{what} is not the same for all processes: give folders that they all see")


def as_leader(action: Callable[[], Any]) -> None:
    """Have the first process do something to files. If it cannot, every process raises a UserError."""
    error = None
    try:
        if is_leader():
            action()
    except (UserError, OSError) as raised:
        error = UserError(str(raised))
    if any_process(error is not None):
        raise error or UserError("the first process could not write its files")


@contextlib.contextmanager
def leader_in(context: contextlib.AbstractContextManager) -> Iterator[None]:
    """Have the first process enter a context, like a lock, until all leave this one. Raises as `as_leader`."""
    with contextlib.ExitStack() as stack:
        as_leader(functools.partial(stack.enter_context, context))
        yield


def any_process(condition: bool) -> bool:
    """Whether something is true of at least one process. All of them must ask."""
    return condition if jax.process_count() == 1 else bool(gathered(np.array(condition)).any())


def gathered(value: np.ndarray) -> np.ndarray:
    """The values of all processes, one row each."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value)).reshape(jax.process_count(), *np.shape(value))


def host(x: jax.Array | np.ndarray) -> np.ndarray:
    """An array, whole, in this process's memory, wherever its parts lie. All processes must ask for it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
