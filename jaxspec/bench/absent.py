"""Bases, drafters and states of decoding without weights: shapes that programs are compiled from."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from jaxspec.config import ModelConfig, SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.loop import decode
from jaxspec.decoding.method import Method, abstract_trainable
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.source import DeviceSource
from jaxspec.decoding.state import DecodeState, Decoding, state_names
from jaxspec.drafters import DrafterSpec
from jaxspec.drafters.adapter import Adapter, method_of, shipped_heads
from jaxspec.drafters.drafter import FREE_ROWS, Drafter
from jaxspec.drafters.source import Source
from jaxspec.drafters.spec import MethodSpec
from jaxspec.model.base import Base
from jaxspec.model.blocks import holds_pairs, least_rows
from jaxspec.model.decoder import Decoder, abstract_params
from jaxspec.parallel.sharding import in_mesh, partition, tree_shardings, with_shardings
from jaxspec.training.run_config import RunConfig, load_configs
from jaxspec.trees.plan import plan_to_json
from jaxspec.weights.load import weights_dtype
from jaxspec.weights.model import Model
from jaxspec.weights.parts import with_joined_gates
from jaxspec.weights.quantizing import small_shapes

_PROMPT = 32


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An array of whole numbers, as a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract_base(shapes: ModelConfig, dtype: str, mesh: Mesh, remat: bool = False, form: str = "") -> Base:
    """A base without weights, in the shapes, dtype and places that they would have.

    Args:
      shapes: of the base.
      dtype: as `weights_dtype` takes it.
      mesh: what its weights are divided over.
      remat: whether layers are computed again in the backward pass.
      form: of the kernels, as `load_model` takes `weights`.

    Raises:
      UserError: kernels that are no whole groups of that form.
    """
    params, platform = abstract_params(shapes, weights_dtype(dtype)), mesh.devices.flat[0].platform
    if holds_pairs(platform):
        params = jax.eval_shape(with_joined_gates, params)
    params = small_shapes(params, form)
    decoder = Decoder(shapes, remat, dtype == "exact", least_rows(platform))
    return Base(with_shardings(params, tree_shardings(mesh, params)), decoder)


def absent_drafter(spec: DrafterSpec, name: str, base: Base) -> Drafter:
    """A drafter without weights: trees and draft vocabularies as they would be, pytrees empty.

    Methods with an adapter have the settings of the one that ships for the base, else those of a run in configs/ that
    trains one for it, else their defaults.

    Args:
      spec: what to draft with.
      name: of the base.
      base: from `abstract_base`.

    Raises:
      UserError: settings or a tree that do not fit the base.
    """
    model = absent_model(name, base)
    return Drafter(tuple(_source(each, model) for each in spec.methods), model).with_tree(spec.tree, spec.vocabulary)


def drafter_of(run: RunConfig, base: Base) -> Drafter:
    """The drafter that a run would train, without weights."""
    return Drafter((_with_adapter(run.method, _info(run), run.shapes),), absent_model(run.model, base)).with_tree(None)


def absent_model(name: str, base: Base) -> Model:
    """A base from `abstract_base` as a model."""
    return Model(name, base.decoder.config, base.params, "", exact=base.decoder.exact)


def _source(spec: MethodSpec, model: Model) -> Source:
    if not spec.method.facts(model.config).adapter:
        return Source(spec.method, {}, model.config)
    method, info = _settings(spec.method, model)
    return _with_adapter(dataclasses.replace(method, **dict(spec.settings)), info, model.config)


def _with_adapter(method: Method, info: dict, config: ModelConfig) -> Source:
    """A source whose adapter says no more than `info`."""
    abstract_trainable(method, config)  # refuses settings that do not fit the base
    return Source(method, {}, config, Adapter(method, {}, "", info, np.arange(config.vocab_size)))


def _settings(method: Method, model: Model) -> tuple[Method, dict]:
    """A method as an adapter for a base has it, with what else its adapter.json would say."""
    for head in shipped_heads().values():
        if (head.get("method"), head.get("base")) == (method.name, model.name):
            return method_of(method.name, head["settings"]), head
    for run in load_configs().values():
        if run.method.name == method.name and run.shapes == model.config:
            return run.method, _info(run)
    run = RunConfig(model.name, method)
    return method, _info(run)


def _info(run: RunConfig) -> dict:
    """What the adapter.json of a run's adapter would say of its drafts, with accuracies that are all alike."""
    return {"tree": plan_to_json(run.plan()), "draft_vocabulary": run.draft_vocabulary, "accuracy": run.accuracy}


def abstract_drafter(drafter: Drafter, base: Base, mesh: Mesh) -> DeviceDrafter:
    """The device-side part of a drafter without weights, as shapes; `base` and `mesh` as in `abstract_state`."""
    platform = mesh.devices.flat[0].platform

    def make(base: Base) -> DeviceDrafter:
        sources = []
        for source in (each for each in drafter.sources if each.facts.distances):
            final = source.method.finalize(source.method.init(jax.random.key(0), base), base)
            count, own = source.draft_vocabulary, final.base
            own = own.drafting(jnp.zeros(count, jnp.int32)) if count else own
            trainable = final.method.prepare(final.trainable, own)
            trainable = with_joined_gates(trainable) if holds_pairs(platform) else trainable
            calibrations = jax.tree.map(jnp.asarray, source.calibrations())
            sources.append(DeviceSource(trainable, calibrations, final.method, own.draft_vocabulary))
        return DeviceDrafter(tuple(sources), drafter.device_shape, FREE_ROWS.get(platform, 0))

    device = jax.eval_shape(make, base)
    return with_shardings(device, tree_shardings(mesh, device))


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
        return decode.lower(decoding, state, ints())
