"""GPUs that are not here: programs can be compiled for them."""

import os

import pytest
from jax.experimental import topologies

from jaxspec.parallel.sharding import make_mesh

# An H100, as a process that has one describes it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version: { major: 13 minor: 0 patch: 0 } platform_name: "CUDA" dnn_version_info { major: 9 minor: 28 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def absent_gpus(config):
    """A mesh of so many H100; skips the test where the compiler for them is not installed."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    shape = f"1x1x{config.devices}"
    devices = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=shape).devices
    return make_mesh(config, devices)


def compiled(lowered):
    """The text of a program; without trying its products' variants, for which a GPU is needed."""
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"}).as_text()
