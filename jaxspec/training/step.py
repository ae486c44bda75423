"""Updates of a method's trainable pytree. The base is an argument that gets no gradients.

Batches and learning rates are data: runs that differ in nothing else share a compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Method, Stage
from jaxspec.model.base import Base
from jaxspec.model.decoder import for_products
from jaxspec.parallel.sharding import divided, divided_as, parts_of_batch
from jaxspec.training.settings import TrainConfig


def stage_ends(stages: Sequence[Stage], steps: int) -> list[int]:
    """The number of updates done at the end of every stage."""
    count = len(stages)
    return [steps * number // count for number in range(1, count + 1)]


def learning_rates(stages: Sequence[Stage], train: TrainConfig) -> np.ndarray:
    """The learning rate of every update, [steps] float32.

    Each stage has its share of the warm-up, from zero to its highest rate, and the configured course from there.
    """
    warmup, ends = train.warmup // len(stages), [0, *stage_ends(stages, train.steps)]
    rates, share = np.zeros(train.steps, np.float32), train.final_learning_rate
    for stage, (begin, end) in zip(stages, itertools.pairwise(ends), strict=True):
        peak, rest = stage.learning_rate * train.learning_rate, end - begin - warmup
        after = {
            "cosine": optax.cosine_decay_schedule(peak, rest, share),
            "linear": optax.linear_schedule(peak, share * peak, rest),
            "constant": optax.constant_schedule(peak),
        }[train.schedule]
        schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])
        rates[begin:end] = schedule(np.arange(end - begin))
    return rates


# the fields of TrainConfig that a compiled update depends on
_STATIC = ("batch_size", "microbatch", "weight_decay", "beta1", "beta2", "clip", "ema")


@dataclasses.dataclass(frozen=True)
class Update:
    """Static settings of an update: updates with the same ones share a compiled program.

    Attributes:
      method: the method that is trained.
      stage: index into `Facts.stages`.
      trains: entries of the trainable pytree that move in this stage; None: all.
      whole: whether a mesh keeps weights whole over `fsdp`, and divides only gradients and the optimizer's state.
      train: batch size, optimizer and average; the other settings have their defaults.
    """

    method: Method
    stage: int
    trains: tuple[str, ...] | None
    whole: bool
    train: TrainConfig

    @classmethod
    def of(cls, method: Method, config: ModelConfig, train: TrainConfig, stage: int = 0, whole: bool = False) -> Update:
        """The updates of a training's stage, on a base of these shapes."""
        static = TrainConfig(**{name: getattr(train, name) for name in _STATIC})
        return cls(method, stage, method.facts(config).stages[stage].trains, whole, static)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW without its learning rate: the caller multiplies its updates by the negative rate."""
        train = self.train
        clip = optax.clip_by_global_norm(train.clip) if train.clip else optax.identity()
        adam = optax.scale_by_adam(train.beta1, train.beta2)
        return optax.chain(clip, adam, optax.add_decayed_weights(train.weight_decay))

    def moving(self, trainable: PyTree) -> PyTree:
        """The entries of the trainable pytree that the stage trains."""
        return trainable if self.trains is None else {name: trainable[name] for name in self.trains}


def pass_size(batch_size: int, microbatch: int, parts: int) -> int:
    """Sequences per forward and backward pass, where a mesh divides a batch into `parts`."""
    return min(microbatch * parts, batch_size) if microbatch > 0 else batch_size


@flax.struct.dataclass
class TrainState:
    """The state of training between updates.

    Attributes:
      trainable: the method's pytree, float32.
      optimizer: the state of the stage's optimizer.
      average: moving average of the trainable pytree over this stage, which starts at zero; None without `ema`.
    """

    trainable: PyTree
    optimizer: PyTree
    average: optax.EmaState | None

    def best(self, ema: float) -> PyTree:
        """The weights to draft with: the average over the stage's updates so far, or without `ema` the present ones."""
        if self.average is None:
            return self.trainable
        return optax.tree.bias_correction(self.average.ema, ema, self.average.count)


