"""Trains what the tables of ablations compare: many small runs, equal within a table.

A variant that several tables share is trained once. Trainings are ordinary runs in folders of their own, so that a
killed study resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from experiments.studies import Study, Training
from jaxspec.files import locked, read_json, write_json
from jaxspec.training.data import cache_file
from jaxspec.training.run_config import RunConfig, describe, training_settings
from jaxspec.training.trainer import Trainer
from jaxspec.weights.load import Model
from jaxspec.weights.params import parameter_count

LARGE = 20_000_000  # parameters of an adapter: larger ones, projections of whole vocabularies, are not kept


def run_name(run: RunConfig, model: Model) -> str:
    """A folder name that belongs to these settings, this base and these prompts alone."""
    answers = cache_file(model, run.data, run.data.max_answer_tokens).stem
    settings = training_settings(describe(run))
    values = [settings["method"], settings["train"], run.train.eval_answers, run.data.answers, answers]
    return f"{run.method.name}-{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]}"


def run_of(training: Training, base: RunConfig) -> RunConfig:
    """The run of a row, with what all rows share."""
    train = dataclasses.replace(base.train, **training.settings)
    return dataclasses.replace(base, method=training.method, tree="chain:1", train=train)


def train_study(study: Study, base: RunConfig, model: Model, output: Path) -> dict[str, dict[str, Any]]:
    """Train every row of a study that is not trained yet, each in a folder of its own.

    Args:
      study: which.
      base: data and training settings that all share.
      model: the base.
      output: where the folders are.

    Returns:
      {label: figures}, `run` among them, the name of the training's folder.
    """
    results = {}
    for label, training in study.rows.items():
        print(f"{study.title}: {label}", file=sys.stderr)
        run = run_of(training, base)
        folder = output / run_name(run, model)
        results[label] = train_variant(run, model, folder) | {"run": folder.name}
    return results


def train_variant(run: RunConfig, model: Model, folder: Path) -> dict[str, Any]:
    """Train a variant, resume its training, or read the result of an earlier one.

    Returns:
      Settings, how many answers were seen and of how many, held-out accuracies [M][K], trainable parameters, training
      speed, and where the method tunes its base the perplexities of held-out answers and what they are made of.
    """
    result = folder / "result.json"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".variant.lock"):  # several processes may need the same variant
        if not result.exists():
            figures = _train(run, model, folder)
            write_json(result, figures)
            shutil.rmtree(folder / "checkpoints")
            if figures["parameters"] > LARGE:
                (folder / "adapter.safetensors").unlink()
    return read_json(result)


def _train(run: RunConfig, model: Model, folder: Path) -> dict[str, Any]:
    adapter = Trainer(run, model, folder, resume=(folder / "run.json").exists()).run()
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    info = adapter.info
    figures = {
        "method": {"name": run.method.name} | dataclasses.asdict(run.method),
        "training": dataclasses.asdict(run.train),
        "accuracy": info["accuracy"],
        "positions": info["accuracy_positions"],
        "answers": info["data"]["answers"],
        "answers_seen": info["data"]["answers_seen"],
        "parameters": parameter_count(adapter.trainable),
        "groups_per_second": [row["groups_per_second"] for row in rows if "loss" in row][-1],
    }
    return figures | {name: info[name] for name in ("perplexity", "answer_entropies") if name in info}
