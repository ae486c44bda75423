"""The figures of a device: decoding with a drafter, the time of a step, the rate of prefill, an update of training."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, TrainConfig
from jaxspec.decoding.divergence import first_divergence
from jaxspec.decoding.generate import Generation, generate
from jaxspec.decoding.loop import prefill
from jaxspec.drafting.drafter import Drafter, autoregressive
from jaxspec.errors import UserError
from jaxspec.methods import METHODS, load_drafter
from jaxspec.model.base import Base
from jaxspec.training.batches import make_batch
from jaxspec.training.data import Answer
from jaxspec.training.examples import read_prompts
from jaxspec.training.step import first_state, train_step
from jaxspec.tuning.latency import StepTimer, bare
from jaxspec.tuning.memory import peak_memory, step_bytes
from jaxspec.tuning.steps import SHAPES as LARGE
from jaxspec.tuning.steps import random_model
from jaxspec.weights.load import DEFAULT_MODEL, Model, load_model
from jaxspec.weights.shapes import SHAPES

if TYPE_CHECKING:
    from jaxspec.bench.device import DeviceConfig

CACHE = 512  # slots of a step's cache
_ROUNDS = 9  # samples of a step
_PREFILL = 512  # tokens
_UPDATES = 3
_TRAIN = TrainConfig(batch_size=1, sequence_length=512, insertions=64, remat=True)


def shapes_of(name: str) -> ModelConfig:
    """The shapes that a name stands for."""
    return LARGE.get(name) or SHAPES[name]


@functools.lru_cache(maxsize=1)
def _random(name: str) -> Model:
    return random_model(name, shapes_of(name), "bfloat16")


@functools.lru_cache(maxsize=1)
def _loaded(dtype: str) -> Model:
    return load_model(DEFAULT_MODEL, dtype)


@functools.lru_cache(maxsize=2)
def _reference(dtype: str, own_base: str, config: DeviceConfig) -> tuple[Model, list[list[int]], list[Generation]]:
    """A base, the prompts, and autoregressive decoding's answers: of the default model, or of what a method tuned."""
    model = _loaded(dtype)
    base = load_drafter(own_base, model).model if own_base else model
    prompts = [model.encode(prompt) for prompt in read_prompts(config.prompts)[: config.limit]]
    return base, prompts, _timed(autoregressive(base), prompts, config)


def forget_models() -> None:
    """Free what the figures of another group kept in memory."""
    for kept in (_random, _loaded, _reference, _bytes_per_second):
        kept.cache_clear()


def decode_figure(dtype: str, name: str, rows: int, config: DeviceConfig) -> dict[str, Any]:
    """A drafter with a tree of at most so many rows on all prompts, beside autoregressive decoding of the same base."""
    model = _loaded(dtype)
    if not METHODS[name].trainable:
        return _speed(_reference(dtype, "", config)[2])
    drafter = largest_tree(load_drafter(name, model), rows)
    base, prompts, plain = _reference(dtype, name if drafter.model is not model else "", config)
    answers = _timed(drafter, prompts, config)
    differences = [
        first_divergence(base, prompt, ours.tokens, reference.tokens)
        for prompt, ours, reference in zip(prompts, answers, plain, strict=True)
    ]
    speed, reference = _speed(answers), _speed(plain)
    return speed | {
        "rows": drafter.num_rows,
        "nodes": drafter.plan.num_nodes,
        "speedup": speed["tokens_per_second"] / reference["tokens_per_second"],
        "step_cost": speed["milliseconds_per_step"] / reference["milliseconds_per_step"],
        "identical": sum(difference is None for difference in differences),
        "answers": len(answers),
        "differences": [difference.as_json() for difference in differences if difference],
    }


def largest_tree(drafter: Drafter, rows: int) -> Drafter:
    """The drafter with the best tree of at most so many rows: dynamic for probes, of the likeliest nodes for heads.

    Raises UserError where not even one candidate fits.
    """
    method = drafter.method
    for size in range(rows - 1, 0, -1):
        spec = f"dynamic:{size}" if method.probe_distances else f"sparse:{size + 1}"
        try:
            sized = drafter.with_tree(spec)
        except UserError:
            continue
        if sized.num_rows <= rows:
            return sized
    raise UserError(f"{method.name} has no tree of {rows} rows")


def _timed(drafter: Drafter, prompts: list[list[int]], config: DeviceConfig) -> list[Generation]:
    """Answers, each timed alone; the first of every shape is made twice, as the first may wait for more than it."""
    generate(drafter, prompts[:1], config.max_new_tokens, max_steps=8)
    return generate(drafter, prompts, config.max_new_tokens)


def _speed(answers: list[Generation]) -> dict[str, float]:
    """Rates over all answers together."""
    tokens, steps = (sum(values) for values in zip(*((a.new_tokens - 1, a.steps) for a in answers), strict=True))
    seconds = sum(a.decode_seconds for a in answers)
    return {
        "tokens_per_step": tokens / steps,
        "tokens_per_second": tokens / seconds,
        "milliseconds_per_step": 1e3 * seconds / steps,
    }


def step_figure(name: str, batch: int, rows: int) -> dict[str, Any]:
    """Median time of a step of verification, and which share of the memory's speed it reaches."""
    model = _random(name)
    timer = StepTimer(bare(model, rows), batch, CACHE)
    seconds = float(np.median([timer() for _ in range(_ROUNDS)]))
    rate = step_bytes(model, batch, CACHE) / seconds
    return {
        "milliseconds": 1e3 * seconds,
        "gigabytes_per_second": rate / 1e9,
        "share_of_bandwidth": rate / _bytes_per_second(name),
    }


@functools.lru_cache(maxsize=1)
def _bytes_per_second(name: str) -> float:
    """How fast a program that only sums all weights reads them."""
    params = _random(name).params
    add = jax.jit(lambda params: sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(params)))
    return sum(x.nbytes for x in jax.tree.leaves(params)) / _best(lambda: add(params))


def prefill_figure(name: str) -> dict[str, Any]:
    """Tokens per second of a prompt, and the speed of memory that steps are compared with."""
    model = _random(name)
    tokens, lengths = np.ones((1, _PREFILL), np.int32), np.array([_PREFILL], np.int32)

    def run() -> Any:
        return prefill(model.base, tokens, lengths, capacity=_PREFILL, chunk=_PREFILL)

    return {"tokens_per_second": _PREFILL / _best(run), "streaming_gigabytes_per_second": _bytes_per_second(name) / 1e9}


def training_figure(name: str, method_name: str) -> dict[str, Any]:
    """Insertion groups per second of updates of one sequence, and the most memory used so far."""
    base: Base = _random(name).base
    method = METHODS[method_name]()
    length, groups = _TRAIN.sequence_length, _TRAIN.insertions
    answer = Answer(np.ones(length // 2, int).tolist(), np.ones(length // 2, int).tolist())
    points = np.arange(length // 2, length // 2 + groups)
    batch = jax.tree.map(jnp.asarray, make_batch([answer], [points], length, groups))
    state, _ = train_step(method, _TRAIN, 0, base, first_state(method, _TRAIN, 0, base), batch)
    jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(_UPDATES):
        state, _ = train_step(method, _TRAIN, 0, base, state, batch)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - began) / _UPDATES
    return {"groups_per_second": groups / seconds, "seconds_per_update": seconds, "peak_gigabytes": peak_memory() / 1e9}


def _best(run: Callable[[], Any]) -> float:
    """The least seconds of a few runs, after one that compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return min(seconds)
