"""Prompts in, texts out: batching, buckets, timing, streaming. The public face of the loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Acceptance, Match
from jaxspec.decoding.loop import DecodeState, Drafter, decode, prefill, start
from jaxspec.decoding.sampling import make_sampler
from jaxspec.errors import UserError
from jaxspec.model.base import Base
from jaxspec.model.load import Model

_PREFILL_CHUNK = 512
_UNBOUNDED = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer.

    Attributes:
      prompt: as given, or the decoded ids where ids were given.
      text: the answer, special tokens left out; empty for a model without a tokenizer.
      tokens: ids of the answer, an end-of-text token included.
      drafted: per token, whether it was drafted and accepted.
      steps: forward passes after prefill.
      offered: per depth from 1, steps that had a candidate there below the accepted path.
      accepted: per depth from 1, steps that accepted one.
      prefill_seconds: wall time of prefill; of the whole batch where prompts were batched.
      decode_seconds: wall time of all steps, compilation excluded; likewise.
      compile_seconds: time spent compiling for this batch's shapes; 0 when they were known.
    """

    prompt: str
    text: str
    tokens: list[int]
    drafted: list[bool]
    steps: int
    offered: list[int]
    accepted: list[int]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens)

    @property
    def tokens_per_step(self) -> float:
        """(new tokens - 1) / steps: prefill emits the first token. 1 for autoregressive decoding; 0 without steps."""
        return (self.new_tokens - 1) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """(new tokens - 1) / decode seconds; 0 without steps."""
        return (self.new_tokens - 1) / self.decode_seconds if self.steps else 0.0


_EXECUTABLES: dict[Any, Any] = {}


def _compiled(function: Any, *args: Any, **static: Any) -> tuple[Any, float]:
    """A jitted function compiled for these arguments, and the seconds it took (0 when already known)."""
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    key = (function, structure, shapes, tuple(sorted(static.items(), key=lambda item: item[0])))
    if key in _EXECUTABLES:
        return _EXECUTABLES[key], 0.0
    began = time.perf_counter()
    _EXECUTABLES[key] = function.lower(*args, **static).compile()
    return _EXECUTABLES[key], time.perf_counter() - began


