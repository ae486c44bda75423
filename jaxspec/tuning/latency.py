"""How long a decoding step takes on this machine, by its number of rows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.loop import Drafter, decode, prefill, start
from jaxspec.drafting.adapter import Adapter, make_drafter, plain_drafter
from jaxspec.drafting.method import Method
from jaxspec.drafting.sampling import make_sampler
from jaxspec.drafting.tree import State, TreePlan, chain, from_paths, make_plan
from jaxspec.drafting.tree.hardware import Latency, fit_latency
from jaxspec.model.base import Base
from jaxspec.parallel.sharding import put_beside
from jaxspec.progress import Progress
from jaxspec.weights.load import Model

K = TypeVar("K", bound=Hashable)
_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # nodes
_STEPS = 4  # per sample
_PROMPT = 64  # tokens at most before the steps


def measure_latency(
    model: Model,
    adapter: Adapter,
    draft_vocabulary: int,
    batch_size: int,
    cache_length: int,
    max_rows: int,
    rounds: int = 9,
) -> Latency:
    """Seconds of a decoding step against its rows, the sizes taken in turn so that a slow moment hurts all alike.

    Each size is a root with candidates side by side, every node with one probe where the method has probes. For
    methods without, chains tell what a deeper tree adds.

    Args:
      model: the base that the adapter drafts for, tuned where its method tunes it.
      adapter: what drafts.
      draft_vocabulary: over how many tokens; 0 is all. For heads, which draft level by level, it makes the difference.
      batch_size: B.
      cache_length: S; attention looks at all of it.
      max_rows: the largest size.
      rounds: measurements of each size.
    """
    method, runs = adapter.method, {}
    per_node = 1 + method.probe_rows
    drafters: dict[int | str, Drafter] = {1: plain_drafter()}
    for size in (s for s in _SIZES if s * per_node <= max_rows):
        drafters[size * per_node] = make_drafter(adapter, star(size, 1), model, draft_vocabulary)
    depths = range(2, method.max_distance + 1) if not method.probe_distances else ()
    drafters |= {f"depth {depth}": make_drafter(adapter, chain(depth), model, draft_vocabulary) for depth in depths}
    with Progress("measuring", len(drafters) * (rounds + 1), "runs") as progress:
        for number, (rows, drafter) in enumerate(drafters.items(), 1):
            base = model.base_for(batch_size * drafter.num_rows)
            runs[rows] = StepTimer(base, drafter, batch_size, cache_length)
            progress.update(number, f"{rows} compiled" if isinstance(rows, str) else f"{rows} rows compiled")
        medians = in_rounds(runs, rounds, lambda done: progress.update(len(runs) + done))
    latency = fit_latency({rows: seconds for rows, seconds in medians.items() if isinstance(rows, int)})
    if not depths:
        return latency
    deeper = [medians[f"depth {depth}"] - latency(depth + 1) for depth in depths]
    return dataclasses.replace(latency, drafting=tuple(np.maximum.accumulate([0.0, *deeper]).tolist()))


def in_rounds(runs: dict[K, Callable[[], float]], rounds: int, say: Callable[[int], None]) -> dict[K, float]:
    """Medians of several measurements, all taken once a round, in another order every round.

    Args:
      runs: what measures, by name.
      rounds: how many.
      say: told how many measurements have been taken.
    """
    names, samples = list(runs), {name: [] for name in runs}
    for turn in range(rounds):
        for number, place in enumerate(np.random.default_rng(turn).permutation(len(names)), 1):
            samples[names[place]].append(runs[names[place]]())
            say(turn * len(names) + number)
    return {name: float(np.median(values)) for name, values in samples.items()}


def star(nodes: int, probes: int) -> TreePlan:
    """A root with candidates side by side, so many probes on every node."""
    paths = tuple((rank,) for rank in range(nodes - 1))
    return make_plan([State(paths, (probes,) * nodes, 1)])


def bare(nodes: int) -> Drafter:
    """Nothing that drafts, with a tree of so many nodes: steps of verification alone."""
    return Drafter({}, from_paths([(rank,) for rank in range(nodes - 1)]).arrays(0), Method())


class StepTimer:
    """Times a few steps of one drafter from one and the same state."""

    def __init__(self, base: Base, drafter: Drafter, batch_size: int, cache_length: int):
        rest = (drafter, make_sampler(SamplingConfig()), jnp.array([-1], jnp.int32))
        self._drafter, self._sampler, self._eos = put_beside(base.params, rest)
        self._base, length = base, min(cache_length // 2, _PROMPT)
        tokens = np.ones((batch_size, length), np.int32)
        lengths = np.full(batch_size, length, np.int32)
        prefilled = prefill(base, tokens, lengths, capacity=cache_length, chunk=length)
        self._state = start(
            base, drafter, self._sampler, *prefilled, tokens, lengths, np.full(batch_size, 2**30, np.int32),
            jnp.zeros(batch_size, jnp.uint32), self._eos, acceptance=Match(), width=cache_length, chunk=length,
        )  # fmt: skip
        self()

    def __call__(self) -> float:
        """Seconds per step."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self._state))
        began = time.perf_counter()
        args = (self._base, self._drafter, self._sampler, self._eos, state, np.int32(_STEPS))
        jax.block_until_ready(decode(*args, acceptance=Match()))
        return (time.perf_counter() - began) / _STEPS
