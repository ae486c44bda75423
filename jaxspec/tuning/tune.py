"""Measure a machine, pick the tree that should be fastest on it, and make sure by decoding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.drafters.budget import Budget, smallest_draft
from jaxspec.drafters.choices import TunedChoice
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.drafters.source import learning
from jaxspec.errors import UserError, check_at_least
from jaxspec.generation.generate import generate_many
from jaxspec.generation.prompts import encode_prompts
from jaxspec.machine import this_machine
from jaxspec.progress import Progress
from jaxspec.training.data import AnsweredPrompt
from jaxspec.training.evaluate import Accuracy, evaluate
from jaxspec.trees import chain, expected
from jaxspec.trees.plan import check_accuracy
from jaxspec.tuning.hardware import Option, RowLatency, make_option, rank_options
from jaxspec.tuning.latency import measure_latency
from jaxspec.tuning.layouts import tune_layouts
from jaxspec.tuning.race import Trial, race
from jaxspec.tuning.record import Text, record
from jaxspec.tuning.unions import Candidate, Predictor, calibrate, in_words, measure_costs
from jaxspec.weights.load import Model

_ANSWERED_PROMPTS = 16  # to measure or replay, where the adapter's own accuracies do not do
_RECORDED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """What to tune for, and how hard to look.

    Attributes:
      batch_size: prompts decoded together.
      cache_length: S, slots of the cache while step times are measured.
      temperature: of sampling; 0 is greedy.
      max_new_tokens: tokens per answer.
      num_prompts: prompts of the final trial.
      accuracy_prompts: further prompts to measure accuracies on, of a union to replay; 0 takes 16, and for one method
        decoding greedily the adapter's own accuracies.
      max_rows: largest step to consider.
      finalists: trees to try by decoding, the best predicted ones.
      also: further trees to try, as `parse_tree` takes them.
      draft_vocabularies: sizes of the draft vocabulary to try every tree with, 0 is all tokens; default the adapter's.
    """

    batch_size: int = 1
    cache_length: int = 512
    temperature: float = 0.0
    max_new_tokens: int = 64
    num_prompts: int = 12
    accuracy_prompts: int = 0
    max_rows: int = 64
    finalists: int = 4
    also: tuple[str, ...] = ()
    draft_vocabularies: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What tuning found.

    Attributes:
      choice: the fastest way.
      latency: of the machine.
      options: the best tree of every size, the best predicted first, and the others that were tried.
      trials: the results of decoding, autoregressive first.
    """

    choice: TunedChoice
    latency: RowLatency
    options: list[Option]
    trials: list[Trial]


def _check_tuning(config: TuneConfig, drafter: Drafter, prompts: Sequence[str]) -> None:
    """Raise UserError for settings that cannot be measured, before anything is."""
    _check(drafter, prompts, config, 2 * (1 + drafter.source.facts.probe_rows))
    for count in _vocabularies(config, drafter):
        for tree in (chain(1), *config.also):
            _ = drafter.with_tree(tree, count).plan  # refuses what is no fixed tree


def _check(drafter: Drafter, prompts: Sequence[str], config: TuneConfig, max_rows: int, replayed: bool = False) -> None:
    """Raise UserError for settings that make no sense whatever is tuned; `max_rows` is the least number of them."""
    model = drafter.model
    least = {"batch_size": 1, "num_prompts": 1, "max_new_tokens": 2, "finalists": 1, "accuracy_prompts": 0}
    check_at_least(config, least | {"cache_length": 64, "max_rows": max_rows})
    if config.cache_length > model.config.max_positions:
        raise UserError(f"cache-length is at most the base's {model.config.max_positions}, got {config.cache_length}")
    measured, tried = _counts(config, replayed)
    needed = measured + config.batch_size
    if len(prompts) < needed:
        raise UserError(f"these settings need at least {needed} prompts, there are {len(prompts)}")
    encode_prompts(model, prompts[: measured + tried], 2 * config.max_new_tokens, True, None)


def _vocabularies(config: TuneConfig, drafter: Drafter) -> tuple[int, ...]:
    return config.draft_vocabularies or (drafter.source.adapter.info.get("draft_vocabulary", 0),)


