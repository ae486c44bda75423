"""One mesh and one table: which dimension of which array is divided over which of the mesh's axes.

    data     whole copies; the batch is divided
    fsdp     the batch is divided, and so are weights, gathered where a layer uses them
    tensor   query heads with their keys and values, MLP columns, the vocabulary

The compiler (JAX's SPMD partitioner) does the rest: arguments say how they are divided, `divided` says it of the hidden
states between two layers, and everything in between follows. Without a mesh nothing here does anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError

_LARGE = 2**20  # elements
AXES = ("data", "fsdp", "tensor")
RULES = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
# By the end of a path, of its last dimensions: bases, methods' own layers and optimizers share these names. Of a large
# leaf of another name the longest dimension is divided over `fsdp`; a small one lies whole on every device.
DIMENSIONS = {
    "qkv/kernel": ("embed", "heads"),
    "q/kernel": ("embed", "heads"),
    "kv/kernel": ("embed", "heads"),
    "qkv/bias": ("heads",),
    "o/kernel": ("heads", "embed"),
    "gate_up/kernel": ("embed", "mlp"),
    "gate/kernel": ("embed", "mlp"),
    "up/kernel": ("embed", "mlp"),
    "down/kernel": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
    "embedding": ("vocab", "embed"),
}


def check_mesh(config: MeshConfig) -> tuple[int, int, int]:
    """Lengths of the axes. Raises UserError for one shorter than 1."""
    shape = (config.data, config.fsdp, config.tensor)
    if min(shape) < 1:
        raise UserError(f"mesh: data, fsdp and tensor must be at least 1, got {shape}")
    return shape


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """The mesh of a configuration; None where it is one device.

    Args:
      config: lengths of the axes.
      devices: default all that JAX sees, the first ones of them where there are more.

    Raises:
      UserError: an axis shorter than 1, or fewer devices than the mesh needs.
    """
    shape = check_mesh(config)
    if config.devices == 1 and devices is None and jax.process_count() == 1:
        return None
    devices = jax.devices() if devices is None else devices
    name = " x ".join(map(str, shape))
    if len(devices) < config.devices or (jax.process_count() > 1 and len(devices) != config.devices):
        raise UserError(f"mesh: {name} needs {config.devices} devices, and there are {len(devices)}")
    try:
        arranged = mesh_utils.create_device_mesh(shape, devices[: config.devices], allow_split_physical_axes=True)
    except (AssertionError, ValueError, NotImplementedError):  # TPUs that do not make a box
        raise UserError(
            f"mesh: {name} cannot be laid over {config.devices} of these {len(devices)} devices; choose another one "
            "for all of them"
        ) from None
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def in_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The context in which `divided` means this mesh."""
    return jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays lie on, or None."""
    sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def partition(mesh: Mesh, shape: Sequence[int], names: Sequence[str | None]) -> PartitionSpec:
    """The partition of an array on a mesh, concrete or abstract: a dimension that no axis divides stays whole.

    `names` are those of its dimensions, or of the first ones, as `RULES` has them.
    """
    spec = []
    for size, name in zip(shape, names, strict=False):
        axes = RULES.get(name, ())
        spec.append(axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None)
    return PartitionSpec(*spec)


def dimensions(path: str, shape: Sequence[int], whole: bool = False) -> list[str | None]:
    """Names of the dimensions of a parameter, by its path like `layers_0/mlp/up/kernel`; None where it is not divided.

    With `whole` it is not divided over `fsdp` (ZeRO-2).
    """
    path = path.removesuffix("/values").removesuffix("/scales").removesuffix("/minima")  # of a quantized kernel
    name = next((end for end in DIMENSIONS if f"/{path}".endswith(f"/{end}")), None)
    names: list[str | None] = [None] * len(shape)
    if name:
        known = DIMENSIONS[name][: len(shape)]
        names[len(shape) - len(known) :] = known
    elif len(shape) > 1 and math.prod(shape) >= _LARGE:
        names[int(np.argmax(shape))] = "embed"
    return [None if whole and name == "embed" else name for name in names]


def tree_shardings(mesh: Mesh, tree: Any, whole: bool = False) -> Any:
    """Shardings of parameters, gradients or an optimizer's state; `whole` as in `dimensions`."""
    return jax.tree.map(functools.partial(NamedSharding, mesh), _specs(mesh, tree, whole))


def _specs(mesh: Mesh, tree: Any, whole: bool) -> Any:
    def spec(path: tuple, leaf: Any) -> PartitionSpec:
        names = dimensions(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, whole)
        return partition(mesh, leaf.shape, names)

    return jax.tree.map_with_path(spec, tree)


def put_beside(params: Any, tree: Any) -> Any:
    """A tree, put on the mesh that the parameters lie on if there is one."""
    mesh = mesh_of(params)
    return tree if mesh is None else put(tree, tree_shardings(mesh, tree))


def batch_shardings(mesh: Mesh, tree: Any) -> Any:
    """Shardings of arrays whose first dimension is the batch."""
    return jax.tree.map(lambda x: NamedSharding(mesh, partition(mesh, x.shape, ("batch",))), tree)


def put(tree: Any, shardings: Any) -> Any:
    """Arrays that every process holds whole, in host memory or on a device, onto the mesh: each keeps its own parts."""
    return jax.tree.map(_put, tree, shardings)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def put_batch(batch: Any, mesh: Mesh | None) -> Any:
    """Arrays whose first dimension is the batch, divided over a mesh; without one as they are."""
    return batch if mesh is None else put(batch, batch_shardings(mesh, batch))


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Shapes and dtypes of arrays, with their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def placed(tree: Any, mesh: Mesh | None, shardings: Any = None) -> Any:
    """Shapes and dtypes of arrays, with the shardings to read them to, whatever they were written with.

    Args:
      tree: of arrays, or of shapes and dtypes.
      mesh: None: this process's first device.
      shardings: on the mesh; default those of parameters.
    """
    if mesh is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: here, tree)
    elif shardings is None:
        shardings = tree_shardings(mesh, tree)
    return with_shardings(tree, shardings)


def parts_of_batch(mesh: Mesh | None = None) -> int:
    """How many parts a mesh, by default that of the context, divides a batch into; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in RULES["batch"])


def divided(x: jax.Array, *names: str | None) -> jax.Array:
    """Inside jit, say how an array lies on the mesh of the context, if there is one; `names` as in `partition`."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, partition(mesh, x.shape, names))


def divided_as(tree: Any, whole: bool = False) -> Any:
    """Inside jit, the same for a tree of parameters (see `tree_shardings`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.lax.with_sharding_constraint(tree, _specs(mesh, tree, whole))


def over_mesh(
    function: Callable, sizes: tuple[int, int], inputs: Sequence[tuple], outputs: Sequence[tuple]
) -> Callable:
    """A function that runs on every device of the context's mesh with its part of the batch and of the heads.

    XLA divides no kernel by itself, nor in JAX 0.10 a constraint of a layout: it would gather all operands.

    Args:
      function: of whole arrays, on one device.
      sizes: of the batch and of the key/value heads, or of what is divided like them.
      inputs: names of each argument's first dimensions ("batch", "heads" or None), for all leaves of it.
      outputs: likewise.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    axes = dict(zip(("batch", "heads"), partition(mesh, sizes, ("batch", "heads")), strict=True))

    def specs(names: Sequence[tuple]) -> tuple:
        return tuple(PartitionSpec(*(axes.get(name) for name in each)) for each in names)

    return jax.shard_map(function, in_specs=specs(inputs), out_specs=specs(outputs), check_vma=False)
