"""Trainings under equal terms: learning rates tried, entries and rows of the ablations trained."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lab.entries import Entry
from experiments.lab.jobs import Job
from experiments.lab.lab import Lab
from experiments.lab.terms import NODES, Data, Terms, answers_of
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import finalized
from jaxspec.drafters.source import learning
from jaxspec.errors import UserError
from jaxspec.files import read_json, write_json
from jaxspec.machine import Stopwatch
from jaxspec.progress import Progress
from jaxspec.training.data import TrainingData
from jaxspec.training.evaluate import evaluate
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import TrainConfig
from jaxspec.training.step import Update, first_state, train_step
from jaxspec.training.trainer import Diverged, Trainer
from jaxspec.trees import sparse_tree
from jaxspec.tuning.memory import forget_peak, peak_memory
from jaxspec.weights.params import parameter_count

_FACTORS = (1.0, 1 / 3, 3.0)  # of the learning rate in the middle
_MOST_RATES = 5
_ROUNDING = 0.01  # by which figures of the same update may differ between devices
_JUDGED = 16  # nodes of the tree by which learning rates are compared


def run_of(terms: Terms, data: Data, entry: Entry, seed: int, rate: float, updates: int) -> RunConfig:
    """The training of an entry: the terms' in everything that makes budgets equal, its own recipe in the rest."""
    on_cpu = jax.default_backend() == "cpu"
    train = TrainConfig(
        steps=updates, batch_size=terms.sequences, insertions=terms.insertions, learning_rate=rate,
        warmup=updates // 20, seed=seed, eval_every=0, eval_answers=0, keep=1,
        save_every=max(updates // 10, 1) if on_cpu else updates,  # an accelerator repeats all of it in seconds
        lengths=4 if on_cpu else 1,  # compiling takes longer there than padding
        **entry.recipe,
    )  # fmt: skip
    return RunConfig(terms.model, entry.method, f"sparse:{NODES[-1]}", 0, data.training, train)


def try_rates(lab: Lab, job: Job) -> dict[str, Any]:
    """The learning rate that does best in a short training: the middle one, a third, three times, and one further out.

    Raises:
      UserError: none of them gives finite losses, or this device computes something else than a CPU.

    Returns:
      `rates`, by the rate the tokens per step to expect of a fixed tree, 0 where it diverged; `learning_rate`; and what
      was `measured`.
    """
    file = lab.folder(job) / "rates.json"
    found = read_json(file) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    waiting = [job.entry.rate * factor for factor in _FACTORS]
    with Stopwatch() as watch:
        while waiting:
            for rate in (f"{rate:.2g}" for rate in waiting):
                if rate not in found:
                    found[rate] = _try_rate(lab, job, float(rate), file.with_name(f"rate-{rate}"))
                    write_json(file, found)
            waiting = further_out(found) if len(found) < _MOST_RATES else []
    best = max(found, key=found.get)
    if not found[best]:
        raise UserError(f"{job.entry.name} diverges with every learning rate tried: {', '.join(found)}")
    measured = {"compile_seconds": round(watch.compile_seconds, 1)}
    return {"rates": found, "learning_rate": float(best), "measured": measured}


def further_out(found: Mapping[str, float]) -> list[float]:
    """The next rate beyond the best one, if that is the lowest or the highest; a lower one where all diverged."""
    rates = sorted(found, key=float)
    best = max(found, key=found.get) if any(found.values()) else rates[0]
    if best == rates[0]:
        return [float(best) / 3]
    return [float(best) * 3] if best == rates[-1] else []


def _try_rate(lab: Lab, job: Job, rate: float, folder: Path) -> float:
    run = run_of(lab.terms, lab.data, job.entry, job.seed, rate, lab.terms.trial_updates)
    try:
        accuracy = np.array(train_run(lab, run, folder).info["accuracy"])
    except Diverged as error:
        print(error, file=sys.stderr)
        return 0.0
    return round(sparse_tree(accuracy, _JUDGED).expected_tokens, 4)


def train(lab: Lab, job: Job) -> dict[str, Any]:
    """Train an entry with the learning rate that was chosen; the adapter stays in the work folder."""
    [rates] = job.needs
    return _train(lab, job, lab.result(rates)["learning_rate"])


def train_variant(lab: Lab, job: Job) -> dict[str, Any]:
    """Train a row of an ablation with the learning rate that its study gives."""
    return _train(lab, job, job.entry.rate)


def tidy(lab: Lab, job: Job) -> None:
    """Remove what a finished training has no more use for; of an entry the adapter stays."""
    if job.kind == "train":
        for leftover in ("checkpoints", "best"):
            shutil.rmtree(lab.folder(job) / "adapter" / leftover, ignore_errors=True)
    else:
        lab.forget(job)


def _train(lab: Lab, job: Job, rate: float) -> dict[str, Any]:
    """What came of a training; what differs from machine to machine under `measured`."""
    run = run_of(lab.terms, lab.data, job.entry, job.seed, rate, lab.terms.updates)
    folder = lab.folder(job) / "adapter"
    forget_peak()
    with Stopwatch() as watch:
        adapter = train_run(lab, run, folder)
    found = {
        "learning_rate": rate,
        "updates": run.train.steps,
        "answers_seen": adapter.info["data"]["answers_seen"],
        "parameters": parameter_count(adapter.trainable),
        "accuracy": held_out_accuracy(lab, adapter),
    }
    found |= {name: adapter.info[name] for name in ("perplexity",) if name in adapter.info}
    seconds = update_seconds(folder)
    return found | {
        "measured": {
            "updates_per_second": round(1 / statistics.median(seconds), 2),
            "training_seconds": round(sum(seconds), 1),
            "compile_seconds": round(watch.compile_seconds, 1),
            "peak_memory": peak_memory(),
        }
    }


def train_run(lab: Lab, run: RunConfig, folder: Path) -> Adapter:
    """The adapter of a run, which resumes where it stopped."""
    answers_of(lab.model, run.data)  # places those that ship
    resumes = (folder / "run.json").exists()
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)  # parts that a kill has left while they were removed
    adapter = Trainer(run, lab.model, folder, resumes).run()
    if jax.default_backend() != "cpu":
        compare_updates(_logged(folder)[0], _first_update_on_cpu(lab, run))
    return adapter


