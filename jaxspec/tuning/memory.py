"""The device's memory: how much there is, how fast it is read, and how much of it a step reads."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.weights.model import Model

_TIMES = 8  # in one program, so that starting it does not count


def device_memory() -> int:
    """Bytes of memory of the device that JAX computes on."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(arrays: PyTree) -> int:
    """Bytes that are free on the devices of some arrays; where nothing tells, all of the memory there is."""
    devices = {device for x in jax.tree.leaves(arrays) for device in x.devices()}
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in each for each in stats):
        return sum(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    numbers = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, KeyError):
        numbers.append(1024 * _numbers(Path("/proc/meminfo"))["MemAvailable:"])
    with contextlib.suppress(OSError, ValueError, KeyError):  # of a container; "max" is no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        numbers.append(limit - used + _numbers(group / "memory.stat")["inactive_file"])  # files give way
    return min(numbers)


def _numbers(file: Path) -> dict[str, int]:
    """A system's file of names, each with a number behind it."""
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}


def peak_memory() -> int:
    """Most bytes used so far: of the device where it tells, else by this process."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Have `peak_memory` count from now on, where the system can: Linux, of a process on CPU."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def bandwidth(rounds: int, moved: int = 1 << 28) -> float:
    """Bytes per second that the device moves, the best of a few rounds of reading a large array and of changing it.

    Args:
      rounds: how many.
      moved: bytes of the array.
    """
    x, repeat = jnp.zeros((1024, moved // 4096), jnp.float32), functools.partial(jax.lax.fori_loop, 0, _TIMES)

    def sum_again(x: jax.Array, total: jax.Array) -> jax.Array:
        return jnp.sum(x + total[:, None], axis=1)  # another sum each time, or the compiler would read but once

    read = jax.jit(lambda x: repeat(lambda _, total: sum_again(x, total), jnp.zeros(1024))).lower(x).compile()
    change = jax.jit(lambda x: repeat(lambda _, x: x + 1, x), donate_argnums=0).lower(x).compile()
    rates = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(read(x))
        halfway = time.perf_counter()
        x = jax.block_until_ready(change(x))
        rates.append(max(moved / (halfway - began), 2 * moved / (time.perf_counter() - halfway)))
    return _TIMES * max(rates[1:])


def step_bytes(model: Model, batch_size: int, cache_length: int) -> int:
    """Bytes that one step must read: every weight but unread embeddings, and the whole cache."""
    c, params = model.config, model.params
    embedding = 0 if c.tie_embeddings else params["embedding"].nbytes
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - embedding
    return weights + cache_bytes(c, batch_size, cache_length, model.base.dtype.itemsize)


def cache_bytes(config: ModelConfig, batch_size: int, cache_length: int, itemsize: int) -> int:
    """Bytes of all layers' keys and values."""
    return 2 * config.num_layers * batch_size * config.num_kv_heads * cache_length * config.head_dim * itemsize
