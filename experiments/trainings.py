"""Trains what the tables of ablations compare: many small runs, equal within a table.

A variant that several tables share is trained once. Trainings are ordinary runs in folders of their own, so that a
killed study goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.studies import Study
from jaxspec.files import locked, write_atomically
from jaxspec.training.data import cache_file
from jaxspec.training.run_config import RunConfig, describe, training_settings
from jaxspec.training.trainer import Trainer
from jaxspec.weights.load import Model

_LARGE = 20_000_000  # parameters; projections of whole vocabularies are not kept


def run_name(run: RunConfig, model: Model) -> str:
    """A folder name that belongs to these settings, this base and these prompts alone."""
    answers = cache_file(model, run.data, run.data.max_answer_tokens).stem
    settings = training_settings(describe(run))
    values = [settings["method"], settings["train"], run.train.eval_answers, run.data.answers, answers]
    return f"{run.method.name}-{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]}"


def run_variant(run: RunConfig, model: Model, folder: Path) -> dict[str, Any]:
    """Train a variant, or go on with it, or read what it came to.

    Returns:
      Settings, how many answers were seen and of how many, held-out accuracies [M][K], trainable parameters, training
      speed, and where the method tunes its base the perplexities of held-out answers and what that is made of.
    """
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".variant.lock"):  # several processes may come to the same variant
        if not result.exists():
            figures = _train_variant(run, model, folder)
            write_atomically(result, json.dumps(figures).encode())
            shutil.rmtree(folder / "checkpoints")
            if figures["parameters"] > _LARGE:
                (folder / "adapter.safetensors").unlink()
    return json.loads(result.read_text())


def _train_variant(run: RunConfig, model: Model, folder: Path) -> dict[str, Any]:
    adapter = Trainer(run, model, folder, resume=(folder / "run.json").exists()).run()
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figures = {
        "method": {"name": run.method.name} | dataclasses.asdict(run.method),
        "training": dataclasses.asdict(run.train),
        "accuracy": adapter.info["accuracy"],
        "positions": adapter.info["accuracy_positions"],
        "answers": adapter.info["data"]["answers"],
        "answers_seen": adapter.info["data"]["answers_seen"],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(adapter.trainable)),
        "groups_per_second": [row["groups_per_second"] for row in rows if "loss" in row][-1],
    }
    return figures | {name: adapter.info[name] for name in ("perplexity", "answer_entropies") if name in adapter.info}


def run_studies(
    base: RunConfig, model: Model, output: Path, studies: Sequence[Study], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Train every variant of every study.

    Args:
      base: data and training settings that all share.
      model: the base.
      output: a folder with a folder per training.
      studies: which.
      say: told what is being done.

    Returns:
      {study: {label: figures}}.
    """
    results: dict[str, dict[str, Any]] = {}
    for study in studies:
        results[study.name] = {}
        for label, method in study.variants.items():
            train = dataclasses.replace(base.train, **study.settings(label))
            run = dataclasses.replace(base, method=method, tree="chain:1", train=train)
            say(f"{study.title}: {label}")
            folder = output / run_name(run, model)
            results[study.name][label] = run_variant(run, model, folder) | {"run": folder.name}
    return results
