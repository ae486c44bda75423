"""Measure a machine, pick the tree that should be fastest on it, and make sure by decoding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.generate import generate_many
from jaxspec.decoding.prompts import encode_prompts
from jaxspec.drafting.choice import Choice
from jaxspec.drafting.drafter import Drafter, autoregressive
from jaxspec.drafting.tree import chain, expected
from jaxspec.drafting.tree.plan import check_accuracy
from jaxspec.errors import UserError, check_at_least
from jaxspec.machine import processor, this_machine
from jaxspec.plotting import picture
from jaxspec.progress import Progress
from jaxspec.training.data import Answer
from jaxspec.training.evaluate import Accuracy, evaluate
from jaxspec.tuning.hardware import Latency, Option, make_option, rank_options
from jaxspec.tuning.latency import measure_latency
from jaxspec.tuning.race import Trial, race

_SAMPLED_PROMPTS = 16  # to measure accuracies on, where the adapter's own do not fit


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """What to tune for, and how hard to look.

    Attributes:
      batch_size: prompts decoded together.
      cache_length: S, slots of the cache while step times are measured.
      temperature: of sampling; 0 is greedy.
      max_new_tokens: tokens per answer.
      num_prompts: prompts of the final trial.
      accuracy_prompts: further prompts to measure accuracies on; 0 takes the adapter's own where greedy.
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

    choice: Choice
    latency: Latency
    options: list[Option]
    trials: list[Trial]


def check_tuning(config: TuneConfig, drafter: Drafter, prompts: Sequence[str]) -> None:
    """Raise UserError for settings that cannot be measured, before anything is."""
    model = drafter.model
    least = {"batch_size": 1, "num_prompts": 1, "max_new_tokens": 2, "finalists": 1, "accuracy_prompts": 0}
    check_at_least(config, least | {"cache_length": 64, "max_rows": 2 * (1 + drafter.source.method.probe_rows)})
    if config.cache_length > model.config.max_positions:
        raise UserError(f"cache-length is at most the base's {model.config.max_positions}, got {config.cache_length}")
    measured, tried = _counts(config)
    needed = measured + config.batch_size
    if len(prompts) < needed:
        raise UserError(f"these settings need at least {needed} prompts, there are {len(prompts)}")
    encode_prompts(model, prompts[: measured + tried], 2 * config.max_new_tokens, True, None)
    for count in _vocabularies(config, drafter):
        for tree in (chain(1), *config.also):
            _ = drafter.with_tree(tree, count).plan  # refuses what is no fixed tree


def _vocabularies(config: TuneConfig, drafter: Drafter) -> tuple[int, ...]:
    return config.draft_vocabularies or (drafter.source.adapter.info.get("draft_vocabulary", 0),)