def _counts(config: TuneConfig, replayed: bool = False) -> tuple[int, int]:
    """Prompts whose answers are measured or replayed, and prompts to try trees on."""
    measured = config.accuracy_prompts or (_ANSWERED_PROMPTS if config.temperature or replayed else 0)
    return measured, max(config.num_prompts // config.batch_size, 1) * config.batch_size


def tune(drafter: Drafter, prompts: Sequence[str], config: TuneConfig) -> Tuning:
    """Measure layouts of kernels and step times, search trees for the most tokens per second, and try the best few.

    Args:
      drafter: what drafts, whatever its tree.
      prompts: texts that the adapter was not trained on and that are no benchmark; the first ones measure
        accuracies where that is needed, those after them try the trees.
      config: what to tune for.

    Raises:
      UserError: settings or prompts that cannot be measured.
    """
    _check_tuning(config, drafter, prompts)
    tune_layouts(drafter.model)
    source, vocabularies, sampling = drafter.source, _vocabularies(config, drafter), SamplingConfig(config.temperature)
    measured, tried = _counts(config)
    if measured:
        accuracy = measure_accuracy(drafter, prompts[:measured], sampling, 2 * config.max_new_tokens).by_rank
    else:
        accuracy = check_accuracy(source.accuracy)
    latency = measure_latency(drafter, vocabularies[0], config.batch_size, config.cache_length, config.max_rows)
    probes = (source.facts.probes, source.facts.probe_rows)
    ranked = rank_options(accuracy, latency, config.max_rows, *probes)
    also = [
        make_option(spec, expected(drafter.with_tree(spec).plan, accuracy), latency, *probes) for spec in config.also
    ]
    finalists, drafters = [], {}
    for option, count in itertools.product([*ranked[: config.finalists], *also], vocabularies):
        name = in_words(option.name, count)
        finalists.append(dataclasses.replace(option, name=name))
        drafters[name] = drafter.with_tree(option.shape, count)
    figures = {
        "drafting_milliseconds": [round(1e3 * seconds, 3) for seconds in latency.drafting],
        "accuracy": np.round(accuracy, 5).tolist(),
    }
    tried_on, options = prompts[measured : measured + tried], [*ranked, *also, *finalists]
    return _raced(drafter, tried_on, config, latency, options, drafters, figures)


def tune_union(drafter: Drafter, prompts: Sequence[str], config: TuneConfig) -> Tuning:
    """Measure layouts of kernels, choose sources, rows and calibration by replaying answers, and try the best few.

    Args:
      drafter: the union to take sources of.
      prompts: texts that no adapter was trained on and that are no benchmark; the first ones are answered and replayed,
        those after them try the best candidates.
      config: what to tune for.

    Raises:
      UserError: settings or prompts that cannot be measured.
    """
    _check_union(config, drafter, prompts)
    tune_layouts(drafter.model)
    model, sampling, batch_size = drafter.model, SamplingConfig(config.temperature), config.batch_size
    measured, tried = _counts(config, replayed=True)
    texts = _long_enough(own_answers(model, prompts[:measured], sampling, 2 * config.max_new_tokens))
    wholes, predictors = _with_vocabularies(drafter, config), []
    costs = measure_costs(wholes, batch_size, config.cache_length, config.max_rows, sampling)
    for whole in wholes:
        with Progress("recording", len(texts), "answers") as progress:
            recordings = record(whole, texts, sampling, progress=progress.update)
        whole = calibrate(whole, recordings, sampling.temperature > 0)
        predictors.append(Predictor(whole, recordings, costs, batch_size, sampling.temperature > 0))
    ranked = _best_first(candidate for predict in predictors for candidate in predict.rank(config.max_rows))
    everyone = range(len(drafter.sources))
    also = [predict.expect(everyone, tree) for predict in predictors for tree in config.also]
    drafters = {option.name: made for option, made in [*ranked[: config.finalists], *also]}
    tried_on, options = prompts[measured : measured + tried], {option.name: option for option, _ in [*ranked, *also]}
    drafting = {in_words(*key): round(1e3 * value, 3) for key, value in costs.drafting.items()}
    figures = {"drafting_milliseconds": drafting}
    return _raced(drafter, tried_on, config, costs.latency, list(options.values()), drafters, figures)


def _raced(
    drafter: Drafter,
    prompts: Sequence[str],
    config: TuneConfig,
    latency: RowLatency,
    options: list[Option],
    drafters: Mapping[str, Drafter],
    figures: dict[str, Any],
) -> Tuning:
    """Try drafters, each of them one of the options by its name, and choose; the figures go with the choice."""
    sampling = SamplingConfig(config.temperature)
    whole = prompts[: len(prompts) // config.batch_size * config.batch_size]  # another batch would be another program
    trials = race(drafter.model, drafters, whole, config.max_new_tokens, sampling, config.batch_size)
    named = {option.name: option for option in options}
    tried = [named[name] for name in drafters]
    info = {
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "expected_tokens": {o.name: round(o.tokens, 4) for o in tried},
        "predicted_tokens_per_second": {o.name: round(o.predicted, 2) for o in tried},
        "rows_of": {o.name: o.rows for o in tried},
        "rows": list(latency.rows),
        "milliseconds": [round(1e3 * seconds, 3) for seconds in latency.seconds],
        **figures,
    }
    return Tuning(_choice(drafter, config, drafters, trials, info), latency, options, trials)


def answers_to_search(model: Model, prompts: Sequence[str], config: TuneConfig) -> list[Text]:
    """The base's own greedy answers to the first prompts, for `Method.search`. Raises UserError for none."""
    count, _ = _counts(config, replayed=True)
    return _long_enough(own_answers(model, prompts[:count], SamplingConfig(), 2 * config.max_new_tokens))


def _long_enough(texts: Sequence[Text]) -> list[Text]:
    """Those with answers of two tokens. Raises UserError where none is left."""
    texts = [text for text in texts if len(text[1]) > 1]
    if not texts:
        raise UserError("the answers to these prompts are too short to measure anything on; give more or others")
    return texts


def _best_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """By predicted speed, each once: what has no draft vocabulary comes with every one."""
    once = {option.name: (option, drafter) for option, drafter in candidates}
    return sorted(once.values(), key=lambda candidate: -candidate[0].predicted)


def _choice(
    drafter: Drafter,
    config: TuneConfig,
    drafters: Mapping[str, Drafter],
    trials: Sequence[Trial],
    figures: dict[str, Any],
) -> TunedChoice:
    """The fastest of the trials, autoregressive decoding among them, and the figures behind it."""
    best = max(trials, key=lambda trial: trial.speedup).name
    sources, shape = (drafters[best].sources, drafters[best].shape) if best in drafters else ((), None)
    kind = "sampled" if config.temperature else "greedy"
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
        calibration={s.method.name: s.calibration[kind] for s in sources if kind in s.calibration},
    )


def _with_vocabularies(drafter: Drafter, config: TuneConfig) -> list[Drafter]:
    """A union with each draft vocabulary to try."""
    budget = f"best:{max(_RECORDED_ROWS, smallest_draft(drafter.sources))}"
    return [drafter.with_tree(budget, count) for count in config.draft_vocabularies or (None,)]


def _check_union(config: TuneConfig, drafter: Drafter, prompts: Sequence[str]) -> None:
    """Raise UserError for settings of a union that cannot be measured, before anything is."""
    least = smallest_draft(drafter.sources)
    _check(drafter, prompts, config, least, replayed=True)
    wholes = _with_vocabularies(drafter, config)
    for whole in wholes:
        counts = {source.draft_vocabulary for source in whole.sources if source.trained}
        if len(counts) > 1:
            raise UserError(f"{drafter.name}: adapters with different draft vocabularies; give --draft-vocabularies")
    for whole, tree in itertools.product(wholes, config.also):
        if not tree.startswith("best:"):
            raise UserError(f"{drafter.name}: a union takes a tree of best:ROWS, got {tree!r}")
        whole.with_tree(tree)


def measure_accuracy(drafter: Drafter, prompts: Sequence[str], sampling: SamplingConfig, tokens: int) -> Accuracy:
    """Rank accuracies on the base's own answers to prompts: greedy ones, or sampled with the noise that ranks drafts.

    Args:
      drafter: what predicts.
      prompts: texts.
      sampling: how the answers are drawn.
      tokens: of an answer at most.

    Raises:
      UserError: no answer is long enough to measure anything on.
    """
    model, source = drafter.model, drafter.source
    answers = [AnsweredPrompt(*text) for text in own_answers(model, prompts, sampling, tokens)]
    base = learning(model.base, source.method, source.adapter.frequent_tokens)
    with Progress("accuracy", len(answers), "answers") as progress:
        accuracy = evaluate(source.method, source.trainable, base, answers, progress.update, sampling)
    if not accuracy.positions:
        raise UserError("the answers to these prompts are too short to measure accuracies on; give more or others")
    return accuracy


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
