"""What a training or a decoding step would need, from shapes alone: nothing is downloaded and nothing runs.

The step is compiled for the mesh it is meant for, so that a configuration that cannot work fails here, and the
compiler tells what it needs. For the CPU's virtual devices its temporaries are an upper bound: that compiler does not
order work so as to save memory. For a TPU they are what the chip will use.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from jaxspec.config import MeshConfig, ModelConfig, SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.generate import bucket, cache_capacity
from jaxspec.decoding.loop import Decoding, decode, prefill, start, state_names
from jaxspec.drafting.drafter import DeviceDrafter
from jaxspec.drafting.method import Batch, Method
from jaxspec.drafting.sampling import make_sampler
from jaxspec.drafting.tree import TreePlan, from_paths
from jaxspec.errors import first_line
from jaxspec.model.base import Base, DraftVocabulary
from jaxspec.model.decoder import Decoder, abstract_params
from jaxspec.parallel.chips import Chip
from jaxspec.parallel.sharding import (
    batch_shardings,
    in_mesh,
    partition,
    parts_of_batch,
    tree_shardings,
    with_shardings,
)
from jaxspec.training.checkpoints import state_shardings
from jaxspec.training.run_config import RunConfig
from jaxspec.training.step import first_state, pass_size, train_step

ROWS = (1, 16, 64)
_PROMPT = 32


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a compiled step needs of each device.

    Attributes:
      arguments: bytes of what goes in: weights, state, batch.
      unread: bytes of the base's weights where a step does without them, because it trains others in their place; they
        stay on the device.
      temporaries: bytes of what it makes on the way, and of results that do not take the place of an argument.
      repeated: bytes of the arguments that every pass reads: the weights.
      passes: how often it repeats what the next two figures count: forward and backward passes of one update.
      flops: operations.
      bytes: read and written, as the compiler counts them: what it copies to faster memory first counts every time.
    """

    arguments: int
    unread: int
    temporaries: int
    repeated: int
    passes: int
    flops: float
    bytes: float

    def fits(self, chip: Chip) -> bool:
        """Whether the chip's memory holds it all."""
        return self.arguments + self.unread + self.temporaries <= chip.memory

    def limits(self, chip: Chip) -> dict[str, float]:
        """The least seconds that reading all arguments takes, weights in every pass, and the arithmetic."""
        return {
            "memory_seconds": (self.arguments + (self.passes - 1) * self.repeated) / chip.bandwidth,
            "compute_seconds": self.passes * self.flops / chip.flops,
        }


def device_bytes(tree: Any) -> int:
    """Bytes that arrays with a sharding take on one device."""
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)]
    return sum(sizes)