def _counts(config: TuneConfig) -> tuple[int, int]:
    """Prompts to measure accuracies on, and prompts to try trees on."""
    measured = config.accuracy_prompts or (_SAMPLED_PROMPTS if config.temperature else 0)
    return measured, max(config.num_prompts // config.batch_size, 1) * config.batch_size


def tune(drafter: Drafter, prompts: Sequence[str], config: TuneConfig) -> Tuning:
    """Measure step times, search trees for the most tokens per second, and try the best few.

    Args:
      drafter: what drafts, whatever its tree.
      prompts: texts that the adapter was not trained on and that are no benchmark; the first ones measure
        accuracies where that is needed, those after them try the trees.
      config: what to tune for.

    Raises:
      UserError: settings or prompts that cannot be measured.
    """
    check_tuning(config, drafter, prompts)
    source, vocabularies, sampling = drafter.source, _vocabularies(config, drafter), SamplingConfig(config.temperature)
    measured, tried = _counts(config)
    if measured:
        accuracy = measure_accuracy(drafter, prompts[:measured], sampling, 2 * config.max_new_tokens).by_rank
    else:
        accuracy = check_accuracy(source.accuracy)
    latency = measure_latency(drafter, vocabularies[0], config.batch_size, config.cache_length, config.max_rows)
    probes = (source.method.probe_distances, source.method.probe_rows)
    ranked = rank_options(accuracy, latency, config.max_rows, *probes)
    also = [
        make_option(spec, expected(drafter.with_tree(spec).plan, accuracy), latency, *probes) for spec in config.also
    ]
    finalists, drafters = [], {}
    for option, count in itertools.product([*ranked[: config.finalists], *also], vocabularies):
        name = f"{option.name}, {count} tokens" if count else option.name
        finalists.append(dataclasses.replace(option, name=name))
        drafters[name] = drafter.with_tree(option.plan, count)
    chosen = prompts[measured : measured + tried]
    trials = race(drafter.model, drafters, chosen, config.max_new_tokens, sampling, config.batch_size)
    best = max(trials, key=lambda trial: trial.speedup).name
    choice = Choice(
        machine=this_machine(),
        dtype=str(drafter.model.dtype),
        adapter=source.adapter.digest,
        batch_size=config.batch_size,
        cache_length=config.cache_length,
        temperature=config.temperature,
        plan=drafters[best].plan if best in drafters else None,
        name=best,
        info=_figures(accuracy, latency, finalists, trials),
        draft_vocabulary=drafters[best].source.draft_vocabulary if best in drafters else 0,
    )
    return Tuning(choice, latency, [*ranked, *also, *finalists], trials)


def _figures(accuracy: np.ndarray, latency: Latency, finalists: list[Option], trials: list[Trial]) -> dict[str, Any]:
    """What a choice is based on, as plain values."""
    return {
        "processor": processor(),
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "drafting_milliseconds": [round(1e3 * seconds, 3) for seconds in latency.drafting],
        "expected_tokens": {o.name: round(o.plan.expected_tokens, 4) for o in finalists},
        "predicted_tokens_per_second": {o.name: round(o.predicted, 2) for o in finalists},
        "rows_of": {o.name: o.rows for o in finalists},
        "accuracy": np.round(accuracy, 5).tolist(),
        "rows": list(latency.rows),
        "milliseconds": [round(1e3 * seconds, 3) for seconds in latency.seconds],
    }


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
    ids = [model.encode(prompt) for prompt in prompts]
    answers: list[Answer] = []
    made = generate_many(autoregressive(model), ids, tokens, batch_size=min(16, len(ids)), sampling=sampling)
    with Progress("answers", len(ids), "answers") as progress:
        for index, answer in made:
            answers.append(Answer(ids[index], answer))
            progress.update(len(answers))
    with Progress("accuracy", len(ids), "answers") as progress:
        accuracy = evaluate(source.method, source.trainable, model.base, answers, progress.update, sampling)
    if not accuracy.positions:
        raise UserError("the answers to these prompts are too short to measure accuracies on; give more or others")
    return accuracy


def plot_tuning(latency: Latency, options: Sequence[Option], trials: Sequence[Trial], file: Path) -> None:
    """Draw latency, tokens per step, and predicted against measured speed.

    Args:
      latency: of the machine.
      options: all trees, the best predicted first.
      trials: what was measured, by the names of options.
      file: PNG to write.
    """
    best: dict[float, Option] = {}
    for option in options:
        best[option.rows] = max(option, best.get(option.rows, option), key=lambda option: option.predicted)
    rows = sorted(best)
    with picture(file, 1, 3, (14, 4), dpi=110) as (steps, tokens, speed):
        steps.plot(latency.rows, [1e3 * s for s in latency.seconds], marker=".")
        steps.set(xlabel="rows", ylabel="milliseconds per step", title="latency", ylim=(0, None))
        tokens.plot(rows, [best[r].plan.expected_tokens for r in rows], marker=".")
        tokens.set(xlabel="rows", ylabel="tokens per step", title="expected, best tree of each size")
        speed.plot(rows, [best[r].predicted for r in rows], marker=".", label="predicted")
        where = {option.name: option.rows for option in options}
        for trial in trials:
            color = "C2" if trial.name in where else "C1"
            speed.plot(where.get(trial.name, 1), trial.tokens_per_second, "o", color=color)
        # the first trial is autoregressive decoding
        speed.axhline(trials[0].tokens_per_second, color="C1", linewidth=0.8, label="autoregressive, measured")
        speed.set(xlabel="rows", ylabel="tokens per second", title="speed (dots: measured)", ylim=(0, None))
        speed.legend(fontsize=8)