def bucket(length: int, smallest: int = 32, largest_step: int = 512) -> int:
    """The next power of two from `smallest`, and multiples of `largest_step` beyond it: few shapes, little waste."""
    size = smallest
    while size < length and size < largest_step:
        size *= 2
    return size if size >= length else -(-length // largest_step) * largest_step


@dataclasses.dataclass
class _Run:
    """One batch on its way: prompts as ids, the state, and the clocks."""

    state: DecodeState
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float


def _advance(
    model: Model,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
    acceptance: Acceptance,
    steps_per_chunk: int,
) -> Iterator[_Run]:
    """Prefill a batch, then decode it chunk by chunk; yields after prefill and after every chunk."""
    base, sampler = Base(model.params, model.decoder), make_sampler(sampling)
    B, P = len(prompts), drafter.tree.max_depth
    lengths = np.array([len(p) for p in prompts], np.int32)
    padded = bucket(int(lengths.max()))
    width = bucket(max(limits), 64)
    capacity = max(padded, bucket(int(lengths.max()) + max(limits) + P + 1, 128, 128))
    tokens = np.zeros((B, padded), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    eos = jnp.array(model.eos or (-1,), jnp.int32)
    seeds = jnp.full(B, seed % 2**32, jnp.uint32)

    run_prefill, compiling = _compiled(prefill, base, tokens, lengths, capacity=capacity, chunk=_PREFILL_CHUNK)
    began = time.perf_counter()
    cache, hidden, logits = run_prefill(base, tokens, lengths)
    jax.block_until_ready(logits)
    prefill_seconds = time.perf_counter() - began
    args = (base, drafter, sampler, cache, hidden, logits, lengths, np.array(limits, np.int32), seeds, eos)
    run_start, seconds = _compiled(start, *args, width=width)
    compiling += seconds
    began = time.perf_counter()
    state = jax.block_until_ready(run_start(*args))
    del cache, args
    prefill_seconds += time.perf_counter() - began

    steps = np.int32(steps_per_chunk)
    run_decode, seconds = _compiled(decode, base, drafter, sampler, eos, state, steps, acceptance=acceptance)
    run = _Run(state, prefill_seconds, 0.0, compiling + seconds)
    yield run
    while not np.all(run.state.done):
        began = time.perf_counter()
        run.state = jax.block_until_ready(run_decode(base, drafter, sampler, eos, run.state, steps))
        run.decode_seconds += time.perf_counter() - began
        yield run


def _collect(model: Model, run: _Run, row: int, prompt: str) -> Generation:
    """The answer of one batch row as it stands."""
    state, count = run.state, int(run.state.counts[row])
    tokens = np.asarray(state.tokens)[row, :count].tolist()
    return Generation(
        prompt=prompt,
        text=model.decode(tokens) if model.tokenizer else "",
        tokens=tokens,
        drafted=np.asarray(state.drafted)[row, :count].tolist(),
        steps=int(state.stats.steps[row]),
        offered=np.asarray(state.stats.offered)[row].tolist(),
        accepted=np.asarray(state.stats.accepted)[row].tolist(),
        prefill_seconds=run.prefill_seconds,
        decode_seconds=run.decode_seconds,
        compile_seconds=run.compile_seconds,
    )


def encode_prompt(model: Model, prompt: str | Sequence[int], chat: bool, room: int) -> list[int]:
    """Token ids of a prompt that leaves room for at least one new token.

    Args:
      model: the base.
      prompt: text, or ids.
      chat: wrap text in the chat template, where the tokenizer has one.
      room: longest prompt that still fits, in tokens.

    Raises:
      UserError: an empty prompt, an id outside the vocabulary, or one that does not fit.
    """
    if isinstance(prompt, str) and not prompt.strip():
        raise UserError("the prompt is empty")
    ids = model.encode(prompt, chat) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise UserError("the prompt is empty")
    if not all(0 <= i < model.config.vocab_size for i in ids):
        raise UserError(f"the prompt holds a token id outside the vocabulary of {model.config.vocab_size}")
    if len(ids) > room:
        raise UserError(
            f"the prompt has {len(ids)} tokens and only {max(room, 0)} fit; shorten it, lower max-new-tokens or raise "
            f"max-length"
        )
    return ids


def _check(model: Model, max_new_tokens: int, max_length: int | None) -> int:
    """Longest prompt that fits. Raises UserError for limits that make no sense."""
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be at least 1, got {max_new_tokens}")
    longest = model.config.max_positions if max_length is None else max_length
    if not 2 <= longest <= model.config.max_positions:
        raise UserError(f"max-length must be between 2 and the base's {model.config.max_positions}, got {longest}")
    return longest - max_new_tokens


def generate(
    model: Model,
    method: Drafter,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = 128,
    *,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    acceptance: Acceptance = Match(),
    batch_size: int = 1,
    chat: bool = True,
    max_length: int | None = None,
) -> list[Generation]:
    """Answer prompts.

    Args:
      model: from `load_model`.
      method: from `load_method`.
      prompts: texts or token ids.
      max_new_tokens: stop there, or at an end-of-text token.
      sampling: greedy by default.
      seed: with sampling, decides the text; the same for every prompt.
      acceptance: `Match` is lossless, `Typical` is not.
      batch_size: prompts decoded together; each accepts at its own pace.
      chat: wrap texts in the tokenizer's chat template, where it has one.
      max_length: longest prompt and answer together, in tokens; default the base's context.

    Returns:
      One `Generation` per prompt, in order.

    Raises:
      UserError: a prompt or a setting that makes no sense.
    """
    room = _check(model, max_new_tokens, max_length)
    if batch_size < 1:
        raise UserError(f"batch-size must be at least 1, got {batch_size}")
    encoded = [encode_prompt(model, prompt, chat, room) for prompt in prompts]
    results = []
    for first in range(0, len(encoded), batch_size):
        batch = encoded[first : first + batch_size]
        padding = min(batch_size, len(encoded)) - len(batch)  # a last short batch keeps the compiled shape
        limits = [max_new_tokens] * len(batch) + [0] * padding
        rows = [*batch, *[[0]] * padding]
        for run in _advance(model, method, rows, limits, sampling, seed, acceptance, _UNBOUNDED):
            pass
        for row in range(len(batch)):
            results.append(_collect(model, run, row, _as_text(model, prompts[first + row])))
    return results


def stream(
    model: Model,
    method: Drafter,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    *,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    acceptance: Acceptance = Match(),
    chat: bool = True,
    max_length: int | None = None,
    steps_per_chunk: int = 4,
) -> Iterator[Generation]:
    """Answer one prompt piece by piece: the arguments of `generate`, the answer so far after every few steps.

    Args:
      model: from `load_model`.
      method: from `load_method`.
      prompt: text or token ids.
      max_new_tokens: stop there, or at an end-of-text token.
      sampling: greedy by default.
      seed: with sampling, decides the text.
      acceptance: `Match` is lossless, `Typical` is not.
      chat: wrap text in the tokenizer's chat template, where it has one.
      max_length: longest prompt and answer together, in tokens.
      steps_per_chunk: forward passes between two yields.

    Yields:
      The `Generation` as it stands; the last one is complete.

    Raises:
      UserError: a prompt or a setting that makes no sense.
    """
    ids = encode_prompt(model, prompt, chat, _check(model, max_new_tokens, max_length))
    for run in _advance(model, method, [ids], [max_new_tokens], sampling, seed, acceptance, steps_per_chunk):
        yield _collect(model, run, 0, _as_text(model, prompt))


def _as_text(model: Model, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.decode(list(prompt)) if model.tokenizer else str(list(prompt))
