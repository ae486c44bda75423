"""The figures of a device: decoding with a drafter, the time of a step, the rate of prefill, an update of training."""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import time
import timeit
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, SamplingConfig
from jaxspec.decoding.prompt import prefill
from jaxspec.drafters import METHODS, load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.divergence import first_divergence
from jaxspec.generation.generate import Generation, generate
from jaxspec.generation.job import bucket, buffer_sizes, decoding_of
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.training.data import AnsweredPrompt, make_batch
from jaxspec.training.examples import read_prompts
from jaxspec.training.settings import TrainConfig
from jaxspec.training.step import Update, first_state, train_step
from jaxspec.tuning.latency import bare, step_times
from jaxspec.tuning.memory import bandwidth, step_bytes
from jaxspec.tuning.steps import SIZES, random_model
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model
from jaxspec.weights.shapes import SHAPES

if TYPE_CHECKING:
    from jaxspec.bench.device import DeviceConfig

CACHE = 512  # slots of a step's cache
_ROUNDS = 9  # samples of a step
_PREFILL = 512  # tokens
_DEPTH = 4  # of the deepest tree
_UPDATES = 3
_TRAIN = TrainConfig(batch_size=1, sequence_length=512, insertions=64, remat=True)


def shapes_of(name: str) -> ModelConfig:
    """The model shapes of that name."""
    return SIZES.get(name) or SHAPES[name]


@functools.lru_cache(maxsize=1)
def _random(name: str, weights: str) -> Model:
    return random_model(name, shapes_of(name), "bfloat16", weights)


@functools.lru_cache(maxsize=1)
def _loaded(dtype: str, weights: str) -> Model:
    return load_model(DEFAULT_MODEL, dtype, weights=weights)


@functools.lru_cache(maxsize=2)
def _reference(dtype: str, own_base: str, config: DeviceConfig) -> tuple[Model, list[list[int]], list[Generation]]:
    """A base, the prompts and autoregressive decoding's answers, for the default model or the base that a method tuned.

    Computed once per process, so that a resumed measurement compares figures of one process.
    """
    model = _loaded(dtype, config.weights)
    base = load_drafter(own_base, model).model if own_base else model
    prompts = [model.encode(prompt) for prompt in read_prompts(config.prompts)]
    prompts = of_one_size(prompts, config.max_new_tokens)[: config.limit]
    return base, prompts, _timed(autoregressive(base), prompts, config)


def of_one_size(prompts: list[list[int]], max_new_tokens: int, depth: int = _DEPTH) -> list[list[int]]:
    """The prompts of the most frequent size of buffers: every drafter compiles one set of programs for all of them.

    Args:
      prompts: token ids.
      max_new_tokens: tokens per answer.
      depth: depth of the deepest tree.
    """
    sizes = [(bucket(len(prompt)), *buffer_sizes(len(prompt), max_new_tokens, depth)) for prompt in prompts]
    most = max(sizes, key=sizes.count)
    return [prompt for prompt, size in zip(prompts, sizes, strict=True) if size == most]


def forget_models() -> None:
    """Free the models that another group of figures, or an error, has kept in memory."""
    for kept in (_random, _loaded, _reference):
        kept.cache_clear()
    gc.collect()


def decode_figure(dtype: str, name: str, rows: int, config: DeviceConfig) -> dict[str, Any]:
    """Decode all prompts with a tree of at most `rows` rows, and autoregressively with the same base."""
    model = _loaded(dtype, config.weights)
    if not METHODS[name]().facts(model.config).trained:
        plain = _reference(dtype, "", config)[2]
        return _speed(plain) | {"answers": len(plain)}
    drafter = largest_tree(load_drafter(name, model, tree="own"), rows)
    base, prompts, plain = _reference(dtype, name if drafter.model is not model else "", config)
    answers = _timed(drafter, prompts, config)
    differences = [
        first_divergence(base, prompt, ours.tokens, reference.tokens, max_new_tokens=config.max_new_tokens)
        for prompt, ours, reference in zip(prompts, answers, plain, strict=True)
    ]
    speed, reference = _speed(answers), _speed(plain)
    return speed | {
        "rows": drafter.num_rows,
        "nodes": drafter.num_nodes,
        "reference_tokens_per_second": reference["tokens_per_second"],
        "speedup": speed["tokens_per_second"] / reference["tokens_per_second"],
        "step_cost": speed["milliseconds_per_step"] / reference["milliseconds_per_step"],
        "identical": sum(difference is None for difference in differences),
        "answers": len(answers),
        "differences": [difference.as_json() for difference in differences if difference],
    }


