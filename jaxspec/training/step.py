"""Updates: the base is an argument, gradients reach the method's trainable pytree alone.

What differs between updates is data, their learning rates too: runs that differ in nothing else share a program.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.config import TrainConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Method
from jaxspec.model.base import Base
from jaxspec.model.decoder import for_products
from jaxspec.parallel.sharding import divided, divided_as, parts_of_batch


def stage_ends(method: Method, steps: int) -> list[int]:
    """The update after the last one of every stage."""
    count = len(method.stages)
    return [steps * number // count for number in range(1, count + 1)]


def stage_of(method: Method, steps: int, update: int) -> int:
    """The stage of an update, both counted from 0."""
    return bisect.bisect_right(stage_ends(method, steps), update)


def learning_rates(method: Method, train: TrainConfig) -> np.ndarray:
    """The learning rate of every update, [steps] float32. Each stage has a schedule and its share of the warm-up."""
    warmup, ends = train.warmup // len(method.stages), [0, *stage_ends(method, train.steps)]
    rates = np.zeros(train.steps, np.float32)
    for stage, (begin, end) in zip(method.stages, itertools.pairwise(ends), strict=True):
        schedule = _schedule(train, stage.learning_rate * train.learning_rate, warmup, end - begin)
        rates[begin:end] = schedule(np.arange(end - begin))
    return rates


def _schedule(train: TrainConfig, peak: float, warmup: int, steps: int) -> optax.Schedule:
    """From zero to the highest rate, and along the configured course from there."""
    rest, share = steps - warmup, train.final_learning_rate
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, share),
        "linear": optax.linear_schedule(peak, share * peak, rest),
        "constant": optax.constant_schedule(peak),
    }[train.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """What the program of an update depends on: the fields of `TrainConfig` that have these names."""

    batch_size: int
    microbatch: int
    weight_decay: float
    beta1: float
    beta2: float
    clip: float
    ema: float

    @classmethod
    def of(cls, train: TrainConfig) -> UpdateSettings:
        """Those of a training."""
        return cls(*(getattr(train, field.name) for field in dataclasses.fields(cls)))

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW for a learning rate of -1: what it returns is still to be multiplied by the negative rate."""
        clip = optax.clip_by_global_norm(self.clip) if self.clip else optax.identity()
        adam = optax.scale_by_adam(self.beta1, self.beta2)
        return optax.chain(clip, adam, optax.add_decayed_weights(self.weight_decay))


def moving(method: Method, trainable: PyTree, stage: int) -> PyTree:
    """The part of the trainable pytree that a stage trains."""
    names = method.stages[stage].trains
    return trainable if names is None else {name: trainable[name] for name in names}


def pass_size(batch_size: int, microbatch: int, parts: int) -> int:
    """Sequences per forward and backward pass, where a mesh divides a batch into `parts`."""
    return min(microbatch * parts, batch_size) if microbatch > 0 else batch_size


@flax.struct.dataclass
class TrainState:
    """The state of training between updates.

    Attributes:
      trainable: the method's pytree, float32.
      optimizer: the state of the stage's optimizer.
      average: the moving average of the trainable pytree in this stage, from zero; None without `ema`.
    """

    trainable: PyTree
    optimizer: PyTree
    average: optax.EmaState | None

    def best(self, settings: UpdateSettings) -> PyTree:
        """The weights to draft with: their average over the stage's updates so far, or without one the last ones."""
        if self.average is None:
            return self.trainable
        return optax.tree.bias_correction(self.average.ema, settings.ema, self.average.count)


def first_state(method: Method, train: TrainConfig, stage: int, base: Base) -> TrainState:
    """The state before the first update of a run that begins with this stage."""
    # a copy: what starts as a part of the base must not be the base's own memory, which steps would reuse
    trainable = jax.tree.map(jnp.copy, method.init(jax.random.key(train.seed), base))
    return enter_stage(method, UpdateSettings.of(train), stage, trainable)


def enter_stage(method: Method, settings: UpdateSettings, stage: int, trainable: PyTree) -> TrainState:
    """The state before the first update of a stage: neither optimizer nor average remembers the stage before."""
    optimizer = settings.optimizer().init(moving(method, trainable, stage))
    return TrainState(trainable, optimizer, optax.ema(settings.ema).init(trainable) if settings.ema else None)


