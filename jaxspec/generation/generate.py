"""Prompts in, texts out: batching, buckets, timing, streaming. The public face of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import PREDICTED
from jaxspec.decoding.loop import insert
from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError
from jaxspec.generation.job import Job, RunningBatch, Settings, bucket
from jaxspec.generation.prompts import as_text, encode_predictions, encode_prompts
from jaxspec.parallel.processes import host
from jaxspec.parallel.sharding import in_mesh, parts_of_batch

_UNBOUNDED = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class SourceStats:
    """Counters of one source in an answer; each list is per depth from 1.

    Attributes:
      offered: steps that had a candidate of the source there below the accepted path.
      accepted: steps that accepted one.
      expected: steps that should have, by the chances that the draft was chosen by; 0 in fixed trees.
    """

    offered: list[int]
    accepted: list[int]
    expected: list[float]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer.

    Attributes:
      prompt: as given, or the decoded ids where ids were given.
      text: the answer, special tokens left out; empty for a model without a tokenizer.
      tokens: ids of the answer, an end-of-text token included.
      drafted_by: per token, the sources that offered it, a bit each in the order of `sources`; 0 where none did.
      steps: forward passes after prefill.
      offered: per depth from 1, steps that had a candidate there below the accepted path.
      accepted: per depth from 1, steps that accepted one.
      prefill_seconds: wall time of prefill; of the whole batch where prompts were batched.
      decode_seconds: wall time of all steps, compilation excluded; likewise.
      compile_seconds: time spent compiling for this batch's shapes; 0 when they were known.
      sources: what each source did, by the name of its method.
      draft_passes: passes of a draft model, or of the part of the base that drafts, after prefill, for drafts that were
        verified; 0 without one.
      accepted_prediction: tokens of the answer that were drafted from the predicted text.
      rejected_prediction: candidates from the predicted text that were verified and refused.
      candidates: tokens that were drafted and verified in all steps, wherever they stood in the drafts.
    """

    prompt: str
    text: str
    tokens: list[int]
    drafted_by: list[int]
    steps: int
    offered: list[int]
    accepted: list[int]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    sources: dict[str, SourceStats] = dataclasses.field(default_factory=dict)
    draft_passes: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0
    candidates: int = 0

    @property
    def drafted(self) -> list[bool]:
        """Per token, whether it was drafted and accepted."""
        return [sources > 0 for sources in self.drafted_by]

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


def _collect(drafter: Drafter, run: RunningBatch, row: int, prompt: str) -> Generation:
    """The answer of one batch row as it stands."""
    model, state, count = drafter.model, run.state, int(host(run.state.counts)[row])
    tokens, drafted_by = (host(x)[row, :count].tolist() for x in (state.tokens, state.drafted_by))
    stats = jax.tree.map(lambda x: host(x)[row].tolist(), state.stats)
    names = [source.method.name for source in drafter.sources if source.facts.distances]
    predicted = sum(sources >= PREDICTED for sources in drafted_by)
    each = map(SourceStats, stats.offered[1:], stats.accepted[1:], stats.expected[1:])
    return Generation(
        prompt=prompt,
        text=model.decode(tokens) if model.tokenizer else "",
        tokens=tokens,
        drafted_by=[sources % PREDICTED for sources in drafted_by],
        steps=stats.steps,
        offered=stats.offered[0],
        accepted=stats.accepted[0],
        prefill_seconds=run.prefill_seconds,
        decode_seconds=run.decode_seconds,
        compile_seconds=run.compile_seconds,
        sources=dict(zip(names, each, strict=True)),
        draft_passes=stats.draft_passes,
        accepted_prediction=predicted,
        rejected_prediction=max((stats.predicted or 0) - predicted, 0),
        candidates=stats.drafted,
    )


def iterate(
    drafter: Drafter,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = 128,
    *,
    batch_size: int = 1,
    max_steps: int = _UNBOUNDED,
    **settings: Any,
) -> Iterator[Generation]:
    """Answer prompts, batch by batch as the answers are asked for.

    Args:
      drafter: from `load_drafter`.
      prompts: texts or token ids.
      max_new_tokens: stop there, or at an end-of-text token.
      batch_size: prompts decoded together; each accepts at its own pace.
      max_steps: forward passes after prefill, beside those that measure what sizes cost; a few are enough to warm up.
      **settings: of `Settings`: `sampling`, `seed`, `acceptance`, `chat`, `max_length`, `prediction`.

    Yields:
      One `Generation` per prompt, in order.

    Raises:
      UserError: a prompt or a setting that makes no sense.
    """
    if batch_size < 1:
        raise UserError(f"batch-size must be at least 1, got {batch_size}")
    how = Settings(**settings)
    encoded = encode_prompts(drafter.model, prompts, max_new_tokens, how.chat, how.max_length)
    predictions = encode_predictions(drafter, how.prediction, len(encoded))
    rows = min(batch_size, len(encoded))  # also of a last short batch: it keeps the compiled shape
    job = Job(drafter, how, rows)
    for first in range(0, len(encoded), batch_size):
        batch = encoded[first : first + batch_size]
        expected = predictions and predictions[first : first + batch_size]
        run = job.begin(batch, max_new_tokens, rows, *job.sizes(max(map(len, batch)), max_new_tokens), expected)
        for _ in job.price_sizes(run):
            pass
        job.decode(run, max_steps)
        for row in range(len(batch)):
            yield _collect(drafter, run, row, as_text(drafter.model, prompts[first + row]))


