"""Needs of a training or decoding step, computed from shapes alone: nothing is downloaded and nothing runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxspec.bench.absent import (
    absent_drafter,
    absent_model,
    abstract_base,
    abstract_drafter,
    abstract_state,
    drafter_of,
    ints,
    lower_step,
)
from jaxspec.bench.needs import device_bytes, measure_needs, needs_text, readable
from jaxspec.config import MeshConfig, ModelConfig
from jaxspec.decoding.method import Batch, abstract_trainable
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters import DrafterSpec
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.generation.job import bucket, cache_capacity
from jaxspec.model.base import Base, DraftVocabulary
from jaxspec.model.blocks import fewer_columns
from jaxspec.parallel.chips import Chip
from jaxspec.parallel.sharding import batch_shardings, in_mesh, partition, parts_of_batch, with_shardings
from jaxspec.training.folder import state_shardings
from jaxspec.training.run_config import RunConfig
from jaxspec.training.step import Update, first_state, pass_size, train_step
from jaxspec.weights.params import parameter_count

ROWS = (1, 16, 64)


def dry_run_training(
    config: RunConfig, mesh: Mesh, chip: Chip | None, dtype: str = "bfloat16", form: str = ""
) -> dict[str, Any]:
    """Parameters, bytes per device and operations of one update.

    Args:
      config: the run; its `mesh` has the shape of `mesh`.
      mesh: from `absent_mesh`.
      chip: whose limits to compare with.
      dtype: of the base.
      form: of its kernels, as `load_model` takes `weights`.
    """
    train, method = config.train, config.method
    base = abstract_base(config.shapes, dtype, mesh, train.remat, form)
    base = _drafting(base, config.facts.learned_tokens)
    last = len(config.facts.stages) - 1  # of several stages the last one runs the most
    update = Update.of(method, config.shapes, train, last, config.mesh.zero == 2)
    state = jax.eval_shape(lambda base: first_state(update, train.seed, base), base)
    state = with_shardings(state, state_shardings(mesh, state, update.whole))
    shape = (train.batch_size, train.sequence_length)
    count = train.batch_size
    batch = Batch(ints(*shape), ints(count), ints(count), ints(count, train.insertions), ints(count))
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
        "step": measure_needs(lowered, base, chip, passes, device_bytes(state.trainable)),
    }


def dry_run_decoding(
    config: RunConfig,
    mesh: Mesh,
    chip: Chip | None,
    batch_size: int,
    length: int,
    dtype: str = "bfloat16",
    spec: DrafterSpec | None = None,
    form: str = "",
) -> dict[str, Any]:
    """Parameters, bytes per device and operations of one step, for 1 row and for trees of at most 16 and 64 rows.

    One row is autoregressive decoding.

    Args:
      config: the base's shapes, and without `spec` the method.
      mesh: from `absent_mesh`.
      chip: whose limits to compare with.
      batch_size: B.
      length: of prompt and answer together, in tokens.
      dtype: of the base.
      spec: a drafter, as `absent_drafter` makes it, in place of the two trees.
      form: of the base's kernels, as `load_model` takes `weights`.

    Raises:
      UserError: a drafter that does not fit the base.
    """
    base = abstract_base(config.shapes, dtype, mesh, form=form)
    drafters = drafters_of(config, base, spec)
    begun = decodings(drafters, base, mesh, batch_size, length)
    decoding, state = list(begun.values())[-1]
    trainable = [abstract_trainable(source.method, config.shapes) for source in drafters[-1].sources]
    return {
        "parameters": parameter_count(base.params),
        "drafter": spec.text if spec else config.method.name,
        "trainable": parameter_count(trainable),
        "weights_bytes": device_bytes(base.params),
        "cache_bytes": _cache_bytes(config.shapes, batch_size, state.cache.capacity, base.dtype, mesh),
        "drafter_bytes": device_bytes([source.trainable for source in decoding.drafter.sources]),
        "drafter_state_bytes": device_bytes((state.method_states, state.unread)),
        "steps": {rows: measure_needs(lower_step(*both, mesh), base, chip) for rows, both in begun.items()},
    }


def training_lines(name: str, config: RunConfig, found: dict[str, Any]) -> list[str]:
    """The figures of `dry_run_training` as text."""
    return [
        *_head(name, config.method.name, config.model, config.mesh, found),
        f"per device  weights {readable(found['weights_bytes'])}, trainable {readable(found['trainable_bytes'])}, "
        f"optimizer {readable(found['optimizer_bytes'])}; where the base answers prompts, cache "
        f"{readable(found['answers_cache_bytes'])}",
        f"an update   {needs_text(found['step'])}",
    ]


def decoding_lines(name: str, config: RunConfig, mesh: MeshConfig, found: dict[str, Any]) -> list[str]:
    """The figures of `dry_run_decoding` as text."""
    return [
        *_head(name, found["drafter"], config.model, mesh, found),
        f"per device  weights {readable(found['weights_bytes'])}, cache {readable(found['cache_bytes'])}; "
        f"of the drafter weights {readable(found['drafter_bytes'])}, state {readable(found['drafter_state_bytes'])}",
        *(f"{rows:>3} row{'s' if rows > 1 else ' '}    {needs_text(step)}" for rows, step in found["steps"].items()),
    ]


def _head(name: str, drafter: str, model: str, mesh: MeshConfig, found: dict[str, Any]) -> list[str]:
    devices = f"{mesh.devices} device(s): data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"
    share = 100 * found["trainable"] / found["parameters"]
    return [
        f"{name}: {drafter} on {model}, {devices}",
        f"parameters  {found['parameters']:,} of the base, {found['trainable']:,} trainable ({share:.3g}%)",
    ]


def drafters_of(config: RunConfig, base: Base, spec: DrafterSpec | None = None) -> list[Drafter]:
    """The drafters of `dry_run_decoding`: one without drafts, then a config's in two sizes, or the one of `spec`."""
    nothing = autoregressive(absent_model(config.model, base))
    if spec is not None:
        return [nothing, absent_drafter(spec, config.model, base)]
    sized = (_within(drafter_of(config, base), most) for most in ROWS[1:])
    return [nothing, *filter(None, sized)]


