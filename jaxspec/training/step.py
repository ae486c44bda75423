"""One update: the base is an argument, gradients reach the method's trainable pytree alone."""

from __future__ import annotations

import bisect
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxspec.config import TrainConfig
from jaxspec.drafting.draft import PyTree
from jaxspec.drafting.method import Batch, Method
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


def optimizer(train: TrainConfig, steps: int, factor: float = 1.0) -> optax.GradientTransformation:
    """AdamW on the configured schedule over `steps` updates, `factor` times the configured learning rate."""
    peak, rest, share = factor * train.learning_rate, steps - train.warmup, train.final_learning_rate
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, share),
        "linear": optax.linear_schedule(peak, share * peak, rest),
        "constant": optax.constant_schedule(peak),
    }[train.schedule]
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, train.warmup), after], [train.warmup])
    clip = optax.clip_by_global_norm(train.clip) if train.clip else optax.identity()
    return optax.chain(clip, optax.adamw(schedule, train.beta1, train.beta2, weight_decay=train.weight_decay))


def stage_optimizer(method: Method, train: TrainConfig, stage: int) -> optax.GradientTransformation:
    """The optimizer of one stage, whose share of the warm-up is its share of the updates."""
    ends = [0, *stage_ends(method, train.steps)]
    train = dataclasses.replace(train, warmup=train.warmup // len(method.stages))
    return optimizer(train, ends[stage + 1] - ends[stage], method.stages[stage].learning_rate)


def moving(method: Method, trainable: PyTree, stage: int) -> PyTree:
    """The part of the trainable pytree that a stage trains."""
    names = method.stages[stage].trains
    return trainable if names is None else {name: trainable[name] for name in names}


def pass_size(train: TrainConfig, parts: int) -> int:
    """Sequences per forward and backward pass, where a mesh divides a batch into `parts`."""
    return min(train.microbatch * parts, train.batch_size) if train.microbatch > 0 else train.batch_size


@flax.struct.dataclass
class TrainState:
    """The state of training between updates.

    Attributes:
      trainable: the method's pytree, float32.
      optimizer: the state of the stage's optimizer.
      average: the moving average of the trainable pytree in this stage, from zero; None without `train.ema`.
    """

    trainable: PyTree
    optimizer: PyTree
    average: optax.EmaState | None

    def best(self, train: TrainConfig) -> PyTree:
        """The weights to draft with: their average over the stage's updates so far, or without one the last ones."""
        if self.average is None:
            return self.trainable
        return optax.tree.bias_correction(self.average.ema, train.ema, self.average.count)


def first_state(method: Method, train: TrainConfig, stage: int, base: Base) -> TrainState:
    """The state before the first update of a run that begins with this stage."""
    # a copy: what starts as a part of the base must not be the base's own memory, which steps would reuse
    trainable = jax.tree.map(jnp.copy, method.init(jax.random.key(train.seed), base))
    return enter_stage(method, train, stage, trainable)


def enter_stage(method: Method, train: TrainConfig, stage: int, trainable: PyTree) -> TrainState:
    """The state before the first update of a stage: neither optimizer nor average remembers the stage before."""
    optimizer = stage_optimizer(method, train, stage).init(moving(method, trainable, stage))
    return TrainState(trainable, optimizer, optax.ema(train.ema).init(trainable) if train.ema else None)


@functools.partial(jax.jit, static_argnames=("method", "train", "stage", "whole"), donate_argnames=("state",))
def train_step(
    method: Method,
    train: TrainConfig,
    stage: int,
    base: Base,
    state: TrainState,
    batch: Batch,
    *,
    whole: bool = False,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update in a stage of the method: the new state, and metrics with `loss` and `gradient_norm`.

    The state is donated. It stays in float32, as gradients are, while the method computes in the base's dtype. With
    `whole` a mesh does not divide weights over `fsdp`, only gradients and the optimizer's state.
    """
    size = pass_size(train, parts_of_batch())
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

    count = train.batch_size // size
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, first))
    sums, _ = jax.lax.scan(add, divided_as(zeros), parts)
    gradients, metrics = jax.tree.map(lambda x: x / count, sums)
    metrics |= {"gradient_norm": optax.tree.norm(gradients)}
    updates, optimizer = stage_optimizer(method, train, stage).update(gradients, state.optimizer, trained)
    trainable = state.trainable | divided_as(optax.apply_updates(trained, updates), whole)
    average = state.average
    if average is not None:
        _, average = optax.ema(train.ema).update(trainable, average)
    return TrainState(trainable, divided_as(optimizer), average), metrics