def generate(
    drafter: Drafter, prompts: Sequence[str | Sequence[int]], max_new_tokens: int = 128, **settings: Any
) -> list[Generation]:
    """The answers to prompts as a list: `iterate`, with the same arguments."""
    return list(iterate(drafter, prompts, max_new_tokens, **settings))


def stream(
    drafter: Drafter,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    *,
    steps_per_chunk: int = 4,
    **settings: Any,
) -> Iterator[Generation]:
    """Answer one prompt piece by piece: the answer so far after every few steps.

    Args:
      drafter: from `load_drafter`.
      prompt: text or token ids.
      max_new_tokens: stop there, or at an end-of-text token.
      steps_per_chunk: forward passes between two yields; those that measure what sizes cost have chunks of their own.
      **settings: as in `iterate`.

    Yields:
      The `Generation` so far; the last one holds the complete answer.

    Raises:
      UserError: a prompt or a setting that makes no sense.
    """
    how = Settings(**settings)
    [ids] = encode_prompts(drafter.model, [prompt], max_new_tokens, how.chat, how.max_length)
    predictions = encode_predictions(drafter, how.prediction, 1)
    job, text = Job(drafter, how, 1), as_text(drafter.model, prompt)
    run = job.begin([ids], max_new_tokens, 1, *job.sizes(len(ids), max_new_tokens), predictions)
    yield _collect(drafter, run, 0, text)
    for _ in job.price_sizes(run):
        yield _collect(drafter, run, 0, text)
    while not np.all(host(run.state.done)):
        job.decode(run, steps_per_chunk)
        yield _collect(drafter, run, 0, text)


def generate_many(
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    batch_size: int = 32,
    refill: int = 8,
    steps_per_chunk: int = 16,
) -> Iterator[tuple[int, list[int]]]:
    """Answers to many prompts, for throughput: rows that finish make room for the next prompts.

    Args:
      drafter: from `load_drafter`.
      prompts: token ids.
      max_new_tokens: stop there, or at an end-of-text token.
      sampling: greedy by default.
      seed: of sampling.
      batch_size: rows decoded together.
      refill: prompts prefilled together, once as many rows are free.
      steps_per_chunk: forward passes between two looks at what has finished.

    Yields:
      Index of a prompt and the ids of its answer, in the order they finish.
    """
    job = Job(drafter, Settings(sampling, seed), batch_size)  # however few are left: resumed ones round alike
    parts = parts_of_batch(job.mesh)  # of a number that they do not divide every one would hold all rows
    batch_size = bucket(min(batch_size, len(prompts)), parts, parts)
    refill = min(refill, batch_size)
    together = bucket(refill, parts, parts)
    sizes = job.sizes(max(map(len, prompts)), max_new_tokens)
    run = job.begin([], max_new_tokens, batch_size, *sizes)  # all rows free
    owner: list[int | None] = [None] * batch_size
    waiting = list(range(len(prompts)))[::-1]
    while waiting or any(prompt is not None for prompt in owner):
        free = [row for row, prompt in enumerate(owner) if prompt is None]
        while waiting and len(free) >= min(refill, len(waiting)):
            taken = [waiting.pop() for _ in range(min(together, len(free), len(waiting)))]
            rows, free = free[: len(taken)], free[len(taken) :]
            fresh = job.begin([prompts[i] for i in taken], max_new_tokens, together, *sizes)
            places = np.array(rows + [batch_size] * (together - len(taken)), np.int32)
            with in_mesh(job.mesh):
                run.state = insert(run.state, fresh.state, places)
            for row, prompt in zip(rows, taken, strict=True):
                owner[row] = prompt
        job.decode(run, steps_per_chunk)
        done, counts, tokens = map(host, (run.state.done, run.state.counts, run.state.tokens))
        for row, prompt in enumerate(owner):
            if prompt is not None and done[row]:
                owner[row] = None
                yield prompt, tokens[row, : counts[row]].tolist()