def _logged(folder: Path) -> list[dict[str, Any]]:
    """What a run's log says of its updates, in order; a resumed run has logged some twice."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [*{row["step"]: row for row in rows if "seconds" in row}.values()]


def update_seconds(folder: Path) -> list[float]:
    """Seconds of every update."""
    return [row["seconds"] for row in _logged(folder)]


def _first_update_on_cpu(lab: Lab, run: RunConfig) -> dict[str, float]:
    """Loss and gradient norm of the first update of a run, computed by the CPU beside an accelerator."""
    cpu, train = jax.devices("cpu")[0], run.train
    _, answers = answers_of(lab.model, run.data)
    with jax.default_device(cpu):
        base = learning(jax.device_put(lab.model.base, cpu), run.method, None)
        update = Update.of(run.method, lab.model.config, train)
        state = first_state(update, train.seed, base)
        batch = jax.device_put(TrainingData(answers, train).batch(0), cpu)
        _, metrics = train_step(update, base, state, batch, np.float32(0))
    return {name: float(metrics[name]) for name in ("loss", "gradient_norm")}


def compare_updates(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Raise UserError where figures of one update differ by more than rounding does.

    A program can be compiled wrongly for a device, which a loss that falls does not show.
    """
    for name, value in expected.items():
        if not abs(found[name] - value) <= _ROUNDING * abs(value):
            raise UserError(
                f"{jax.devices()[0].device_kind} computes the first update otherwise than the CPU beside it: {name} "
                f"{found[name]:.4g}, not {value:.4g}; train this entry on another device, or with another JAX"
            )


def held_out_accuracy(lab: Lab, adapter: Adapter) -> list[list[float]]:
    """[M][K], how often the candidate of each rank is right on the answers that are scored."""
    final, own = finalized(adapter.method, adapter.trainable, lab.model)
    _, answers = answers_of(own, lab.data.scoring)
    base = learning(own.base, final.method, adapter.frequent_tokens)
    with Progress("evaluation", len(answers), "answers") as progress:
        accuracy = evaluate(final.method, final.trainable, base, answers, progress.update)
    return np.round(accuracy.by_rank, 4).tolist()


def seconds_of_updates(lab: Lab, job: Job) -> float:
    """Seconds that a training would take on this device, by five updates of it, compiled before.

    An evaluated answer counts as a quarter of an update of four.
    """
    terms, timed = lab.terms, 5
    run = run_of(terms, lab.data, job.entry, job.seed, job.entry.rate, terms.updates)
    update, base = Update.of(run.method, lab.model.config, run.train), learning(lab.model.base, run.method, None)
    _, answers = answers_of(lab.model, run.data)
    data, state = TrainingData(answers, run.train), first_state(update, run.train.seed, base)
    with Stopwatch() as watch:
        for step in range(timed + 1):
            state, metrics = train_step(update, base, state, data.batch(step), np.float32(0))
            jax.block_until_ready(metrics)
    each = watch.seconds / (timed + 1)
    if job.kind == "rates":
        updates = (len(_FACTORS) + 1) * (terms.trial_updates + terms.text.held_out / terms.sequences)
    else:
        updates = terms.updates + (terms.text.held_out + terms.held_out) / terms.sequences
    return updates * each + 3 * watch.compile_seconds  # the update, its start, and an evaluation
