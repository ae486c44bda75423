"""Needs of a training or decoding step, computed from shapes alone: nothing is downloaded and nothing runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from jaxspec.bench.needs import device_bytes, measure_needs, needs_text, readable
from jaxspec.config import MeshConfig, ModelConfig, SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Batch
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.shape import StaticTree
from jaxspec.decoding.source import DeviceSource
from jaxspec.decoding.state import DecodeState, Decoding, state_names
from jaxspec.generation.job import bucket, cache_capacity
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
from jaxspec.training.folder import state_shardings
from jaxspec.training.run_config import RunConfig
from jaxspec.training.step import Update, first_state, pass_size, train_step
from jaxspec.trees import TreePlan, from_paths
from jaxspec.weights.load import weights_dtype
from jaxspec.weights.params import parameter_count

ROWS = (1, 16, 64)
_PROMPT = 32


def dry_run_training(config: RunConfig, mesh: Mesh, chip: Chip | None, dtype: str = "bfloat16") -> dict[str, Any]:
    """Parameters, bytes per device and operations of one update.

    Args:
      config: the run; its `mesh` has the shape of `mesh`.
      mesh: from `absent_mesh`.
      chip: whose limits to compare with.
      dtype: of the base.
    """
    train, method = config.train, config.method
    base = abstract_base(config.shapes, dtype, mesh, train.remat)
    base = _drafting(base, config.facts.learned_tokens)
    last = len(config.facts.stages) - 1  # of several stages the last one runs the most
    update = Update.of(method, config.shapes, train, last, config.mesh.zero == 2)
    state = jax.eval_shape(lambda base: first_state(update, train.seed, base), base)
    state = with_shardings(state, state_shardings(mesh, state, update.whole))
    shape = (train.batch_size, train.sequence_length)
    batch = Batch(*map(_ints, (shape, shape[:1], shape[:1], (shape[0], train.insertions), shape[:1])))
    batch = with_shardings(batch, batch_shardings(mesh, batch))
    with in_mesh(mesh):
        lowered = train_step.lower(update, base, state, batch, jax.ShapeDtypeStruct((), jnp.float32))
    parts, data = parts_of_batch(mesh), config.data
    passes = train.batch_size // pass_size(train.batch_size, train.microbatch, parts)  # the compiler counts one
    longest = data.max_prompt_tokens + max(data.max_answer_tokens, data.held_out_tokens)
    prompts = bucket(data.batch_size, parts, parts)  # that the base answers together
    return {
        "parameters": parameter_count(base.params),
        "trainable": parameter_count(state.trainable),
        "weights_bytes": device_bytes(base.params),
        "trainable_bytes": device_bytes((state.trainable, state.average)),
        "optimizer_bytes": device_bytes(state.optimizer),
        "answers_cache_bytes": _cache_bytes(config.shapes, prompts, cache_capacity(longest, 0), base.dtype, mesh),
        "step": measure_needs(lowered, chip, passes, device_bytes(base.params), device_bytes(state.trainable)),
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
    begun = decodings(config, mesh, batch_size, length, dtype)
    decoding, state = list(begun.values())[-1]
    base, capacity = decoding.base, state.cache.capacity
    return {
        "parameters": parameter_count(base.params),
        "trainable": parameter_count(jax.eval_shape(lambda base: config.method.init(jax.random.key(0), base), base)),
        "weights_bytes": device_bytes(base.params),
        "cache_bytes": _cache_bytes(config.shapes, batch_size, capacity, base.dtype, mesh),
        "drafter_bytes": device_bytes([source.trainable for source in decoding.drafter.sources]),
        "drafter_state_bytes": device_bytes(state.method_states),
        "steps": {rows: measure_needs(lower_step(*both, mesh), chip) for rows, both in begun.items()},
    }


def training_lines(name: str, config: RunConfig, found: dict[str, Any]) -> list[str]:
    """The figures of `dry_run_training` as text."""
    return [
        *_head(name, config, config.mesh, found),
        f"per device  weights {readable(found['weights_bytes'])}, trainable {readable(found['trainable_bytes'])}, "
        f"optimizer {readable(found['optimizer_bytes'])}; where the base answers prompts, cache "
        f"{readable(found['answers_cache_bytes'])}",
        f"an update   {needs_text(found['step'])}",
    ]


def decoding_lines(name: str, config: RunConfig, mesh: MeshConfig, found: dict[str, Any]) -> list[str]:
    """The figures of `dry_run_decoding` as text."""
    return [
        *_head(name, config, mesh, found),
        f"per device  weights {readable(found['weights_bytes'])}, cache {readable(found['cache_bytes'])}; "
        f"of the drafter weights {readable(found['drafter_bytes'])}, state {readable(found['drafter_state_bytes'])}",
        *(f"{rows:>3} row{'s' if rows > 1 else ' '}    {needs_text(step)}" for rows, step in found["steps"].items()),
    ]


def _head(name: str, config: RunConfig, mesh: MeshConfig, found: dict[str, Any]) -> list[str]:
    devices = f"{mesh.devices} device(s): data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"
    share = 100 * found["trainable"] / found["parameters"]
    return [
        f"{name}: {config.method.name} on {config.model}, {devices}",
        f"parameters  {found['parameters']:,} of the base, {found['trainable']:,} trainable ({share:.3g}%)",
    ]


def _ints(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract_base(shapes: ModelConfig, dtype: str, mesh: Mesh, remat: bool = False) -> Base:
    """A base without weights, in the shapes, dtype and places that they would have.

    Args:
      shapes: of the base.
      dtype: as `weights_dtype` takes it.
      mesh: what its weights are divided over.
      remat: whether layers are computed again in the backward pass.
    """
    params = abstract_params(shapes, weights_dtype(dtype))
    return Base(with_shardings(params, tree_shardings(mesh, params)), Decoder(shapes, remat, dtype == "exact"))


def _drafting(base: Base, count: int) -> Base:
    """A base that drafts so many tokens of its vocabulary; 0: all."""
    if not count:
        return base
    columns = jax.ShapeDtypeStruct((base.decoder.config.hidden_size, count), base.params["lm_head"].dtype)
    return base.replace(draft_vocabulary=DraftVocabulary(_ints((count,)), columns))


def decodings(
    config: RunConfig, mesh: Mesh, batch_size: int, length: int, dtype: str
) -> dict[int, tuple[Decoding, DecodeState]]:
    """Arguments of the decoding loop by rows of a step; for the settings see `dry_run_decoding`."""
    base = abstract_base(config.shapes, dtype, mesh)
    capacity = cache_capacity(length, config.facts.distances)
    drafters = {1: DeviceDrafter((), StaticTree(from_paths([]).arrays(0)))}
    for most in ROWS[1:]:
        if found := _tree(config, most):
            rows, tree = found
            drafters[rows] = _abstract_drafter(config, base, mesh, tree)
    return {rows: abstract_state(base, drafter, mesh, batch_size, capacity) for rows, drafter in drafters.items()}


def _tree(config: RunConfig, most: int) -> tuple[int, TreePlan] | None:
    """The largest tree within a number of rows, and its rows; None where not even two nodes fit."""
    facts = config.facts
    for nodes in range(most, 1, -1):
        plan = dataclasses.replace(config, tree=f"sparse:{nodes}").plan()
        rows = plan.num_nodes + plan.num_probes * facts.probe_rows + facts.further_rows
        if rows <= most:
            return rows, plan
    return None


def _abstract_drafter(config: RunConfig, base: Base, mesh: Mesh, tree: TreePlan) -> DeviceDrafter:
    """A drafter without weights."""
    base = _drafting(base, config.draft_vocabulary)

    def make(base: Base) -> DeviceDrafter:
        final = config.method.finalize(config.method.init(jax.random.key(0), base), base)
        method, base, facts = final.method, final.base, config.facts
        trainable, calibration = method.prepare(final.trainable, base), jnp.zeros((2, facts.distances, 2))
        source = DeviceSource(trainable, calibration, method, base.draft_vocabulary)
        return DeviceDrafter((source,), StaticTree(tree.arrays(facts.probes)))

    drafter = jax.eval_shape(make, base)
    [source] = drafter.sources
    trainable = with_shardings(source.trainable, tree_shardings(mesh, source.trainable))
    return drafter.replace(sources=(source.replace(trainable=trainable),))


def abstract_state(
    base: Base, drafter: DeviceDrafter, mesh: Mesh, batch_size: int, capacity: int
) -> tuple[Decoding, DecodeState]:
    """The arguments of the decoding loop as shapes.

    Args:
      base: from `abstract_base`.
      drafter: abstract, too.
      mesh: what the state is divided over.
      batch_size: B.
      capacity: S, slots of the cache.
    """
    decoding = Decoding(base, drafter, make_sampler(SamplingConfig()), jnp.zeros(1, jnp.int32), Match())
    tokens, lengths = np.ones((batch_size, _PROMPT), np.int32), np.full(batch_size, _PROMPT, np.int32)
    rows = (tokens, lengths, lengths, np.zeros(batch_size, np.uint32))
    sizes = {"capacity": capacity, "chunk": _PROMPT, "width": 64}
    state = jax.eval_shape(lambda decoding: prefill(decoding.base, decoding, *rows, **sizes), decoding)
    places = jax.tree.map(lambda x: NamedSharding(mesh, partition(mesh, x.shape, state_names(x))), state)
    return decoding, with_shardings(state, places)


def lower_step(decoding: Decoding, state: DecodeState, mesh: Mesh) -> Lowered:
    """One step of the decoding loop, from what `abstract_state` returns."""
    with in_mesh(mesh):
        return decode.lower(decoding, state, _ints(()))


def _cache_bytes(shapes: ModelConfig, batch_size: int, capacity: int, dtype: jnp.dtype, mesh: Mesh) -> int:
    """Bytes per device of all layers' keys and values."""
    shape = (batch_size, shapes.num_kv_heads, capacity, shapes.head_dim)
    shard = NamedSharding(mesh, partition(mesh, shape, ("batch", "heads"))).shard_shape(shape)
    return 2 * shapes.num_layers * math.prod(shard) * dtype.itemsize
