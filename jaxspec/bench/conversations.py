"""Asking questions turn by turn, several together, and comparing the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxspec.bench.config import BenchConfig
from jaxspec.bench.questions import Question, group_of
from jaxspec.bench.ways import Way
from jaxspec.generation.divergence import Divergence, first_divergence
from jaxspec.generation.generate import Generation


def batches(questions: Sequence[Question], config: BenchConfig) -> Iterator[list[Question]]:
    """Batches of questions that can be answered together: at most `batch_size` of one group, one temperature and
    the same number of turns.
    """
    groups: dict[tuple, list[Question]] = {}
    for question in questions:
        kind = (group_of(question.category), len(question.turns), config.temperature_of(question))
        group = groups.setdefault(kind, [])
        group.append(question)
        if len(group) == config.batch_size:
            yield groups.pop(kind)
    yield from groups.values()


def converse(way: Way, questions: Sequence[Question], config: BenchConfig, seed: int) -> list[Generation]:
    """Answer questions with the same number of turns and one temperature together.

    Returns:
      The answers to all first turns, then those to all second ones, and so on.
    """
    sampling = config.sampling(config.temperature_of(questions[0]))
    talks: list[list[str]] = [[] for _ in questions]
    answers: list[Generation] = []
    for turns in zip(*(question.turns for question in questions), strict=True):
        for talk, turn in zip(talks, turns, strict=True):
            talk.append(turn)
        said = way.answer([way.model.encode(talk, config.chat) for talk in talks], sampling, seed)
        for talk, answer in zip(talks, said, strict=True):
            talk.append(answer.text)
        answers += said
    return answers


def divergences(
    way: Way,
    question: Question,
    ours: Sequence[Generation],
    plain: Sequence[Generation],
    config: BenchConfig,
    seed: int,
) -> list[Divergence | None]:
    """The first divergence of each turn from autoregressive decoding, up to the first turn that has one.

    After that turn the conversations differ, so later turns cannot be compared and have no entry.

    Args:
      way: the way that gave the answers.
      question: the question.
      ours: its answers, turn by turn.
      plain: those of autoregressive decoding on the same base.
      config: the benchmark's settings.
      seed: sampling seed of both.
    """
    talk: list[str] = []
    found: list[Divergence | None] = []
    sampling = config.sampling(config.temperature_of(question))
    for text, answer, reference in zip(question.turns, ours, plain, strict=True):
        talk.append(text)
        prompt = way.model.encode(talk, config.chat)
        found.append(first_divergence(way.model, prompt, answer.tokens, reference.tokens, sampling, seed))
        if found[-1]:
            break
        talk.append(reference.text)
    return found
