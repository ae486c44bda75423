"""Devices that are not here: any number of virtual ones, or TPUs and GPUs that programs are compiled for."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os

import jax
from jax.sharding import Mesh

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError, first_line
from jaxspec.parallel.sharding import check_mesh, make_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of a TPU generation or a GPU, per chip.

    Attributes:
      memory: bytes.
      bandwidth: of that memory, bytes per second.
      flops: 16-bit operations per second, dense.
    """

    memory: float
    bandwidth: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Gpu(Chip):
    """A GPU, with what its compiler wants to know.

    Attributes:
      kind: its name, as JAX's `device_kind`.
      capability: compute capability.
      cores: streaming multiprocessors.
      lanes: float32 units of each.
      threads: of each.
      shared_memory: of each, bytes.
      l2: cache, bytes.
      clock: boost, GHz.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    shared_memory: int
    l2: int
    clock: float

    @property
    def target(self) -> str:
        """The text that XLA compiles by, in place of a device."""
        major, minor = self.capability
        most = self.shared_memory - 1024 if major >= 8 else self.shared_memory  # a kilobyte is the system's
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_memory,
            "shared_memory_per_block_optin": most,
            "threads_per_core_limit": self.threads,
            "core_count": self.cores,
            "fpus_per_core": self.lanes,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "memory_bandwidth": int(self.bandwidth),
            "device_memory_size": int(self.memory),
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock,
        }
        fields = " ".join(f"{name}: {value}" for name, value in info.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'runtime_version {{ major: 13 }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 28 }} '
            f'device_description_str: "{self.kind}"'
        )


TPUS = {
    "v4": Chip(32 * 2**30, 1.228e12, 275e12),
    "v5e": Chip(16 * 2**30, 0.819e12, 197e12),
    "v5p": Chip(95 * 2**30, 2.765e12, 459e12),
    "v6e": Chip(32 * 2**30, 1.640e12, 918e12),
}
_MB = 2**20
GPUS = {
    "h100": Gpu(80e9, 3.352e12, 989e12, "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233472, 50 * _MB, 1.98),
    "a100": Gpu(80e9, 2.039e12, 312e12, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167936, 40 * _MB, 1.41),
    "l4": Gpu(24e9, 0.300e12, 121e12, "NVIDIA L4", (8, 9), 58, 128, 1536, 102400, 48 * _MB, 2.04),
    "t4": Gpu(16e9, 0.320e12, 65e12, "Tesla T4", (7, 5), 40, 64, 1024, 65536, 4 * _MB, 1.59),
}
GPU_MEMORY = 0.92  # the part of a GPU's memory that commands reserve
_COMPILERS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def absent_mesh(config: MeshConfig, topology: str = "") -> tuple[Mesh, Chip | None]:
    """A mesh of devices that need not exist; nothing can run on it, but programs can be compiled for it.

    Args:
      config: lengths of the axes.
      topology: a TPU slice like v5e:2x2x1, or a GPU like h100, of which the mesh has as many as it needs; empty:
        virtual devices of the CPU, of which no chip is known.

    Raises:
      UserError: a slice that is unknown or smaller than the mesh, or a compiler that is not installed.
    """
    check_mesh(config)
    if not topology:
        return make_mesh(config, _virtual_devices(config.devices)), None
    name = topology.partition(":")[0]
    if topology in GPUS:
        return make_mesh(config, _gpus(topology, config.devices)), GPUS[topology]
    if name not in TPUS:
        raise UserError(
            f"topology {topology!r}: write a GPU ({', '.join(GPUS)}), or a generation of TPUs ({', '.join(TPUS)}) with "
            "a shape, like v5e:2x2x1"
        )
    return make_mesh(config, _tpus(topology)), TPUS[name]


def _virtual_devices(count: int) -> list[jax.Device]:
    with contextlib.suppress(RuntimeError):  # JAX has begun, and has the devices it has
        jax.config.update("jax_num_cpu_devices", count)
    try:
        return jax.devices("cpu")
    except RuntimeError:
        platforms = os.environ.get("JAX_PLATFORMS")
        raise UserError(f"a dry run needs JAX's CPU devices: set JAX_PLATFORMS=cpu, not {platforms!r}") from None


def _tpus(topology: str) -> list[jax.Device]:
    """The devices of a slice of TPUs."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('compiling for a TPU needs its compiler; install it with: pip install "jax[tpu]"')
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    for key, value in settings.items():  # or it would look for the TPU it runs on
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # the TPU runtime raises many kinds
        raise UserError(f"topology {topology!r}: there is no such slice ({first_line(error)})") from None


def _gpus(name: str, count: int) -> list[jax.Device]:
    """So many GPUs of one kind, in one machine."""
    check_gpu_compiler()
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of CUDA's libraries, which compiling does without
    jax.config.update("jax_platforms", "cpu")  # nothing runs, and looking for a GPU that is not there takes time
    from jax.experimental import topologies

    try:
        target = GPUS[name].target
        return topologies.get_topology_desc(name, "cuda", target_config=target, topology=f"1x1x{count}").devices
    except Exception as error:  # the plugin raises many kinds
        raise UserError(f"topology {name!r}: its compiler does not start ({first_line(error)})") from None


def check_gpu_compiler() -> None:
    """Raise UserError where the compiler for GPUs is not installed, or belongs to another version of JAX."""
    here, newest = jax.__version__, _COMPILERS[0]
    command = f"pip install --no-deps {newest}=={here} {newest.replace('plugin', 'pjrt')}=={here}"
    versions = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if not versions:
        raise UserError(f"compiling for a GPU needs its compiler, but no GPU; install it with: {command}")
    if here not in versions.values():
        [found, *_] = [f"{name} {version}" for name, version in versions.items()]
        raise UserError(f"the compiler for GPUs is {found}, and JAX is {here}; install the one that fits: {command}")