def first_state(update: Update, seed: int, base: Base) -> TrainState:
    """The state before the first update of a run that begins with this stage."""
    # a copy: weights that start as a part of the base must not share its memory, which updates would overwrite
    return enter_stage(update, jax.tree.map(jnp.copy, update.method.init(jax.random.key(seed), base)))


def enter_stage(update: Update, trainable: PyTree) -> TrainState:
    """The state before the first update of a stage, with a fresh optimizer and average."""
    optimizer = update.optimizer().init(update.moving(trainable))
    return TrainState(trainable, optimizer, optax.ema(update.train.ema).init(trainable) if update.train.ema else None)


_LOSS_SCALE = 2.0**12  # of float16, whose smallest normal number is 6e-5; a power of two rounds nothing


_jit = functools.partial(jax.jit, static_argnames=("update",), donate_argnames=("state",))


@_jit
def train_step(
    update: Update, base: Base, state: TrainState, batch: Batch, rate: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Do one update.

    State and gradients are in float32; the method computes in the base's dtype. Where that is float16, the loss is
    multiplied by `_LOSS_SCALE` before the backward pass and the gradients are divided by it after, for small ones would
    become zero on their way.

    Args:
      update: static settings.
      base: the frozen decoder.
      state: the state before the update; donated.
      batch: the batch to learn from.
      rate: [] float32, the learning rate.

    Returns:
      The new state, and metrics, each [], with `loss` and `gradient_norm`.
    """
    size = pass_size(update.train.batch_size, update.train.microbatch, parts_of_batch())
    parts = jax.tree.map(lambda x: divided(x.reshape(-1, size, *x.shape[1:]), None, "batch"), batch)
    trained = update.moving(state.trainable)

    scale = _LOSS_SCALE if base.dtype == jnp.float16 else 1.0

    def loss(trained: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        trainable = for_products(state.trainable | trained, base.dtype)
        value, metrics = update.method.loss(trainable, base, batch, update.stage)
        return scale * value, metrics | {"loss": value}

    def part(batch: Batch) -> tuple[PyTree, dict[str, jax.Array]]:
        (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained, batch)
        return divided_as(jax.tree.map(lambda x: x / scale, gradients)), metrics

    def add(sums: PyTree, batch: Batch) -> tuple[PyTree, None]:  # one gradient is held, however many are added
        return jax.tree.map(jnp.add, sums, part(batch)), None

    count = update.train.batch_size // size
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, first))
    sums, _ = jax.lax.scan(add, divided_as(zeros), parts)
    gradients, metrics = jax.tree.map(lambda x: x / count, sums)
    metrics |= {"gradient_norm": optax.tree.norm(gradients)}
    updates, optimizer = update.optimizer().update(gradients, state.optimizer, trained)
    updates = jax.tree.map(lambda x: -rate * x, updates)
    trainable = state.trainable | divided_as(optax.apply_updates(trained, updates), update.whole)
    average = state.average
    if average is not None:
        _, average = optax.ema(update.train.ema).update(trainable, average)
    return TrainState(trainable, divided_as(optimizer), average), metrics


@_jit
def train_steps(
    update: Update, base: Base, state: TrainState, batches: Batch, rates: jax.Array, count: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Do several updates, each as `train_step` does.

    Args:
      update: static settings.
      base: the frozen decoder.
      state: the state before the updates; donated.
      batches: the batches of K updates, stacked: every array has a leading axis [K].
      rates: [K] float32, the learning rates.
      count: [] int32, number of the K updates to do.

    Returns:
      The new state, and metrics, each [K]; 0 for updates that were not done.
    """

    def one(number: jax.Array, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        return train_step.__wrapped__(update, base, state, jax.tree.map(lambda x: x[number], batches), rates[number])

    def add(number: jax.Array, carry: tuple[TrainState, PyTree]) -> tuple[TrainState, PyTree]:
        state, metrics = one(number, carry[0])
        return state, jax.tree.map(lambda all_of, x: all_of.at[number].set(x), carry[1], metrics)

    _, metrics = jax.eval_shape(one, jnp.zeros((), jnp.int32), state)
    none = jax.tree.map(lambda x: jnp.zeros((len(rates), *x.shape), x.dtype), metrics)
    return jax.lax.fori_loop(0, count, add, (state, none))