def largest_tree(drafter: Drafter, rows: int) -> Drafter:
    """The drafter with the best tree of at most `rows` rows: dynamic for probes, sparse for heads.

    Raises UserError where not even one candidate fits.
    """

    @functools.cache
    def sized(size: int) -> Drafter | None:
        with contextlib.suppress(UserError):  # there is no such tree
            return drafter.with_tree(f"dynamic:{size}" if drafter.source.facts.probes else f"sparse:{size + 1}")

    sizes = range(rows)
    end = bisect.bisect_right(sizes, rows, key=lambda size: sized(size).num_rows if sized(size) else 0)
    largest = next(filter(None, map(sized, reversed(sizes[:end]))), None)
    if largest is None:
        raise UserError(f"{drafter.name} has no tree of {rows} rows")
    return largest


def _timed(drafter: Drafter, prompts: list[list[int]], config: DeviceConfig) -> list[Generation]:
    """Answers, each timed alone, after a few steps of warming up."""
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


def step_figure(name: str, batch: int, rows: int, weights: str) -> dict[str, Any]:
    """Median time of a verification step, and the share of the memory bandwidth that it reaches."""
    model = _random(name, weights)
    seconds = step_times({rows: bare(model, rows)}, CACHE, _ROUNDS, batch)[rows]
    rate = step_bytes(model, batch, CACHE) / seconds
    return {
        "milliseconds": 1e3 * seconds,
        "gigabytes_per_second": rate / 1e9,
        "share_of_bandwidth": rate / _bytes_per_second(),
    }


@functools.lru_cache(maxsize=1)
def _bytes_per_second() -> float:
    """Bytes per second at which this process streams a large array."""
    return bandwidth(_ROUNDS)


def prefill_figure(name: str, weights: str) -> dict[str, Any]:
    """Tokens per second of prefill, and the memory bandwidth that steps are compared with."""
    model = _random(name, weights)
    tokens, lengths, zero = np.ones((1, _PREFILL), np.int32), np.array([_PREFILL], np.int32), np.zeros(1, np.uint32)
    decoding = decoding_of(autoregressive(model), 1, SamplingConfig())

    def run() -> None:
        rows = (tokens, lengths, lengths, zero)
        jax.block_until_ready(prefill(model.base, decoding, *rows, capacity=_PREFILL, chunk=_PREFILL, width=1))

    run()  # compiles
    seconds = min(timeit.repeat(run, number=1, repeat=5))
    return {"tokens_per_second": _PREFILL / seconds, "streaming_gigabytes_per_second": _bytes_per_second() / 1e9}


def training_figure(name: str, method_name: str, weights: str) -> dict[str, Any]:
    """Insertion groups per second of updates of one sequence, and the memory that an update needs.

    The method has its default settings. Raises UserError where these need a deeper base.
    """
    model = _random(name, weights)
    base = Base(model.params, Decoder(model.config, remat=_TRAIN.remat))
    length, groups = _TRAIN.sequence_length, _TRAIN.insertions
    answer = AnsweredPrompt(np.ones(length // 2, int).tolist(), np.ones(length // 2, int).tolist())
    points = np.arange(length // 2, length // 2 + groups)
    batch = jax.tree.map(jnp.asarray, make_batch([answer], [points], length, groups))
    update = Update.of(METHODS[method_name](), model.config, _TRAIN)
    state = first_state(update, _TRAIN.seed, base)
    rate = jnp.float32(_TRAIN.learning_rate)
    run = train_step.lower(update, base, state, batch, rate).compile()
    memory = run.memory_analysis()
    state, _ = jax.block_until_ready(run(base, state, batch, rate))
    began = time.perf_counter()
    for _ in range(_UPDATES):
        state, _ = run(base, state, batch, rate)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - began) / _UPDATES
    return {
        "groups_per_second": groups / seconds,
        "seconds_per_update": seconds,
        "gigabytes": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9,
    }
