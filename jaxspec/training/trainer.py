"""The trainer of a run: generates or reads answers, trains, evaluates, saves checkpoints, and writes an adapter."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Method
from jaxspec.drafters.adapter import OWN_MODEL, WEIGHTS, Adapter, save_adapter
from jaxspec.drafters.drafter import finalized, method_plan
from jaxspec.drafters.source import learning, temperature_key
from jaxspec.errors import UserError
from jaxspec.files import read_json, swap_folder
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.parallel.processes import as_leader, check_alike, is_leader
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_batch
from jaxspec.progress import Progress, say
from jaxspec.training.data import TrainingData, frequent_tokens, prepare_answers
from jaxspec.training.evaluate import Accuracy, answer_entropies, evaluate, perplexity, top
from jaxspec.training.examples import select_prompts
from jaxspec.training.folder import BEST, Checkpoints, claim, identify, starting_state
from jaxspec.training.logs import RunLog, plot_training
from jaxspec.training.run_config import RunConfig, check_config
from jaxspec.training.step import TrainState, Update, enter_stage, learning_rates, stage_ends, train_step, train_steps
from jaxspec.trees.plan import plan_to_json, replayed
from jaxspec.weights.load import save_model
from jaxspec.weights.model import Model
from jaxspec.weights.params import params_fingerprint
from jaxspec.weights.sharing import Shared, write_sharing
from jaxspec.weights.storage import as_stored

_QUICK = 16  # held-out answers of an evaluation during training
_TOGETHER = 16  # updates per call of an accelerator


class Stopped(Exception):
    """A run was asked to stop; its folder holds everything done so far."""


class Diverged(UserError):
    """The loss or the gradient of a run is no longer finite."""


class Trainer:
    """One run in one folder: log.jsonl, checkpoints/, best/, and at the end the adapter and training.png.

    A method that replaces its base leaves the new one in model/. For a method with a second base, `load_model`
    reads that base from the folder. Several processes must all see the folder; only the first one writes to it.

    Args:
      config: the settings of the run.
      model: the base, on the run's mesh.
      output: the folder.
      resume: continue the run that the folder holds.
      stop: called after every call of the device, and between the batches of an evaluation; returns whether to stop.

    Raises:
      UserError: settings that cannot be trained with, prompts that cannot be read, or a base of other shapes.
    """

    def __init__(
        self, config: RunConfig, model: Model, output: Path, resume: bool, stop: Callable[[], bool] = lambda: False
    ):
        check_config(config)
        if model.config != config.shapes:
            raise UserError(f"{model.name!r} has other shapes than the config: {model.config}, not {config.shapes}")
        if config.train.tensorboard and importlib.util.find_spec("tensorboardX") is None:
            raise UserError("train.tensorboard needs a package; install it with: pip install tensorboardX")
        self.config, self.model, self.output, self._resume, self._stop = config, model, output, resume, stop
        self.base = Base(model.params, Decoder(model.config, remat=config.train.remat))
        self.mesh = mesh_of(model.params)
        self._rates = learning_rates(config.facts.stages, config.train)
        self._stage_ends = stage_ends(config.facts.stages, config.train.steps)
        usual = 1 if jax.default_backend() == "cpu" else _TOGETHER
        # batches of several updates are not divided over a mesh
        self._together = (config.train.together or usual) if self.mesh is None else 1
        self._prompts = select_prompts(model, config.data)
        self._identity = identify(config, model)

    def run(self) -> Adapter:
        """Generate or read the answers, train, evaluate, write the adapter.

        Raises:
          UserError: the folder holds another run, is in use or cannot be written.
          Diverged: the loss is no longer finite.
          Stopped: the caller asked to stop; a run with `resume` continues from there.
        """
        with claim(self.output, self._identity, self._resume), in_mesh(self.mesh):
            self._checkpoints = Checkpoints(self.output / "checkpoints", self.config.train.keep)
            done, self._best = self._checkpoints.latest, self._best_so_far()
            check_alike(json.dumps([self._best, done]).encode(), f"what {self.output} holds")
            with RunLog(self.output, self.config.train.tensorboard, done) as self._log:
                self._held_out, answers = prepare_answers(self.model, self.config.data, self._prompts)
                self._data = TrainingData(answers, self.config.train)
                self._frequent = frequent_tokens(answers, self.model.config.vocab_size)
                self.base = learning(self.base, self.config.method, self._frequent)
                adapter = self._finish(self._train())
        if is_leader():
            plot_training(self.output / "log.jsonl", self.output / "training.png")
        return adapter

    def _best_so_far(self) -> float:
        """Tokens per step of the best adapter so far with the run's tree; -1 without one."""
        file = self.output / BEST / "adapter.json"
        best = read_json(file, ["tokens_per_step", "drafted_with"]) if file.exists() else {}
        return best["tokens_per_step"] if best.get("drafted_with") == self.config.tree else -1.0

    def _train(self) -> PyTree:
        """Do the remaining updates. Returns the weights to draft with."""
        train, settings = self.config.train, (self.config.method, self.config.shapes, self.config.train)
        updates = [Update.of(*settings, stage, self.config.mesh.zero == 2) for stage in range(len(self._stage_ends))]
        step = self._checkpoints.latest
        if self._resume and is_leader():
            print(f"{self.output}: resuming after update {step} of {train.steps}", file=sys.stderr)
        update = updates[bisect.bisect_right(self._stage_ends, max(step - 1, 0))]  # of the state that was saved
        state = starting_state(self._checkpoints, update, train.seed, self.base)
        with Progress("training", train.steps, "steps", done=step) as progress:
            while step < train.steps:
                if step and train.eval_every and step % train.eval_every == 0:  # repeated by a run that resumes here
                    say(self._evaluate(step, state))
                if update.stage != (stage := bisect.bisect_right(self._stage_ends, step)):
                    update = updates[stage]
                    state = enter_stage(update, state.best(train.ema))
                began, batches = time.monotonic(), [self._data.batch(i) for i in range(step, self._end(step))]
                state, rows = self._call(update, state, step, batches)
                seconds, groups = time.monotonic() - began, sum(int((batch.points >= 0).sum()) for batch in batches)
                speed = {"groups_per_second": round(groups / seconds, 1), "seconds": round(seconds / len(batches), 3)}
                for metrics in rows:
                    step += 1
                    self._check_finite(step, metrics)
                    self._log.write({"step": step} | speed | metrics)
                progress.update(step, _note(metrics, groups / seconds))
                if step % train.save_every == 0 or step == train.steps:
                    self._checkpoints.save(step, state)
                self._stop_if_asked(step, state)
        self._checkpoints.finish()
        if 0 < train.eval_every < train.steps:  # the last point of the curve, on the same answers as the others
            self._evaluate(train.steps, state)
        return state.best(train.ema)

    def _end(self, step: int) -> int:
        """The update after the last one of the call that begins with `step`.

        None lies beyond a checkpoint, an evaluation or the end of the stage, and their batches have one length.
        """
        train = self.config.train
        ends = [step + self._together, *self._stage_ends]
        ends += [(step // every + 1) * every for every in (train.save_every, train.eval_every) if every]
        updates = range(step, min(end for end in ends if end > step))
        length = self._data.length(step)
        return next((update for update in updates if self._data.length(update) != length), updates.stop)

    def _call(
        self, update: Update, state: TrainState, step: int, batches: list[Batch]
    ) -> tuple[TrainState, list[dict[str, float]]]:
        """The updates from `step` on in one call of the device: the new state, and the metrics of every one."""
        count, rates = len(batches), self._rates[step : step + len(batches)]
        if self._together == 1:
            state, metrics = train_step(update, self.base, state, put_batch(batches[0], self.mesh), rates[0])
        else:
            unused = self._together - count  # every call has as many batches, so that there is one program
            stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches, *[batches[-1]] * unused)
            rates = np.pad(rates, (0, unused))
            state, metrics = train_steps(update, self.base, state, stacked, rates, np.int32(count))
        values = {name: np.atleast_1d(value) for name, value in metrics.items()}
        return state, [{name: float(value[i]) for name, value in values.items()} for i in range(count)]

    def _check_finite(self, step: int, metrics: dict[str, float]) -> None:
        if math.isfinite(metrics["loss"] + metrics["gradient_norm"]):
            return
        self._checkpoints.finish()  # the newest may still be written
        latest, rate = self._checkpoints.latest, self.config.train.learning_rate
        kept = f"the last good checkpoint, of step {latest}, is kept" if latest else "no checkpoint was written"
        raise Diverged(
            f"loss or gradient is no longer finite at step {step}: {metrics}; --resume would end the same way: give "
            f"another --output and a train.learning-rate below {rate:g} ({kept})"
        )

    def _stop_if_asked(self, step: int, state: TrainState) -> None:
        """If the caller asks to stop, save the state after `step` updates and raise Stopped."""
        if self._stop():
            if self._checkpoints.latest < step:
                self._checkpoints.save(step, state)
            self._checkpoints.finish()
            raise Stopped(f"stopped after update {step} of {self.config.train.steps}; continue with --resume")

    def _evaluate(self, step: int, state: TrainState) -> str:
        """Evaluate during training, and print the result.

        The best adapter so far goes to best/, unless its base is trained too.
        """
        method, trainable, answers = self.config.method, state.best(self.config.train.ema), self._held_out[:_QUICK]
        accuracy = evaluate(method, trainable, self.base, answers, lambda evaluated: self._stop_if_asked(step, state))
        row, info = self._record(step, len(answers), accuracy)
        if row["tokens_per_step"] > self._best and not self.config.facts.replaces_base:
            self._best, new = row["tokens_per_step"], self.output / f".{BEST}.tmp"
            info |= {"step": step, "drafted_with": self.config.tree}
            self._save(new, method, as_stored(trainable, self.config.train.adapter_dtype), self.model, info)
            as_leader(functools.partial(swap_folder, new, self.output / BEST))
        return f"step {step}, held-out top-1 {row['top1']}, tokens per step {row['tokens_per_step']}"

    def _finish(self, trainable: PyTree) -> Adapter:
        """Evaluate the trained weights and write the adapter, with the new base if the method replaces it."""
        train, method, model = self.config.train, self.config.method, self.model
        if self.config.facts.replaces_base:
            final, model = finalized(method, trainable, model)
            method, trainable = final.method, final.trainable
            save_model(model, self.output / OWN_MODEL, "orbax")
        stored = as_stored(trainable, train.adapter_dtype)  # what is measured is what decodes
        final, own = finalized(method, stored, model)
        base = learning(own.base, final.method, self._frequent)
        answers = self._held_out[: train.eval_answers or None]
        with Progress("evaluation", len(answers), "answers") as progress:
            show = functools.partial(self._show, progress)
            accuracy = evaluate(final.method, final.trainable, base, answers, show)
        _, info = self._record(train.steps, len(answers), accuracy)
        if own is not self.model:
            info |= self._perplexities(own)
        if model is not self.model:
            info["base"] = f"{OWN_MODEL}, made from {info['base']}"
        adapter = self._save(self.output, method, stored, model, info)
        if final.draft_model:
            self._describe_draft_model(final.draft_model, final.trainable)
        return adapter

    def _describe_draft_model(self, draft_model: Base, weights: PyTree) -> None:
        """Make the adapter's folder one that `load_model` takes: the adapter and this run's base are another base."""
        config, model = draft_model.decoder.config, self.model
        fingerprint = params_fingerprint(config, draft_model.params)  # every process must take part
        whole, own = (flatten_dict(tree, sep="/") for tree in (draft_model.params, weights))
        shared = Shared(model.name, model.fingerprint, sorted({*whole} - {*own}), WEIGHTS, fingerprint)
        as_leader(functools.partial(write_sharing, self.output, config, shared))

    def _perplexities(self, own: Model) -> dict[str, Any]:
        """Perplexities of the held-out answers under the original base and under the tuned one."""
        perplexities = {}
        for name, base in (("base", self.model.base), ("own", own.base)):
            with Progress(f"perplexity, {name}", len(self._held_out), "answers") as progress:
                entropies = answer_entropies(base, self._held_out, functools.partial(self._show, progress))
            perplexities[name] = perplexity(entropies)
        return {"perplexity": perplexities, "answer_entropies": entropies.tolist()}

    def _show(self, progress: Progress, done: int) -> None:
        """Show the progress of the last evaluation, and raise Stopped if the caller asks to."""
        progress.update(done)
        if self._stop() and done < progress.total:
            raise Stopped("stopped in the last evaluation; continue with --resume")

    def _save(self, folder: Path, method: Method, stored: PyTree, model: Model, info: dict[str, Any]) -> Adapter:
        adapter = Adapter(method, stored, model.fingerprint, info, self._frequent)
        save_adapter(folder, adapter, self.config.train.adapter_dtype)
        return adapter

    def _record(self, step: int, answers: int, accuracy: Accuracy) -> tuple[dict[str, Any], dict[str, Any]]:
        """Log an evaluation after `step` updates. Returns the row, and the adapter's provenance, for adapter.json."""
        by_rank = np.maximum(accuracy.by_rank, 1e-6).tolist()  # a drafter that is never right has a tree too
        plan = method_plan(self.config.method, self.config.shapes, self.config.tree, by_rank)
        row = {"step": step, "held_out": answers, "tokens_per_step": round(replayed(plan, accuracy.ranks), 3)}
        row |= {f"top{k}": np.round(top(accuracy.by_rank, k), 4).tolist() for k in (1, 5, 10)}
        self._log.write(row)
        run, data = self._identity, self._data
        size = {
            "answers": len(data.given),
            "answer_tokens": sum(len(answer.answer_tokens) for answer in data.given),
            "answers_seen": min(len(data.usable), step * self.config.train.batch_size),
        }
        return row, {
            "base": run["model"],
            **({"weights": self.model.weights} if self.model.weights else {}),
            "tree": plan_to_json(plan),
            "tokens_per_step": row["tokens_per_step"],
            "draft_vocabulary": self.config.draft_vocabulary,
            "training": run["train"],
            "data": run["data"] | size,
            "accuracy": accuracy.by_rank.tolist(),
            "accuracy_positions": accuracy.positions,
            "calibration": {temperature_key(0): accuracy.calibration},
        }


def _note(metrics: dict[str, float], rate: float) -> str:
    """Figures of an update, for the progress bar."""
    right = "/".join(f"{value:.2f}" for name, value in metrics.items() if name.startswith("top1"))
    return f"loss {metrics['loss']:.3f}, top-1 {right}, {rate:.0f} groups/s"
