"""Batches on their way through the loop: their shapes, of which there are few, their states and their clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Acceptance, Match
from jaxspec.decoding.loop import decode
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.prompts import pad_tokens
from jaxspec.machine import Stopwatch
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_beside


def bucket(length: int, smallest: int = 32, largest_step: int = 512) -> int:
    """The next power of two from `smallest`, and multiples of `largest_step` beyond it: few shapes, little waste."""
    size = smallest
    while size < length and size < largest_step:
        size *= 2
    return size if size >= length else -(-length // largest_step) * largest_step


def cache_capacity(length: int, max_depth: int) -> int:
    """S, slots of a cache for texts of so many tokens, and for the last step's rows below a path of such a depth."""
    return bucket(length + max_depth + 1, 128, 256)


def prefill_chunk() -> int:
    """Prompt tokens to run at once: on CPUs more make none of them faster, and chunks of padding are not run."""
    return 128 if jax.default_backend() == "cpu" else 512


def buffer_sizes(longest_prompt: int, max_new_tokens: int, max_depth: int) -> tuple[int, int, int]:
    """Bucketed prompt length, output width and cache capacity."""
    padded, capacity = bucket(longest_prompt), cache_capacity(longest_prompt + max_new_tokens, max_depth)
    return padded, bucket(max_new_tokens, 64), max(padded, capacity)


def decoding_of(
    drafter: Drafter,
    batch_size: int,
    sampling: SamplingConfig,
    acceptance: Acceptance = Match(),
    eos: Sequence[int] = (),
) -> Decoding:
    """What stays as it is while batches are decoded; `eos` are the ids that end a text."""
    base = drafter.model.base_for(batch_size * drafter.least_rows)
    rest = (drafter.on_device, make_sampler(sampling), jnp.array(eos or (-1,), jnp.int32))
    return Decoding(base, *put_beside(base.params, rest), acceptance)


@dataclasses.dataclass
class RunningBatch:
    """One batch on its way: its state and its clocks."""

    state: DecodeState
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float


class Job:
    """What all batches of one call share.

    Args:
      drafter: what decodes, and on which base.
      sampling: how tokens are drawn.
      seed: of sampling.
      acceptance: which candidates survive.
      batch_size: prompts decoded together.
    """

    def __init__(self, drafter: Drafter, sampling: SamplingConfig, seed: int, acceptance: Acceptance, batch_size: int):
        self.model, self._seed = drafter.model, seed
        self.mesh = mesh_of(self.model.params)
        self._decoding = decoding_of(drafter, batch_size, sampling, acceptance, self.model.eos)

    def begin(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], padded: int, width: int, capacity: int
    ) -> RunningBatch:
        """Prefill a batch of prompts, padded to `padded` tokens, and make the first draft."""
        tokens, lengths = pad_tokens(prompts, padded)
        seeds = np.full(len(prompts), self._seed % 2**32, np.uint32)
        chunk = min(padded, prefill_chunk())
        texts = (tokens, lengths, np.array(limits, np.int32), seeds)
        with in_mesh(self.mesh), Stopwatch() as watch:
            state = prefill(self.model.base, self._decoding, *texts, capacity=capacity, chunk=chunk, width=width)
            jax.block_until_ready(state)
        return RunningBatch(state, watch.seconds, 0.0, watch.compile_seconds)

    def advance(self, run: RunningBatch, steps: int) -> None:
        """Run some steps, or fewer where all rows are done."""
        with in_mesh(self.mesh), Stopwatch() as watch:
            run.state = jax.block_until_ready(decode(self._decoding, run.state, np.int32(steps)))
        run.compile_seconds += watch.compile_seconds
        run.decode_seconds += watch.seconds

    def sizes(self, longest_prompt: int, max_new_tokens: int) -> tuple[int, int, int]:
        """Of `buffer_sizes`, for this drafter."""
        return buffer_sizes(longest_prompt, max_new_tokens, self._decoding.drafter.shape.depth)
