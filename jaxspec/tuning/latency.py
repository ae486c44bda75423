"""How long a decoding step takes on this machine, by its number of rows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.loop import decode
from jaxspec.decoding.prompt import prefill
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.generation.job import decoding_of
from jaxspec.progress import Progress
from jaxspec.trees import State, TreePlan, chain, from_paths, make_plan
from jaxspec.tuning.hardware import RowLatency, fit_latency
from jaxspec.weights.load import Model

K = TypeVar("K", bound=Hashable)
_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # nodes
STEPS = 4  # per sample
_PROMPT = 64  # tokens at most before the steps


def measure_latency(
    drafter: Drafter, draft_vocabulary: int, batch_size: int, cache_length: int, max_rows: int, rounds: int = 9
) -> RowLatency:
    """Seconds of a decoding step against its rows.

    Each size is a root with candidates side by side, every node with one probe where the method has probes. For
    methods without, chains tell what a deeper tree adds.

    Args:
      drafter: what drafts, whatever its tree.
      draft_vocabulary: over how many tokens; 0 is all. For heads, which draft level by level, it makes the difference.
      batch_size: B.
      cache_length: S; attention looks at all of it.
      max_rows: the largest size.
      rounds: measurements of each size.
    """
    facts = drafter.source.facts
    rows_per_node = 1 + facts.probe_rows
    widths = [nodes for nodes in _SIZES if nodes * rows_per_node <= max_rows]
    depths = range(2, facts.distances + 1) if not facts.probes else ()
    sizes: dict[tuple[str, int], Drafter] = {("rows", 1): autoregressive(drafter.model)}
    for nodes in widths:
        sizes["rows", nodes * rows_per_node] = drafter.with_tree(star(nodes, 1), draft_vocabulary)
    for depth in depths:
        sizes["depth", depth] = drafter.with_tree(chain(depth), draft_vocabulary)
    seconds = step_times(sizes, cache_length, rounds, batch_size)
    latency = fit_latency({size: value for (kind, size), value in seconds.items() if kind == "rows"})
    if not depths:
        return latency
    deeper = [seconds["depth", depth] - latency(depth + 1) for depth in depths]
    return dataclasses.replace(latency, drafting=tuple(np.maximum.accumulate([0.0, *deeper]).tolist()))


def step_times(
    drafters: Mapping[K, Drafter],
    cache_length: int,
    rounds: int,
    batch_size: int = 1,
    sampling: SamplingConfig = SamplingConfig(),
    steps: int = STEPS,
) -> dict[K, float]:
    """Median seconds of a decoding step with each drafter.

    Each is measured once a round, in another order every round, so that a slow moment of the machine hurts all alike.

    Args:
      drafters: by name.
      cache_length: S.
      rounds: measurements of each.
      batch_size: B.
      sampling: how tokens are drawn.
      steps: that a sample times together.
    """
    names, timers, samples, done = list(drafters), {}, {name: [] for name in drafters}, len(drafters)
    with Progress("measuring", len(names) * (rounds + 1), "runs") as progress:
        for number, (name, drafter) in enumerate(drafters.items(), 1):
            timers[name] = StepTimer(drafter, batch_size, cache_length, sampling, steps)
            progress.update(number, f"{number} of {len(names)} compiled")
        for turn in range(rounds):
            for place in np.random.default_rng(turn).permutation(len(names)):
                samples[names[place]].append(timers[names[place]]())
                done += 1
                progress.update(done)
    return {name: float(np.median(values)) for name, values in samples.items()}


def star(nodes: int, probes: int) -> TreePlan:
    """A root with candidates side by side, so many probes on every node."""
    paths = tuple((rank,) for rank in range(nodes - 1))
    return make_plan([State(paths, (probes,) * nodes, 1)])


def bare(model: Model, nodes: int) -> Drafter:
    """Nothing that drafts, with a tree of so many nodes: steps of verification alone."""
    return dataclasses.replace(autoregressive(model), shape=from_paths([(rank,) for rank in range(nodes - 1)]))


class StepTimer:
    """Times a few steps of one drafter, always from the same state.

    Args:
      drafter: what to time.
      batch_size: B.
      cache_length: S.
      sampling: how tokens are drawn.
      steps: timed together, few enough for the cache; on accelerators starting a program takes as long as a small step.

    Attributes:
      decoding: the loop's constants.
      state: where the steps begin.
    """

    def __init__(
        self,
        drafter: Drafter,
        batch_size: int,
        cache_length: int,
        sampling: SamplingConfig = SamplingConfig(),
        steps: int = STEPS,
    ):
        self._steps = steps
        self.decoding = decoding_of(drafter, batch_size, sampling)
        base = self.decoding.base
        length = min(cache_length // 2, _PROMPT)
        tokens, lengths = np.ones((batch_size, length), np.int32), np.full(batch_size, length, np.int32)
        limits, seeds = np.full(batch_size, 2**30, np.int32), np.zeros(batch_size, np.uint32)
        sizes = {"capacity": cache_length, "chunk": length, "width": cache_length}
        self.state = prefill(base, self.decoding, tokens, lengths, limits, seeds, **sizes)
        self()

    def __call__(self) -> float:
        """Seconds per step."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self.state))
        began = time.perf_counter()
        jax.block_until_ready(decode(self.decoding, state, np.int32(self._steps)))
        return (time.perf_counter() - began) / self._steps