_jit = functools.partial(jax.jit, static_argnames=("method", "settings", "stage", "whole"), donate_argnames=("state",))


@_jit
def train_step(
    method: Method,
    settings: UpdateSettings,
    stage: int,
    base: Base,
    state: TrainState,
    batch: Batch,
    rate: jax.Array,
    *,
    whole: bool = False,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update in a stage of the method.

    The state is donated. It stays in float32, as gradients are, while the method computes in the base's dtype.

    Args:
      method: what is trained.
      settings: of the update.
      stage: index into the method's stages.
      base: the frozen decoder.
      state: before the update.
      batch: what it learns from.
      rate: [] float32, its learning rate.
      whole: a mesh does not divide weights over `fsdp`, only gradients and the optimizer's state.

    Returns:
      The new state, and metrics, each [], with `loss` and `gradient_norm`.
    """
    return _update(method, settings, stage, base, state, batch, rate, whole)


@_jit
def train_steps(
    method: Method,
    settings: UpdateSettings,
    stage: int,
    base: Base,
    state: TrainState,
    batches: Batch,
    rates: jax.Array,
    count: jax.Array,
    *,
    whole: bool = False,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Several updates in a stage of the method; the arguments and results of `train_step` but for these.

    Args:
      method: what is trained.
      settings: of the updates.
      stage: index into the method's stages.
      base: the frozen decoder.
      state: before the updates.
      batches: of K updates, every array of a batch with an axis [K] before its own.
      rates: [K] float32, their learning rates.
      count: [] int32, how many of the K updates to do.
      whole: as in `train_step`.

    Returns:
      The new state, and metrics, each [K]; those of updates that were not done are 0.
    """

    def one(number: jax.Array, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = jax.tree.map(lambda x: x[number], batches)
        return _update(method, settings, stage, base, state, batch, rates[number], whole)

    def add(number: jax.Array, carry: tuple[TrainState, PyTree]) -> tuple[TrainState, PyTree]:
        state, metrics = one(number, carry[0])
        return state, jax.tree.map(lambda all_of, x: all_of.at[number].set(x), carry[1], metrics)

    _, metrics = jax.eval_shape(one, jnp.zeros((), jnp.int32), state)
    none = jax.tree.map(lambda x: jnp.zeros((len(rates), *x.shape), x.dtype), metrics)
    return jax.lax.fori_loop(0, count, add, (state, none))


def _update(
    method: Method,
    settings: UpdateSettings,
    stage: int,
    base: Base,
    state: TrainState,
    batch: Batch,
    rate: jax.Array,
    whole: bool,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """What `train_step` does, for both programs."""
    size = pass_size(settings.batch_size, settings.microbatch, parts_of_batch())
    parts = jax.tree.map(lambda x: divided(x.reshape(-1, size, *x.shape[1:]), None, "batch"), batch)
    trained = moving(method, state.trainable, stage)

    def loss(trained: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        trainable = for_products(state.trainable | trained, base.dtype)
        return method.loss(trainable, base, batch, stage)

    def part(batch: Batch) -> tuple[PyTree, dict[str, jax.Array]]:
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained, batch)
        return divided_as(gradients), metrics | {"loss": value}

    def add(sums: PyTree, batch: Batch) -> tuple[PyTree, None]:  # one gradient is held, however many are added
        return jax.tree.map(jnp.add, sums, part(batch)), None

    count = settings.batch_size // size
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, first))
    sums, _ = jax.lax.scan(add, divided_as(zeros), parts)
    gradients, metrics = jax.tree.map(lambda x: x / count, sums)
    metrics |= {"gradient_norm": optax.tree.norm(gradients)}
    updates, optimizer = settings.optimizer().update(gradients, state.optimizer, trained)
    updates = jax.tree.map(lambda x: -rate * x, updates)
    trainable = state.trainable | divided_as(optax.apply_updates(trained, updates), whole)
    average = state.average
    if average is not None:
        _, average = optax.ema(settings.ema).update(trainable, average)
    return TrainState(trainable, divided_as(optimizer), average), metrics
