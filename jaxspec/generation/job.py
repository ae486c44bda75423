"""Batches on their way through the loop: their shapes, of which there are few, their states and their clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Acceptance, Match
from jaxspec.decoding.loop import decode
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters.budget import Budget
from jaxspec.drafters.costs import Samples, kind_of
from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError
from jaxspec.generation.prompts import pad_predictions, pad_tokens
from jaxspec.generation.sizes import SizeTimer
from jaxspec.machine import Stopwatch
from jaxspec.parallel.processes import host
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_beside

NOT_FINITE = "the base's logits are not finite: float16 is too narrow for it; use --dtype float32 or bfloat16"

_ROUNDS = 4  # steps timed of each size in a batch


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


def buffer_sizes(longest_prompt: int, max_new_tokens: int, max_depth: int) -> tuple[int, int]:
    """Bucketed output width and cache capacity."""
    capacity = cache_capacity(longest_prompt + max_new_tokens, max_depth)
    return bucket(max_new_tokens, 64), max(bucket(longest_prompt), capacity)


def check_finite(state: DecodeState) -> None:
    """Raise UserError where logits of a row overflowed, or weights are damaged."""
    if state.finite is not None and not np.all(host(state.finite)):
        raise UserError(NOT_FINITE)


def decoding_of(
    drafter: Drafter,
    batch_size: int,
    sampling: SamplingConfig,
    acceptance: Acceptance = Match(),
    eos: Sequence[int] = (),
) -> Decoding:
    """Constants of decoding a drafter's batches; `eos` are the ids that end a text."""
    drafter.check_accepted_by(acceptance)
    base = drafter.model.base_for(batch_size * drafter.least_rows)
    rest = (drafter.on_device, make_sampler(sampling), jnp.array(eos or (-1,), jnp.int32))
    return Decoding(base, *put_beside(base.params, rest), acceptance)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of answers: keyword arguments of `generate`, `iterate` and `stream`.

    Attributes:
      sampling: greedy by default.
      seed: with sampling, decides the text; the same for every prompt.
      acceptance: `Match` gives autoregressive decoding's text, `Rejection` another of the same distribution, as does
        `Block` for chains; `Typical` is lossy. `Rejection` judges what a fixed tree has drawn (`load_drafter(...,
        tree="own")`); what is chosen in every step it judges as `Match` does.
      chat: wrap texts in the tokenizer's chat template, where it has one.
      max_length: longest prompt and answer together, in tokens; default the base's context.
      prediction: what the answers are expected to say, which lookups draft from: a text for all prompts, or one per
        prompt: a text, token ids or None. The answers are the same without it.
    """

    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    acceptance: Acceptance = Match()
    chat: bool = True
    max_length: int | None = None
    prediction: str | Sequence[str | Sequence[int] | None] | None = None


def _are_sizes_to_be_timed(drafter: Drafter, settings: Settings, batch_size: int) -> bool:
    """Whether what sizes cost is only guessed, and decides how fast decoding is, but no text.

    Several processes must decode alike, and each would measure other times.
    """
    if not (isinstance(drafter.shape, Budget) and drafter.shape.guessed) or jax.process_count() > 1:
        return False
    of_one_program = batch_size * drafter.num_nodes <= drafter.on_device.free_rows
    return not of_one_program and settings.acceptance.same_text(settings.sampling.temperature)


@dataclasses.dataclass
class RunningBatch:
    """One batch on its way: its state and its clocks."""

    state: DecodeState
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float


class Job:
    """The parts that all batches of one call share.

    Args:
      drafter: what decodes, and on which base.
      settings: how.
      batch_size: prompts decoded together.

    Attributes:
      decoding: what stays as it is from step to step.
      mesh: what the work is divided over, or None.
    """

    def __init__(self, drafter: Drafter, settings: Settings, batch_size: int):
        self._model, self._seed = drafter.model, settings.seed
        self._idle, self._kind = drafter.idle, (batch_size, kind_of(settings.sampling.temperature))
        self.decoding = decoding_of(drafter, batch_size, settings.sampling, settings.acceptance, self._model.eos)
        self.mesh = mesh_of(self._model.params)
        self._samples = None
        if _are_sizes_to_be_timed(drafter, settings, batch_size):
            self._samples = drafter.samples.setdefault(self._kind, {})
            self._price_as_measured()

    def sizes(self, longest_prompt: int, max_new_tokens: int) -> tuple[int, int]:
        """The `buffer_sizes` of this drafter."""
        return buffer_sizes(longest_prompt, max_new_tokens, self.decoding.drafter.shape.depth)

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rows: int,
        width: int,
        capacity: int,
        predictions: Sequence[Sequence[int]] | None = None,
    ) -> RunningBatch:
        """Read prompts and make the first draft in a batch of `rows` rows; rows without a prompt are done.

        Drafts that rested at the end of the drafter's last texts keep resting.

        `predictions` are token ids of what is expected of each answer; None where nothing is predicted.
        """
        spare = rows - len(prompts)
        padded = bucket(max(map(len, prompts), default=1))
        tokens, lengths = pad_tokens([*prompts, *[[0]] * spare], padded)
        limits = np.array([max_new_tokens] * len(prompts) + [0] * spare, np.int32)
        batch = (tokens, lengths, limits, np.full(rows, self._seed % 2**32, np.uint32))
        sizes = {"capacity": capacity, "chunk": min(padded, prefill_chunk()), "width": width}
        given = {"idle": self._idle.get(self._kind, 0)}
        if predictions is not None:
            padded = bucket(max(map(len, predictions)) + 2)
            given["predicted"] = pad_predictions([*predictions, *[[]] * spare], padded)
        with in_mesh(self.mesh), Stopwatch() as watch:
            state = jax.block_until_ready(prefill(self._model.base, self.decoding, *batch, **sizes, **given))
        check_finite(state)
        return RunningBatch(state, watch.seconds, 0.0, watch.compile_seconds)

    def price_sizes(self, run: RunningBatch) -> Iterator[None]:
        """Time the first steps of a batch, each size by turns, where what sizes cost is only guessed.

        The drafter keeps the times for later batches.

        Yields:
          After every few steps.
        """
        if self._samples is None or self._price_as_measured():
            return
        timer = self._timer(self._samples.setdefault(run.state.cache.capacity, {}))
        for _ in range(_ROUNDS):
            if np.all(host(run.state.done)):
                break
            self._advance(run, timer.measure)
            yield
        self._price_as_measured()

    def _timer(self, samples: Samples) -> SizeTimer:
        return SizeTimer(self.decoding, samples, restarts=False)

    def _price_as_measured(self) -> bool:
        """Price sizes by times that are sure, and say whether there are any.

        Prices are an argument: nothing recompiles. They are those of one cache, and stay.
        """
        sure = [timer for timer in map(self._timer, self._samples.values()) if timer.is_sure]
        if sure:
            costs = self.decoding.drafter.shape.rising(sure[0].times.sizes)
            both = jnp.array([costs, costs], jnp.float32)  # all steps of a job are greedy, or all are sampled
            costs = put_beside(self._model.params, both)
            drafter = self.decoding.drafter
            self.decoding = self.decoding.replace(drafter=drafter.replace(shape=drafter.shape.replace(costs=costs)))
            self._samples = None  # nothing is left to time
        return bool(sure)

    def decode(self, run: RunningBatch, steps: int) -> None:
        """Decode `steps` further steps of a batch."""
        self._advance(run, lambda state: decode(self.decoding, state, np.int32(steps)))
        if run.state.pace is not None:
            self._idle[self._kind] = max(0, int(host(run.state.pace.idle)[0]))

    def _advance(self, run: RunningBatch, decode_some: Callable[[DecodeState], DecodeState]) -> None:
        """Decode some steps, and add their time to the clocks. Raises UserError where logits were not finite."""
        with in_mesh(self.mesh), Stopwatch() as watch:
            run.state = jax.block_until_ready(decode_some(run.state))
        check_finite(run.state)
        run.compile_seconds += watch.compile_seconds
        run.decode_seconds += watch.seconds