def decodings(
    drafters: Sequence[Drafter], base: Base, mesh: Mesh, batch_size: int, length: int
) -> dict[int, tuple[Decoding, DecodeState]]:
    """Arguments of the decoding loop by rows of a step, with room for the last drafter's drafts."""
    capacity = cache_capacity(length, max(source.facts.distances for source in drafters[-1].sources))
    return {
        drafter.num_rows: abstract_state(base, abstract_drafter(drafter, base, mesh), mesh, batch_size, capacity)
        for drafter in drafters
    }


def _within(drafter: Drafter, most: int) -> Drafter | None:
    """The drafter with its largest tree within a number of rows; None where not even two nodes fit."""
    for nodes in range(most, 1, -1):
        if (sized := drafter.with_tree(f"sparse:{nodes}")).num_rows <= most:
            return sized
    return None


def _drafting(base: Base, count: int) -> Base:
    """A base that drafts so many tokens of its vocabulary; 0: all."""
    if not count:
        return base
    columns = jax.eval_shape(fewer_columns, base.params["lm_head"], ints(count))
    return base.replace(draft_vocabulary=DraftVocabulary(ints(count), columns))


def _cache_bytes(shapes: ModelConfig, batch_size: int, capacity: int, dtype: jnp.dtype, mesh: Mesh) -> int:
    """Bytes per device of all layers' keys and values."""
    shape = (batch_size, shapes.num_kv_heads, capacity, shapes.head_dim)
    shard = NamedSharding(mesh, partition(mesh, shape, ("batch", "heads"))).shard_shape(shape)
    return 2 * shapes.num_layers * math.prod(shard) * dtype.itemsize
