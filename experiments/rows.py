"""One entry of the leaderboard: train a drafter under fixed terms, score it, and write its row, stage by stage.

A row is a JSON file that is written after every stage, so that a killed entry resumes and does nothing twice. Scores
come by replay of the base's own answers and depend on no hardware.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from experiments.entries import Entry, digest
from experiments.prompts import held_out_prompts, prompts_digest, training_prompts
from experiments.scores import FIXED, score, time_steps
from jaxspec.config import DataConfig, TrainConfig
from jaxspec.drafting.adapter import Adapter
from jaxspec.drafting.tree import sparse_tree
from jaxspec.errors import UserError, differences
from jaxspec.files import read_json, write_atomically
from jaxspec.machine import device_name
from jaxspec.methods import PromptLookup, load_drafter
from jaxspec.training.run_config import RunConfig, check_config, describe, training_settings
from jaxspec.training.trainer import Diverged, Trainer
from jaxspec.tuning.memory import forget_peak, peak_memory
from jaxspec.weights.load import DEFAULT_MODEL, Model
from jaxspec.weights.params import parameter_count

_RATES = (1 / 3, 1.0, 3.0)  # times the middle one
_LONGEST = 192  # tokens of a prompt: the default model needs no more for any of them
_TRIAL = 10  # a trial of a learning rate has so many times fewer updates


@dataclasses.dataclass(frozen=True)
class Terms:
    """What all entries have in common.

    Attributes:
      model: the base.
      updates: of a training.
      sequences: answers per update.
      insertions: insertion points per answer at most.
      answers: training answers at most; fewer where the updates need fewer.
      validation: answers that are set aside from training, by which the learning rate is chosen and chances calibrated.
      held_out: answers to score on; 0 is all.
      answer_tokens: answers are cut there.
      multiple: how many times the usual updates these are.
    """

    model: str = DEFAULT_MODEL
    updates: int = 500
    sequences: int = 4
    insertions: int = 48
    answers: int = 2000
    validation: int = 32
    held_out: int = 0
    answer_tokens: int = 128
    multiple: float = 1.0

    def times(self, multiple: float) -> Terms:
        """The same with a multiple of the updates."""
        updates = round(multiple * self.updates)
        if updates < 1:
            raise UserError(f"multiple {multiple:g} of {self.updates} updates is none; give a larger one")
        return dataclasses.replace(self, updates=updates, multiple=multiple)


def data_of(terms: Terms, output: Path) -> tuple[DataConfig, DataConfig]:
    """What to train on, and what to score on. Writes the prompts into a folder.

    Raises:
      UserError: it cannot be written.
    """
    files = {}
    for name, prompts in (("training", training_prompts()), ("held_out", held_out_prompts())):
        files[name] = output / f"{name}.jsonl"
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        write_atomically(files[name], lines.encode())
    limits = {"max_prompt_tokens": _LONGEST, "max_answer_tokens": terms.answer_tokens}
    shared = {"cache": str(output / "answers")} | limits
    count, needed = terms.held_out or len(held_out_prompts()), terms.updates * terms.sequences
    training = DataConfig(
        str(files["training"]), answers=min(terms.answers, needed), held_out=terms.validation,
        held_out_tokens=terms.answer_tokens, **shared,
    )  # fmt: skip
    return training, DataConfig(str(files["held_out"]), answers=count, held_out=0, **shared)


def run_of(entry: Entry, terms: Terms, data: DataConfig, rate: float, updates: int) -> RunConfig:
    """The training of an entry: the terms' in everything that makes budgets equal, its config's in the rest."""
    train = entry.run.train
    together = train.microbatch or train.batch_size  # what its config lets the memory hold
    whole, divides = together >= terms.sequences, terms.sequences % together == 0
    train = dataclasses.replace(
        train, steps=updates, batch_size=terms.sequences, insertions=terms.insertions, positions="answer",
        microbatch=0 if whole else together if divides else 1,
        sequence_length=TrainConfig.sequence_length, learning_rate=rate, warmup=updates // 20, seed=0, eval_every=0,
        eval_answers=0, save_every=max(updates // 10, 1), keep=1,
    )  # fmt: skip
    return dataclasses.replace(entry.run, model=terms.model, tree=f"sparse:{FIXED}", data=data, train=train)


class Row:
    """The row of an entry, a file that grows stage by stage.

    Args:
      file: where it is, or will be.
      identity: what the row is of, plain values for JSON.

    Raises:
      UserError: the file holds something else.
    """

    def __init__(self, file: Path, identity: dict[str, Any]):
        self._file, self.found = file, json.loads(json.dumps(identity))
        if not file.exists():
            return
        held = read_json(file)
        old, new = (_flat({name: part.get(name) for name in identity}) for part in (held, self.found))
        if old != new:
            words = "; ".join(differences(old, new))
            raise UserError(f"{file} is of another entry ({words}); remove it, or give this one another --name")
        self.found = held

    def stage(self, make: Callable[[], Any], *path: str) -> Any:
        """The result of a stage at a path of names: the one that is there, or one that is made and written now."""
        *parts, last = path
        part = self.found
        for name in parts:
            part = part.setdefault(name, {})
        if last not in part:
            part[last] = json.loads(json.dumps(make()))
            write_atomically(self._file, readable(self.found).encode())
        return part[last]


def readable(values: dict[str, Any]) -> str:
    """JSON with every list of numbers on a line."""
    text = json.dumps(values, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return flatten_dict(values, sep=".")


def enter(entry: Entry, terms: Terms, model: Model, output: Path, docs: Path, timed: bool) -> dict[str, Any]:
    """Train, score, and if asked to time an entry; what is done already is not done again.

    Args:
      entry: what enters.
      terms: of the leaderboard.
      model: the base.
      output: folder of prompts, answers and trainings.
      docs: folder of the rows.
      timed: whether to measure what a step takes.

    Returns:
      The row.

    Raises:
      UserError: the row is there and is another entry's, or the method cannot be trained.
    """
    training, scoring = data_of(terms, output)
    identity = identity_of(entry, terms, model, training)
    row, adapter = Row(docs / f"{entry.name}.json", identity), None
    if entry.method.trainable:
        folder = output / entry.name / digest(json.dumps(identity).encode())  # another entry trains elsewhere
        rate = choose_rate(entry, terms, model, training, row, folder)
        run, adapter = run_of(entry, terms, training, rate, terms.updates), folder / "training"
        row.stage(lambda: train_entry(run, model, adapter), "training")
    drafter = load_drafter(list(dict.fromkeys([entry.method.name, PromptLookup.name])), model, adapter)
    row.stage(lambda: score(drafter, scoring), "scores")
    if timed:
        row.stage(lambda: time_steps(drafter), "steps")
    return row.found


def identity_of(entry: Entry, terms: Terms, model: Model, data: DataConfig) -> dict[str, Any]:
    """What a row is of."""
    method = {"name": entry.method.name} | dataclasses.asdict(entry.method)
    base = {"prompts": prompts_digest(), "fingerprint": model.fingerprint}
    found = {"name": entry.name, "method": method, "source": entry.source, "terms": dataclasses.asdict(terms) | base}
    if entry.method.trainable:
        run = run_of(entry, terms, data, entry.run.train.learning_rate, terms.updates)
        check_config(run)
        found["recipe"] = training_settings(describe(run))["train"] | {"draft_vocabulary": run.draft_vocabulary}
    return found


def choose_rate(entry: Entry, terms: Terms, model: Model, data: DataConfig, row: Row, folder: Path) -> float:
    """The learning rate that does best in a short training."""
    middle, updates, found = entry.run.train.learning_rate, max(terms.updates // _TRIAL, 1), {}
    for rate in (float(f"{middle * factor:.2g}") for factor in _RATES):
        run, name = run_of(entry, terms, data, rate, updates), f"{rate:g}"
        found[rate] = row.stage(lambda run=run, name=name: try_rate(run, model, folder / f"rate-{name}"), "rates", name)
    return max(found, key=found.get)


def _adapter_of(run: RunConfig, model: Model, folder: Path) -> Adapter:
    return Trainer(run, model, folder, resume=(folder / "run.json").exists()).run()


def try_rate(run: RunConfig, model: Model, folder: Path) -> float:
    """Tokens per step to expect of a fixed tree after a short training; 0 where it diverges."""
    try:
        accuracy = np.array(_adapter_of(run, model, folder).info["accuracy"])
        expected = round(sparse_tree(accuracy, FIXED).expected_tokens, 4)
    except Diverged as error:
        print(error, file=sys.stderr)
        expected = 0.0
    shutil.rmtree(folder)
    return expected


def train_entry(run: RunConfig, model: Model, folder: Path) -> dict[str, Any]:
    """Train, and say what that took."""
    forget_peak()
    adapter = _adapter_of(run, model, folder)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["seconds"] for row in rows if "seconds" in row}  # a resumed run logs some steps twice
    return {
        "learning_rate": run.train.learning_rate,
        "updates": run.train.steps,
        "answers_seen": adapter.info["data"]["answers_seen"],
        "parameters": parameter_count(adapter.trainable),
        "seconds": round(sum(seconds.values()), 1),
        "peak_memory": peak_memory(),
        "machine": device_name(),
    }