def size(tree: Any) -> int:
    """Elements of all arrays."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def abstract_base(shapes: ModelConfig, dtype: str, mesh: Mesh, remat: bool = False) -> Base:
    """A base without weights."""
    params = abstract_params(shapes, dtype)
    return Base(with_shardings(params, tree_shardings(mesh, params)), Decoder(shapes, remat=remat))


def dry_run_training(config: RunConfig, mesh: Mesh, chip: Chip | None, dtype: str = "bfloat16") -> dict[str, Any]:
    """Parameters, bytes per device and operations of one update.

    Args:
      config: the run; its `mesh` has the shape of `mesh`.
      mesh: from `absent_mesh`.
      chip: whose limits to compare with.
      dtype: of the base.
    """
    train, method, whole = config.train, config.method, config.mesh.zero == 2
    base = abstract_base(config.shapes, dtype, mesh, train.remat)
    last = len(method.stages) - 1  # of several stages the last one runs the most
    state = jax.eval_shape(lambda base: first_state(method, train, last, base), base)
    state = with_shardings(state, state_shardings(mesh, state, whole))
    shape = (train.batch_size, train.sequence_length)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in (shape, shape[:1], shape[:1], (shape[0], train.insertions))]
    batch = Batch(*ints)
    batch = with_shardings(batch, batch_shardings(mesh, batch))
    with in_mesh(mesh):
        lowered = train_step.lower(method, train, last, base, state, batch, whole=whole)
    parts = parts_of_batch(mesh)
    passes = train.batch_size // pass_size(train, parts)  # the compiler counts what it repeats once
    step = _compiled(lowered, chip, passes, device_bytes(base.params), device_bytes(state.trainable))
    sizes = {"parameters": size(base.params), "trainable": size(state.trainable)}
    asked = bucket(config.data.batch_size, parts, parts)
    cache = _cache_bytes(config.shapes, asked, _room(config), jnp.dtype(dtype), mesh)
    return sizes | {
        "weights_bytes": device_bytes(base.params),
        "trainable_bytes": device_bytes((state.trainable, state.average)),
        "optimizer_bytes": device_bytes(state.optimizer),
        "answers_cache_bytes": cache,
        "step": step,
    }


def dry_run_decoding(
    config: RunConfig, mesh: Mesh, chip: Chip | None, batch_size: int, length: int, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Parameters, bytes per device and operations of one step, for 1 row and for trees of at most 16 and 64 rows.

    One row is autoregressive decoding.

    Args:
      config: the method, and the base's shapes.
      mesh: from `absent_mesh`.
      chip: whose limits to compare with.
      batch_size: B.
      length: of prompt and answer together, in tokens.
      dtype: of the base.
    """
    base = abstract_base(config.shapes, dtype, mesh)
    capacity = cache_capacity(length, config.method.max_distance)
    steps = {}
    for most in ROWS:
        drafter = _drafter(config, base, mesh, most)
        if drafter is not None:
            rows = _num_rows(drafter)
            steps[rows] = _compiled(_lower_decoding(base, drafter, mesh, batch_size, capacity), chip)
    return {
        "parameters": size(base.params),
        "trainable": size(jax.eval_shape(lambda base: config.method.init(jax.random.key(0), base), base)),
        "weights_bytes": device_bytes(base.params),
        "cache_bytes": _cache_bytes(config.shapes, batch_size, capacity, jnp.dtype(dtype), mesh),
        "steps": steps,
    }


def _drafter(config: RunConfig, base: Base, mesh: Mesh, rows: int) -> DeviceDrafter | None:
    """An untrained drafter with the largest tree of so many rows; autoregressive decoding where they are one.

    None where not even two nodes fit.
    """
    if rows == 1:
        return DeviceDrafter({}, from_paths([]).arrays(0), Method())
    method, ids = config.method, None
    if config.draft_vocabulary:
        count = config.draft_vocabulary
        ids = DraftVocabulary(
            jax.ShapeDtypeStruct((count,), jnp.int32),
            jax.ShapeDtypeStruct((config.shapes.hidden_size, count), base.dtype),
        )
    drafting = base.replace(draft_vocabulary=ids)
    kept = method

    def prepare(base: Base) -> Any:
        nonlocal kept
        kept, trainable, base = method.tune(method.init(jax.random.key(0), base), base)
        return kept.prepared(trainable, base)

    trainable, tree = jax.eval_shape(prepare, drafting), _tree(config, rows)
    if tree is None:
        return None
    trainable = with_shardings(trainable, tree_shardings(mesh, trainable))
    return DeviceDrafter(trainable, tree.arrays(method.probe_distances), kept, ids)


def _num_rows(drafter: DeviceDrafter) -> int:
    return drafter.tree.num_nodes + drafter.tree.num_probes * drafter.method.probe_rows


def _tree(config: RunConfig, rows: int) -> TreePlan | None:
    """The largest tree that needs no more rows, if any does."""
    sized = (dataclasses.replace(config, tree=f"sparse:{nodes}").plan() for nodes in range(rows, 1, -1))
    return next((p for p in sized if p.num_nodes + p.num_probes * config.method.probe_rows <= rows), None)


def _lower_decoding(base: Base, drafter: DeviceDrafter, mesh: Mesh, batch_size: int, capacity: int) -> Lowered:
    """One step of the decoding loop."""
    tokens, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch_size, _PROMPT), (batch_size,)))
    decoding = Decoding(base, drafter, make_sampler(SamplingConfig()), jnp.zeros(1, jnp.int32), Match())

    def begin(decoding: Decoding, tokens: jax.Array, lengths: jax.Array) -> Any:
        cache, prompt = prefill(decoding.base, tokens, lengths, capacity=capacity, chunk=_PROMPT)
        return start(decoding, cache, prompt, lengths, jnp.zeros(batch_size, jnp.uint32), width=64)

    state = jax.eval_shape(begin, decoding, tokens, lengths)
    places = jax.tree.map(lambda x: NamedSharding(mesh, partition(mesh, x.shape, state_names(x))), state)
    with in_mesh(mesh):
        return decode.lower(decoding, with_shardings(state, places), jax.ShapeDtypeStruct((), jnp.int32))


