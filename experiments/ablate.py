"""The papers' ablations on a small base: python ablate.py [--studies NAME ...] [--steps 36], resumable; --report."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.decoding_studies import (
    ACCEPTED,
    COUNTED,
    DECODING_STUDIES,
    run_acceptance,
    run_coverage,
    run_decoding,
    run_similarity,
    run_steps,
)
from experiments.report import MEASURES, not_run, write_report
from experiments.studies import STUDIES
from experiments.trainings import run_studies
from jaxspec import DataConfig, Model, TrainConfig, UserError, load_model
from jaxspec.cli.options import enable_compilation_cache, parse, run_main
from jaxspec.drafting.adapter import adapter_plan, make_drafter, open_adapter
from jaxspec.errors import check_at_least, suggest
from jaxspec.files import alone_in, read_json, writable, write_atomically
from jaxspec.machine import device_name
from jaxspec.methods import PPD
from jaxspec.training.data import prepare_answers
from jaxspec.training.examples import select_prompts
from jaxspec.training.run_config import RunConfig, check_config
from jaxspec.weights.load import DEFAULT_MODEL

_SAMPLED = 40  # held-out prompts that are sampled from


@dataclasses.dataclass(frozen=True)
class Options:
    """Train the variants of the papers' tables, decode with them, and write docs/ablations.md.

    Attributes:
      studies: names; finished trainings are read, what is measured is measured anew. Default: all that ablations.json
        lacks. `steps`, `similarity`, `acceptance` and `coverage` measure and train nothing.
      model: smollm2-135m (embedded); the layers of some studies are made for its 30.
      prompts: a JSONL file of training prompts; empty takes the small set that ships.
      column: field of that file that holds the prompt.
      steps: updates of every training, where its study says nothing else.
      answers: how many of the base's own answers there are to train on.
      eval_answers: held-out answers that accuracies are measured on.
      decode_prompts: held-out prompts that trees are compared on.
      max_new_tokens: per answer when they are.
      output: folder of the trainings; a killed study goes on there.
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


