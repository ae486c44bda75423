"""The papers' ablations on a small base: python -m experiments.ablate [--studies NAME ...] [--report]."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from experiments.decoding_studies import DECODING_STUDIES, SAMPLED
from experiments.measurements import (
    load_drafters,
    measure_acceptance,
    measure_coverage,
    measure_similarity,
    measure_speeds,
    measure_steps,
)
from experiments.report import MEASURES, not_run, write_report
from experiments.studies import STUDIES
from experiments.trainings import run_of, train_study
from jaxspec import DataConfig, TrainConfig, UserError, load_model
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.drafters import load_drafter, open_adapter
from jaxspec.errors import check_at_least, suggest
from jaxspec.files import exclusive, read_json, writable, write_json
from jaxspec.machine import device_name
from jaxspec.methods import PPD
from jaxspec.training.data import prepare_answers
from jaxspec.training.examples import select_prompts
from jaxspec.training.run_config import RunConfig, check_config
from jaxspec.weights.load import DEFAULT_MODEL, Model

SAMPLED_PROMPTS = 40  # held-out prompts that are sampled from
WATCHED = "hidden_transfer"  # whose pseudo states are compared with real ones
COUNTED = "ppd"  # whose counts of tokens are judged; all adapters that ship have the same
PARTS = ("setting", "trainings", "decoding", *MEASURES)  # of ablations.json


@dataclasses.dataclass(frozen=True)
class Options:
    """Train the variants of the papers' tables, decode with them, and write docs/ablations.md.

    Attributes:
      studies: names; finished trainings are read, measurements are made again. Default: all that ablations.json
        lacks. `steps`, `similarity`, `acceptance` and `coverage` measure and train nothing.
      model: smollm2-135m (the default); the layers of some studies are made for its 30.
      prompts: a JSONL file of training prompts; empty takes the small set that ships.
      column: field of that file that holds the prompt.
      steps: updates of every training, where its study says nothing else.
      answers: how many of the base's own answers there are to train on.
      eval_answers: held-out answers that accuracies are measured on.
      decode_prompts: held-out prompts that trees are compared on.
      max_new_tokens: per answer when they are.
      output: folder of the trainings; a killed study resumes there.
      docs: folder of ablations.json, ablations.md and its plots.
      report: write the page from ablations.json and stop.
    """

    studies: tuple[str, ...] = ()
    model: str = DEFAULT_MODEL
    prompts: str = ""
    column: str = "prompt"
    steps: int = 36
    answers: int = 500
    eval_answers: int = 32
    decode_prompts: int = 12
    max_new_tokens: int = 64
    output: str = "runs/ablations"
    docs: str = "docs"
    report: bool = False


def base_run(options: Options) -> RunConfig:
    """What all trainings share: two answers per update, at up to 128 positions each."""
    train = TrainConfig(
        steps=options.steps, batch_size=2, insertions=128, warmup=min(5, options.steps // 4), clip=1.0,
        eval_every=0, eval_answers=options.eval_answers, save_every=12,
    )  # fmt: skip
    data = DataConfig(prompts=options.prompts, column=options.column, answers=options.answers)
    return RunConfig(model=options.model, method=PPD(), data=data, train=train)


def choose(names: tuple[str, ...], missing: list[str]) -> set[str]:
    """The studies to run: those named, or else what is missing, with the trainings that they decode with.

    Raises:
      UserError: one does not exist.
    """
    known = [*(study.name for study in (*STUDIES, *DECODING_STUDIES)), *MEASURES]
    for name in names:
        if name not in known:
            raise UserError(f"unknown study {name!r}{suggest(name, known)}; studies: {', '.join(known)}")
    chosen = {*(names or missing)}
    adapters = [entry.adapter for s in DECODING_STUDIES if s.name in chosen for entry in s.rows.values()]
    return chosen | {adapter[0] for adapter in adapters if not isinstance(adapter, str)}


def check_needs(names: set[str], base: RunConfig, model: Model, sampled: Collection[str] = SAMPLED) -> None:
    """Raise UserError, before hours of training, for a variant that cannot train or an adapter that does not ship."""
    for study in (study for study in STUDIES if study.name in names):
        for training in study.rows.values():
            check_config(run_of(training, base))
    asked = [entry.adapter for study in DECODING_STUDIES if study.name in names for entry in study.rows.values()]
    asked += [WATCHED] * ("similarity" in names) + [COUNTED] * ("coverage" in names)
    asked += [SAMPLED[label].adapter for label in sampled if "acceptance" in names]
    for adapter in {adapter for adapter in asked if isinstance(adapter, str)}:
        open_adapter(adapter, model)


def measure(
    options: Options, names: set[str], sampled: Collection[str] = SAMPLED
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is asked for, part by part.

    Args:
      options: of the command line.
      names: of studies and measurements.
      sampled: which drafters of `SAMPLED` to measure for `acceptance`.

    Yields:
      A part of the results, and what is new in it.

    Raises:
      UserError: a variant cannot train, or an adapter that is needed does not ship.
    """
    model = load_model(options.model)
    base, output = base_run(options), Path(options.output)
    check_needs(names, base, model, sampled)
    trained: dict[str, dict[str, Any]] = {}
    for study in (study for study in STUDIES if study.name in names):
        trained[study.name] = train_study(study, base, model, output)
        yield "trainings", {study.name: trained[study.name]}

    prompts = select_prompts(model, base.data)
    texts, tokens = [prompt.text for prompt in prompts], options.max_new_tokens
    for study in (study for study in DECODING_STUDIES if study.name in names):
        drafters = load_drafters(study.rows, model, lambda name, label: output / trained[name][label]["run"])
        yield "decoding", {study.name: measure_speeds(drafters, texts[: options.decode_prompts], tokens)}
    if "steps" in names:
        yield "steps", measure_steps(model)
    if {"similarity", "coverage"} & names:
        held_out, _ = prepare_answers(model, base.data, prompts[: base.data.held_out])
    if "similarity" in names:
        adapter = open_adapter(WATCHED, model)
        yield "similarity", measure_similarity(adapter, model.base, held_out[: options.eval_answers])
    if "coverage" in names:
        yield "coverage", measure_coverage(open_adapter(COUNTED, model).frequent_tokens, held_out)
    for label in sampled if "acceptance" in names else ():
        entry = SAMPLED[label]
        drafter = load_drafter(entry.adapter, model, tree=entry.tree, draft_vocabulary=entry.draft_vocabulary)
        yield "acceptance", {label: measure_acceptance(label, drafter, texts[:SAMPLED_PROMPTS], tokens)}


