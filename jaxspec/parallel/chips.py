"""Devices that are not here: any number of virtual ones, or a slice of TPUs that programs are compiled for."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os

import jax
from jax.sharding import Mesh

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError, first_line
from jaxspec.parallel.sharding import check_mesh, make_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of a TPU generation, per chip.

    Attributes:
      memory: bytes.
      bandwidth: of that memory, bytes per second.
      flops: bfloat16 operations per second.
    """

    memory: float
    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip(32 * 2**30, 1.228e12, 275e12),
    "v5e": Chip(16 * 2**30, 0.819e12, 197e12),
    "v5p": Chip(95 * 2**30, 2.765e12, 459e12),
    "v6e": Chip(32 * 2**30, 1.640e12, 918e12),
}


def absent_mesh(config: MeshConfig, topology: str = "") -> tuple[Mesh, Chip | None]:
    """A mesh of devices that need not exist; nothing can run on it, but programs can be compiled for it.

    Args:
      config: lengths of the axes.
      topology: a TPU slice like v5e:2x2x1; empty: virtual devices of the CPU, of which no chip is known.

    Raises:
      UserError: a slice that is unknown or smaller than the mesh, or the package `libtpu` is not installed.
    """
    check_mesh(config)
    if not topology:
        with contextlib.suppress(RuntimeError):  # JAX has begun, and has the devices it has
            jax.config.update("jax_num_cpu_devices", config.devices)
        try:
            devices = jax.devices("cpu")
        except RuntimeError:
            platforms = os.environ.get("JAX_PLATFORMS")
            raise UserError(f"a dry run needs JAX's CPU devices: set JAX_PLATFORMS=cpu, not {platforms!r}") from None
        return make_mesh(config, devices), None
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise UserError(f"topology {topology!r}: write a generation and a shape, {', '.join(CHIPS)}, like v5e:2x2x1")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('compiling for a TPU needs its compiler; install it with: pip install "jax[tpu]"')
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    for key, value in settings.items():  # or it would look for the TPU it runs on
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # the TPU runtime raises many kinds
        raise UserError(f"topology {topology!r}: there is no such slice ({first_line(error)})") from None
    return make_mesh(config, devices), CHIPS[name]