def base_run(options: Options, model: Model) -> RunConfig:
    """What all trainings share: two answers per update, at up to 128 positions each."""
    train = TrainConfig(
        steps=options.steps, batch_size=2, insertions=128, warmup=min(5, options.steps // 4), clip=1.0,
        eval_every=0, eval_answers=options.eval_answers, save_every=12,
    )  # fmt: skip
    data = DataConfig(prompts=options.prompts, column=options.column, answers=options.answers)
    return RunConfig(model=options.model, shapes=model.config, method=PPD(), data=data, train=train)


def check_names(names: tuple[str, ...], missing: list[str]) -> tuple[str, ...]:
    """The studies to run, with those whose adapters they decode with. Raises UserError for one that does not exist."""
    known = [*(study.name for study in STUDIES), *(study.name for study in DECODING_STUDIES), *MEASURES]
    for name in names:
        if name not in known:
            raise UserError(f"unknown study {name!r}{suggest(name, known)}; studies: {', '.join(known)}")
    names = names or tuple(missing)
    needed = {e.study for study in DECODING_STUDIES if study.name in names for e in study.entries.values()} - {""}
    return (*names, *(needed - {*names}))


def check_adapters(names: tuple[str, ...], model: Model) -> None:
    """Raise UserError where a study decodes with an adapter that does not ship, before hours of training."""
    for study in DECODING_STUDIES:
        for entry in study.entries.values() if study.name in names else ():
            if entry.method:
                _, adapter = open_adapter(entry.method, model)
                make_drafter(adapter, adapter_plan(adapter, entry.tree), model, entry.draft_vocabulary)
    measured = {
        "similarity": {"hidden_transfer"},
        "coverage": {COUNTED},
        "acceptance": {entry.method for entry in ACCEPTED.values()},
    }
    for method in {method for name, methods in measured.items() if name in names for method in methods}:
        open_adapter(method, model)


def run(options: Options, names: tuple[str, ...], results: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill in the results, saving after every part."""
    model = load_model(options.model)
    base, output = base_run(options, model), Path(options.output)
    check_adapters(names, model)
    chosen = [study for study in STUDIES if study.name in names]
    for method in {method for study in chosen for method in study.variants.values()}:
        check_config(dataclasses.replace(base, method=method))
    for study in chosen:
        results["trainings"] |= run_studies(base, model, output, [study], lambda text: print(text, file=sys.stderr))
        save()
    prompts = select_prompts(model, base.data)

    def folder(study: str, label: str) -> Path:
        return output / results["trainings"][study][label]["run"]

    for study in (study for study in DECODING_STUDIES if study.name in names):
        texts = [prompt.text for prompt in prompts[: options.decode_prompts]]
        results["decoding"][study.name] = run_decoding(study, model, folder, texts, options.max_new_tokens)
        save()
    if "steps" in names:
        results["steps"] = run_steps(model, cache_length=512, rounds=9)
        save()
    if {"similarity", "coverage"} & {*names}:
        held_out, _ = prepare_answers(model, base.data, prompts[: base.data.held_out], lambda done, tokens: None)
    if "similarity" in names:
        results["similarity"] = run_similarity(model, held_out[: options.eval_answers])
        save()
    if "acceptance" in names:
        texts = [prompt.text for prompt in prompts[:_SAMPLED]]
        done = {label: found for label, found in results["acceptance"].items() if label in ACCEPTED}
        done = done if len(done) < len(ACCEPTED) else {}  # hours: goes on
        results["acceptance"] = done
        for label in (label for label in ACCEPTED if label not in done):
            done[label] = run_acceptance(model, label, ACCEPTED[label], texts, options.max_new_tokens)
            save()
    if "coverage" in names:
        results["coverage"] = run_coverage(model, held_out)
    save()


def check_setting(options: Options, names: tuple[str, ...], results: dict[str, Any], file: Path) -> dict[str, Any]:
    """What all results of a page have in common. Raises UserError where those there were made otherwise.

    Whatever is timed must be so on one machine; accuracies differ between machines by rounding alone.
    """
    shared = ("model", "steps", "eval_answers", "max_new_tokens")
    setting = {name: getattr(options, name) for name in shared} | {"prompts": Path(options.prompts).name}
    timed = {"steps", *(study.name for study in DECODING_STUDIES)} & {*names}
    before = results["setting"].get("machine", "")
    setting |= {"machine": device_name() if timed else before}
    if results["setting"] not in ({}, setting, setting | {"machine": ""}):
        raise UserError(f"{file} holds results of another setting: {results['setting']}; give another --docs")
    return setting


def update(options: Options, file: Path) -> dict[str, Any]:
    """The results of a file, with what is asked for measured and saved there."""
    results = {"setting": {}, "trainings": {}, "decoding": {}, "steps": {}, "similarity": []}
    results |= {"acceptance": {}, "coverage": {}}
    results |= read_json(file) if file.exists() else {}
    names = check_names(options.studies, not_run(results))
    if not options.report:
        results["setting"] = check_setting(options, names, results, file)
        enable_compilation_cache()
        run(options, names, results, lambda: write_atomically(file, json.dumps(results, indent=1).encode()))
    return results


def main(args: list[str]) -> None:
    """Parse, run what is asked for, write the page."""
    options = parse(Options, args, prog="ablate.py")
    docs = Path(options.docs)
    positive = ("steps", "answers", "eval_answers", "decode_prompts")
    check_at_least(options, dict.fromkeys(positive, 1) | {"max_new_tokens": 2})
    file = docs / "ablations.json"
    if options.report and not file.exists():
        raise UserError(f"{file}: no results there; run ablate.py without --report first")
    with alone_in(writable(docs)):
        results = update(options, file)
        print(f"written to {write_report(results, docs)}")


if __name__ == "__main__":
    run_main(main)
