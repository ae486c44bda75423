"""A benchmark that is ready to begin: drafters loaded, questions chosen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jaxspec.bench.config import BenchConfig, check_bench
from jaxspec.bench.questions import Question, read_questions, stratified
from jaxspec.bench.ways import Way, load_ways
from jaxspec.errors import UserError
from jaxspec.weights.load import Model

_TEMPLATE = 32  # tokens that a chat template may put around a turn


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Questions, and the ways to decode that answer them.

    Attributes:
      config: the user's settings.
      model: the base.
      ways: the ways to decode by name, autoregressive decoding first.
      questions: the questions to ask.
      left_out: questions that do not fit the base's context.
    """

    config: BenchConfig
    model: Model
    ways: dict[str, Way]
    questions: Sequence[Question]
    left_out: Sequence[Question]


def prepare(config: BenchConfig, model: Model) -> Benchmark:
    """Load what is asked for. Raises UserError for settings that make no sense or do not fit the base."""
    check_bench(config)
    return Benchmark(config, model, load_ways(config, model), *select_questions(config, model))


def select_questions(config: BenchConfig, model: Model) -> tuple[list[Question], list[Question]]:
    """The questions to ask, and those of the files that do not fit the base's context.

    Raises:
      UserError: an unreadable file, or no question that fits.
    """
    fit, long = [], []
    files = (read_questions(file, config.wording, config.shots) for file in config.data.split(","))
    for question in itertools.chain.from_iterable(files):
        spoken = [text for turn in question.turns for text in (turn, "")][:-1]
        room = (config.max_new_tokens + _TEMPLATE) * len(question.turns)
        fits = len(model.encode(spoken, config.chat)) + room <= model.config.max_positions
        (fit if fits else long).append(question)
    if not fit:
        raise UserError(f"no question fits the {model.config.max_positions} positions of {model.name!r}")
    return stratified(fit, config.limit), long
