"""Decode the same prompts in several ways, in turn, so that a slow moment of the machine hurts all alike."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import Generation, generate
from jaxspec.progress import Progress
from jaxspec.weights.model import Model


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of decoding with a tree.

    Attributes:
      name: the tree in words; `autoregressive` for none.
      tokens_per_step: over all prompts.
      tokens_per_second: the median over prompts.
      speedup: the median over prompts of the ratio to autoregressive decoding of the same prompt.
      identical: prompts whose tokens are those of autoregressive decoding.
      seconds: of decoding, per prompt and token of an answer of two tokens or more.
    """

    name: str
    tokens_per_step: float
    tokens_per_second: float
    speedup: float
    identical: int
    seconds: list[float]


def race(
    model: Model,
    drafters: dict[str, Drafter],
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: SamplingConfig,
    batch_size: int = 1,
) -> list[Trial]:
    """Decode the same prompts with every drafter and autoregressively, in turn, batch by batch.

    Args:
      model: the base of all of them.
      drafters: by name.
      prompts: texts, a multiple of `batch_size` of them.
      max_new_tokens: per answer, at least 2.
      sampling: how tokens are drawn.
      batch_size: prompts decoded together.

    Returns:
      A trial per drafter, autoregressive decoding first.

    Raises:
      UserError: no prompt has an answer of two tokens.
    """
    everyone = {"autoregressive": autoregressive(model)} | drafters
    settings = {"sampling": sampling, "batch_size": batch_size}
    results: dict[str, list[Generation]] = {name: [] for name in everyone}
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    done = 0
    with Progress("racing", len(batches) * len(everyone), "runs") as progress:
        for number, batch in enumerate(batches):
            runs = {
                name: functools.partial(generate, drafter, batch, max_new_tokens, **settings)
                for name, drafter in everyone.items()
            }
            for name, answers in in_turn(runs, number, progress):
                results[name] += answers
                done += 1
                progress.update(done)
    plain = results["autoregressive"]
    if not any(answer.steps for answer in plain):
        raise UserError("no prompt has an answer of more than one token: there is no speed to measure")
    return [_trial(name, answers, plain) for name, answers in results.items()]


def in_turn(
    runs: Mapping[str, Callable[[], list[Generation]]], number: int, progress: Progress | None = None
) -> Iterator[tuple[str, list[Generation]]]:
    """Do the same work in several ways; again where something had to be compiled, which no timing may include.

    Args:
      runs: does the work, by the name of the way.
      number: of the work; decides the order, so that over many of them nobody always follows the same one. An odd one
        reverses the order of the one before it: nobody comes later more often.
      progress: of all of them, whose rate leaves out what is done again.

    Yields:
      Names, and what the run returned.
    """
    names = list(runs)
    order = np.random.default_rng(number // 2).permutation(len(names))
    for place in order[::-1] if number % 2 else order:
        run = runs[names[place]]
        began = time.monotonic()
        answers = run()
        if any(answer.compile_seconds for answer in answers):  # the first run touches fresh memory, too
            if progress is not None:
                progress.skip(time.monotonic() - began)
            answers = run()
        yield names[place], answers


def _trial(name: str, answers: list[Generation], plain: list[Generation]) -> Trial:
    counted = [(a, p) for a, p in zip(answers, plain, strict=True) if a.steps and p.steps]
    return Trial(
        name=name,
        tokens_per_step=sum(a.new_tokens - 1 for a, _ in counted) / max(sum(a.steps for a, _ in counted), 1),
        tokens_per_second=float(np.median([a.tokens_per_second for a, _ in counted])),
        speedup=float(np.median([a.tokens_per_second / p.tokens_per_second for a, p in counted])),
        identical=sum(a.tokens == p.tokens for a, p in zip(answers, plain, strict=True)),
        seconds=[1 / a.tokens_per_second for a, _ in counted],
    )
