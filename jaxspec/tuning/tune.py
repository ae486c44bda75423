"""Tune a drafter for a machine: measure steps, record what it offers, replay ways to draft, and race the best few."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.config import SamplingConfig
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters.budget import Budget, smallest_draft
from jaxspec.drafters.choices import TunedChoice
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.drafters.source import temperature_key
from jaxspec.errors import UserError, check_at_least
from jaxspec.generation.generate import generate_many
from jaxspec.generation.prompts import encode_prompts
from jaxspec.machine import this_machine
from jaxspec.progress import Progress
from jaxspec.tuning.candidates import Option, Predictor, best_of_kinds, fastest_first
from jaxspec.tuning.latency import RowLatency, fills_trees, in_words, measure_costs, with_sources
from jaxspec.tuning.layouts import tune_layouts
from jaxspec.tuning.race import Trial, race
from jaxspec.tuning.record import Ranks, Recording, Text, fit_calibration, ranks_of, record
from jaxspec.weights.model import Model

_RECORDED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """Settings of tuning.

    Attributes:
      batch_size: prompts decoded together.
      cache_length: S, slots of the cache while step times are measured.
      temperature: of sampling; 0 is greedy.
      max_new_tokens: tokens per answer.
      num_prompts: prompts of the final trial.
      accuracy_prompts: further prompts, whose answers are recorded and replayed.
      max_rows: largest step to consider.
      finalists: trees to try by decoding, the best predicted ones, each of another kind.
      also: further trees to try, as `--tree` takes them.
      draft_vocabularies: sizes of the draft vocabulary to try every tree with, 0 is all tokens; default the adapter's.
    """

    batch_size: int = 1
    cache_length: int = 512
    temperature: float = 0.0
    max_new_tokens: int = 64
    num_prompts: int = 12
    accuracy_prompts: int = 16
    max_rows: int = 64
    finalists: int = 4
    also: tuple[str, ...] = ()
    draft_vocabularies: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of tuning.

    Attributes:
      choice: the fastest way.
      latency: of the machine.
      options: all that was replayed, the best predicted first, and the others that were tried.
      trials: the results of decoding, autoregressive first.
    """

    choice: TunedChoice
    latency: RowLatency
    options: list[Option]
    trials: list[Trial]