def _compiled(
    lowered: Lowered, chip: Chip | None, passes: int = 1, weights: int = 0, trained: int = 0
) -> dict[str, Any]:
    """Compile, and ask the compiler. A TPU's does not compile what does not fit, and says how much there was.

    Args:
      lowered: a step whose first argument is the base.
      chip: whose limits to compare with.
      passes: how often an update reads the weights.
      weights: bytes of the base's.
      trained: bytes of the trainable pytree.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if chip is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fits": False, "reason": first_line(error)}
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    made = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    done, moved = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
    unread = 0 if jax.tree.leaves(compiled.input_shardings[0][0]) else weights  # without a sharding: not an input
    repeated = weights - unread + trained
    needs = Needs(memory.argument_size_in_bytes, unread, made, repeated, passes, done, moved)
    figures = dataclasses.asdict(needs)
    return figures if chip is None else figures | {"fits": needs.fits(chip)} | needs.limits(chip)


def _room(config: RunConfig) -> int:
    """Slots of a cache for the base's own answers."""
    data = config.data
    return cache_capacity(data.max_prompt_tokens + max(data.max_answer_tokens, data.held_out_tokens), 0)


def _cache_bytes(shapes: ModelConfig, batch_size: int, capacity: int, dtype: jnp.dtype, mesh: Mesh) -> int:
    """Bytes per device of all layers' keys and values."""
    shape = (batch_size, shapes.num_kv_heads, capacity, shapes.head_dim)
    shard = NamedSharding(mesh, partition(mesh, shape, ("batch", "heads"))).shard_shape(shape)
    return 2 * shapes.num_layers * math.prod(shard) * dtype.itemsize


def training_lines(name: str, config: RunConfig, found: dict[str, Any]) -> list[str]:
    """The figures of `dry_run_training` for people."""
    return [
        f"{name}: {config.method.name} on {config.model}, {_mesh_text(config.mesh)}",
        _parameters_text(found),
        f"per device  weights {_gb(found['weights_bytes'])}, trainable {_gb(found['trainable_bytes'])}, optimizer "
        f"{_gb(found['optimizer_bytes'])}; where the base answers prompts, cache {_gb(found['answers_cache_bytes'])}",
        f"an update   {_step_text(found['step'])}",
    ]


def decoding_lines(name: str, config: RunConfig, mesh: MeshConfig, found: dict[str, Any]) -> list[str]:
    """The figures of `dry_run_decoding` for people."""
    return [
        f"{name}: {config.method.name} on {config.model}, {_mesh_text(mesh)}",
        _parameters_text(found),
        f"per device  weights {_gb(found['weights_bytes'])}, cache {_gb(found['cache_bytes'])}",
        *(f"{rows:>3} row{'s' if rows > 1 else ' '}    {_step_text(step)}" for rows, step in found["steps"].items()),
    ]


def _parameters_text(found: dict[str, Any]) -> str:
    share = 100 * found["trainable"] / found["parameters"]
    return f"parameters  {found['parameters']:,} of the base, {found['trainable']:,} trainable ({share:.3g}%)"


def _mesh_text(mesh: MeshConfig) -> str:
    return f"{mesh.devices} device(s): data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"


def _step_text(step: dict[str, Any]) -> str:
    if "reason" in step:
        return f"DOES NOT FIT ({step['reason']})"
    text = (
        f"per device arguments {_gb(step['arguments'])}, "
        + (f"weights beside them {_gb(step['unread'])}, " if step["unread"] else "")
        + f"temporaries {_gb(step['temporaries'])}, "
        + (f"{step['passes']} passes of " if step["passes"] > 1 else "")
        + f"{step['flops']:.3g} FLOPs and {_gb(step['bytes'])} moved"
    )
    if "fits" in step:
        verdict = "fits" if step["fits"] else "DOES NOT FIT"
        memory, arithmetic = (f"{1000 * step[f'{part}_seconds']:.2f} ms" for part in ("memory", "compute"))
        text += f"; {verdict}; at least {memory} for memory, {arithmetic} for arithmetic"
    return text


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