def check_setting(options: Options, names: set[str], before: dict[str, Any], file: Path) -> dict[str, Any]:
    """What all results of a page have in common. Raises UserError where those `before` were made otherwise.

    Whatever is timed must be so on one machine; accuracies differ between machines by rounding alone.
    """
    shared = ("model", "steps", "eval_answers", "max_new_tokens")
    setting = {name: getattr(options, name) for name in shared} | {"prompts": Path(options.prompts).name}
    timed = {"steps", *(study.name for study in DECODING_STUDIES)} & names
    setting |= {"machine": device_name() if timed else before.get("machine", "")}
    if before not in ({}, setting, setting | {"machine": ""}):
        raise UserError(f"{file} holds results of another setting: {before}; give another --docs")
    return setting


def main(args: list[str]) -> None:
    """Run what is asked for, save every part, write the page."""
    options = parse(Options, args, prog="python -m experiments.ablate")
    positive = ("steps", "answers", "eval_answers", "decode_prompts")
    check_at_least(options, dict.fromkeys(positive, 1) | {"max_new_tokens": 2})
    docs, file = Path(options.docs), Path(options.docs) / "ablations.json"
    if options.report and not file.exists():
        raise UserError(f"{file}: no results there; run without --report first")
    with exclusive(writable(docs)):
        results = {part: {} for part in PARTS} | (read_json(file) if file.exists() else {})
        names = choose(options.studies, not_run(results))
        if not options.report:
            results["setting"] = check_setting(options, names, results["setting"], file)
            enable_compilation_cache()
            left = [label for label in SAMPLED if label not in results["acceptance"]]  # hours: resumes behind the last
            for part, figures in measure(options, names, left or SAMPLED):
                results[part] |= figures
                write_json(file, results)
        print(f"written to {write_report(results, docs)}")


if __name__ == "__main__":
    run_main(main)