def tune(drafter: Drafter, prompts: Sequence[str], config: TuneConfig) -> Tuning:
    """Choose the fastest way to decode: of one method a tree, of a union also the sources.

    Layouts of kernels and seconds of steps are measured. What the sources offer along some answers is recorded. Fixed
    trees and budgets of every size are replayed on that, and the best of every kind are raced.

    Args:
      drafter: what drafts, whatever its tree.
      prompts: texts that no adapter was trained on and that are no benchmark; the first ones are answered and replayed,
        those after them are raced on.
      config: what to tune for.

    Raises:
      UserError: settings or prompts that cannot be measured.
    """
    variants = _check(drafter, prompts, config)
    tune_layouts(drafter.model)
    sampling, batch_size, recorded = SamplingConfig(config.temperature), config.batch_size, config.accuracy_prompts
    texts = answers_to_record(drafter.model, prompts, config, sampling)
    costs = measure_costs(variants, batch_size, config.cache_length, config.max_rows, sampling)
    options, also = [], []
    for variant in variants:
        recordings = _record(variant, texts, sampling)
        variant = _calibrated(variant, recordings, sampling)
        ranks = _ranks(variant, texts, sampling, recordings, config.max_rows)
        predictor = Predictor(variant, recordings, ranks, costs, batch_size, config.temperature)
        options += predictor.options(config.max_rows)
        also += [predictor.expect(range(len(variant.sources)), tree) for tree in config.also]
    options = fastest_first(options)
    finalists = {option.name: option for option in [*best_of_kinds(options)[: config.finalists], *also]}
    drafters = {name: option.drafter for name, option in finalists.items()}
    raced = prompts[recorded : recorded + _race_size(config)]
    raced = raced[: len(raced) // batch_size * batch_size]  # another batch would be another program
    trials = race(drafter.model, drafters, raced, config.max_new_tokens, sampling, batch_size)
    info = {
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "expected_tokens": {name: round(option.tokens, 4) for name, option in finalists.items()},
        "predicted_tokens_per_second": {name: round(option.predicted, 2) for name, option in finalists.items()},
        "rows_of": {name: option.rows for name, option in finalists.items()},
        "rows": list(costs.latency.rows),
        "milliseconds": [round(1e3 * seconds, 3) for seconds in costs.latency.seconds],
        "drafting_milliseconds": {
            in_words(*key): {depth: round(1e3 * seconds, 3) for depth, seconds in added.items()}
            for key, added in costs.drafting.items()
        },
    }
    return Tuning(_choice(drafter, config, drafters, trials, info), costs.latency, [*options, *also], trials)


def _check(drafter: Drafter, prompts: Sequence[str], config: TuneConfig) -> list[Drafter]:
    """The drafter with each draft vocabulary. Raises UserError for settings that make no sense, before measuring."""
    model, name = drafter.model, drafter.name
    least = {"batch_size": 1, "num_prompts": 1, "max_new_tokens": 2, "finalists": 1, "accuracy_prompts": 1}
    check_at_least(config, least | {"cache_length": 64, "max_rows": smallest_draft(drafter.sources)})
    check_cache_length(config.cache_length, model)
    needed = config.accuracy_prompts + config.batch_size
    if len(prompts) < needed:
        raise UserError(f"these settings need at least {needed} prompts, there are {len(prompts)}")
    used = prompts[: config.accuracy_prompts + _race_size(config)]
    encode_prompts(model, used, 2 * config.max_new_tokens, True, None)
    budget = f"best:{max(_RECORDED_ROWS, smallest_draft(drafter.sources))}"
    variants = [drafter.with_tree(budget, count) for count in config.draft_vocabularies or (None,)]
    for variant in variants:
        if len({source.draft_vocabulary for source in variant.sources if source.trained}) > 1:
            raise UserError(f"{name}: adapters with different draft vocabularies; give --draft-vocabularies")
    for variant, tree in itertools.product(variants, config.also):
        shape = with_sources(variant, variant.sources, tree).shape
        if not isinstance(shape, Budget) and not fills_trees(variant.source):
            raise UserError(f"{name}: it is tuned with trees of best:ROWS alone, got {tree!r}")
    return variants


def check_cache_length(length: int, model: Model) -> None:
    """Raise UserError for more slots than the base's context."""
    if length > model.config.max_positions:
        raise UserError(f"cache-length is at most the base's {model.config.max_positions}, got {length}")


def _race_size(config: TuneConfig) -> int:
    """Prompts to race on, a multiple of the batch size."""
    return max(config.num_prompts // config.batch_size, 1) * config.batch_size


def _record(drafter: Drafter, texts: Sequence[Text], sampling: SamplingConfig, **how: bool) -> list[Recording]:
    with Progress("recording", len(texts), "answers") as progress:
        return record(drafter, texts, sampling, progress=progress.update, **how)


def _calibrated(drafter: Drafter, recordings: Sequence[Recording], sampling: SamplingConfig) -> Drafter:
    """The drafter with every source calibrated to what was recorded of it, as far as that tells."""
    key, sources = temperature_key(sampling.temperature), []
    for number, source in enumerate(drafter.sources):
        [known] = source.calibrations().at(make_sampler(sampling)).tolist()
        table = fit_calibration(recordings, number, known)
        sources.append(dataclasses.replace(source, calibration={key: table}))
    return dataclasses.replace(drafter, sources=tuple(sources))


def _ranks(
    drafter: Drafter, texts: Sequence[Text], sampling: SamplingConfig, recordings: Sequence[Recording], max_rows: int
) -> dict[int, Ranks]:
    """The ranks that a replay of fixed trees needs, of the sources that fill them, by their numbers.

    A source that drafts along paths is recorded along the largest tree: what it offers there holds of every part of it.
    """
    found = {}
    for number, source in enumerate(drafter.sources):
        if not fills_trees(source):
            continue
        if recordings[0].offers[number].parent is None:
            found[number] = ranks_of(recordings, number)
        else:
            largest = with_sources(drafter, [source], f"sparse:{max_rows}")
            found[number] = ranks_of(_record(largest, texts, sampling, as_drafted=True), 0)
    return found


def answers_to_record(
    model: Model, prompts: Sequence[str], config: TuneConfig, sampling: SamplingConfig = SamplingConfig()
) -> list[Text]:
    """The base's own answers to the first prompts, those of two tokens or more. Raises UserError for none."""
    answers = own_answers(model, prompts[: config.accuracy_prompts], sampling, 2 * config.max_new_tokens)
    texts = [text for text in answers if len(text[1]) > 1]
    if not texts:
        raise UserError("the answers to these prompts are too short to measure anything on; give more or others")
    return texts


def _choice(
    drafter: Drafter,
    config: TuneConfig,
    drafters: dict[str, Drafter],
    trials: Sequence[Trial],
    figures: dict[str, Any],
) -> TunedChoice:
    """The fastest of the trials, autoregressive decoding among them, and the figures behind it."""
    best = max(trials, key=lambda trial: trial.speedup).name
    sources, shape = (drafters[best].sources, drafters[best].shape) if best in drafters else ((), None)
    key = temperature_key(config.temperature)
    return TunedChoice(
        machine=this_machine(),
        dtype=drafter.model.precision,
        adapter=drafter.digest,
        batch_size=config.batch_size,
        cache_length=config.cache_length,
        temperature=config.temperature,
        tree=shape.spec if isinstance(shape, Budget) else shape,
        name=best,
        info=figures,
        draft_vocabulary=max((source.draft_vocabulary for source in sources), default=0),
        sources=[source.method.name for source in sources],
        calibration={s.method.name: s.calibration[key] for s in sources if key in s.calibration},
    )


def own_answers(model: Model, prompts: Sequence[str], sampling: SamplingConfig, tokens: int) -> list[Text]:
    """The base's own answers to prompts, in order: token ids of both. Raises UserError for prompts that do not fit."""
    ids = encode_prompts(model, prompts, tokens, True, None)
    answers: dict[int, list[int]] = {}
    made = generate_many(autoregressive(model), ids, tokens, batch_size=min(16, len(ids)), sampling=sampling)
    with Progress("answers", len(ids), "answers") as progress:
        for index, answer in made:
            answers[index] = answer
            progress.update(len(answers))
    return [(prompt, answers[i]) for i, prompt in enumerate(ids)]
