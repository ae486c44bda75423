"""A run in a folder: answers made or read, updates, evaluations on the way, checkpoints, and an adapter at the end."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.adapter import OWN_MODEL, Adapter, save_adapter
from jaxspec.drafting.draft import PyTree
from jaxspec.drafting.drafter import method_plan, tuned
from jaxspec.drafting.tree.plan import plan_to_json
from jaxspec.errors import UserError
from jaxspec.files import alone_in, known_as, read_json, restore_folder, swap_folder, write_atomically
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.parallel.processes import as_leader, check_alike, is_leader
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_batch
from jaxspec.progress import Progress
from jaxspec.training.batches import ORDER, TrainingData
from jaxspec.training.checkpoints import Checkpoints, begin
from jaxspec.training.data import Answer, cache_file, frequent_tokens, prepare_answers
from jaxspec.training.evaluate import Accuracy, answer_entropies, evaluate, perplexity
from jaxspec.training.examples import select_prompts
from jaxspec.training.logs import RunLog, check_tensorboard
from jaxspec.training.plot import plot_training
from jaxspec.training.run_config import RunConfig, check_config, check_same_run, describe
from jaxspec.training.step import TrainState, enter_stage, stage_ends, train_step
from jaxspec.weights.load import Model, save_model

_BEST = "best"
_LEFT = ("adapter.json", "checkpoints", "log.jsonl")  # by which a folder is somebody's
_QUICK = 16  # held-out answers of an evaluation on the way


class Stopped(Exception):
    """A run was asked to stop, and its folder holds all that it had done."""


def check_output(output: Path, there: bool, resume: bool) -> None:
    """Raise UserError for a folder where this run cannot begin or go on; `there`: whether it holds a run.json."""
    if there and not resume:
        raise UserError(f"{output} holds a run already; continue it with --resume or give another --output")
    if not there and any((output / name).exists() for name in _LEFT):
        raise UserError(f"{output} holds parts of a run without its run.json; give another --output")


class Trainer:
    """One run in one folder: log.jsonl, checkpoints/, best/, and at the end the adapter and training.png.

    A method that replaces its base leaves the new one in model/. With several processes the folder is one that all of
    them see, and the first one writes.

    Args:
      config: what to train and how.
      model: the base, on the mesh that the run is for.
      output: the folder.
      resume: continue the run that the folder holds.
      stop: asked after every update, and on the way through evaluations, whether to stop there.

    Raises:
      UserError: settings that cannot train, a base of other shapes, or a folder that holds another run or
        that another process is writing.
    """

    def __init__(
        self, config: RunConfig, model: Model, output: Path, resume: bool, stop: Callable[[], bool] = lambda: False
    ):
        check_config(config)
        if model.config != config.shapes:
            raise UserError(
                f"{model.name!r} has other shapes than the config: {model.config} instead of {config.shapes}"
            )
        self.config, self.model, self.output, self._stop = config, model, output, stop
        self._prompts = select_prompts(model, config.data)  # before anything is written
        self.base = Base(model.params, Decoder(model.config, remat=config.train.remat))
        self.mesh = mesh_of(model.params)
        self._whole = config.mesh.zero == 2
        self._identity = self._describe()
        if config.train.tensorboard:
            check_tensorboard()
        self._alone = contextlib.ExitStack()  # until the run ends
        try:
            self._claim(resume)
            self._open()
        except BaseException:
            self._alone.close()
            raise

    def _open(self) -> None:
        """What the folder holds of this run so far."""
        self._checkpoints = Checkpoints(self.output / "checkpoints", self.config.train.keep)
        best = self.output / _BEST / "adapter.json"
        self._best = read_json(best)["score"] if best.exists() else -1.0
        check_alike(json.dumps([self._best, self._checkpoints.latest]).encode(), f"what {self.output} holds")
        self._log = RunLog(self.output, self.config.train.tensorboard, self._checkpoints.latest)

    def _claim(self, resume: bool) -> None:
        """Make sure that the folder is new, or holds this very run."""
        file = self.output / "run.json"
        there = file.exists()  # asked once: the first process writes it as soon as all of them have asked
        check_alike(json.dumps([self._identity, there]).encode(), "the run")
        check_output(self.output, there, resume)
        if there:
            check_same_run(read_json(file), self._identity, self.output)

        def claim() -> None:
            try:
                self.output.mkdir(parents=True, exist_ok=True)
                self._alone.enter_context(alone_in(self.output))
                for name in (_BEST, OWN_MODEL):
                    restore_folder(self.output / name)
                write_atomically(file, json.dumps(self._identity, indent=1).encode())
            except OSError as error:
                raise UserError(f"{self.output}: cannot be written ({error.strerror})") from None

        as_leader(claim)
        check_alike(str(file.exists()).encode(), f"what {self.output} holds")

    def run(self) -> Adapter:
        """Make or read the answers, train, evaluate, write the adapter.

        Raises:
          Stopped: the caller asked to stop; `resume` goes on from there.
        """
        try:
            with in_mesh(self.mesh):
                held_out, answers = self._answers()
                data = TrainingData(answers, self.config.train)
                if data.left_out:
                    print(f"{data.left_out} answers are too short to train on and are left out", file=sys.stderr)
                self._frequent = frequent_tokens(answers, self.model.config.vocab_size)
                adapter = self._finish(self._train(data, held_out), held_out, answers, len(answers) - data.left_out)
        finally:
            self._log.close()
            self._alone.close()
        if is_leader():
            plot_training(self.output / "log.jsonl", self.output / "training.png")
        return adapter

    def _answers(self) -> tuple[list[Answer], list[Answer]]:
        """Held-out answers and training answers, in the cache or made now."""
        with Progress("answers", len(self._prompts), "answers") as progress:
            began = time.monotonic()

            def report(done: int, tokens: int) -> None:
                if not tokens:  # these were in the cache
                    progress.skip(done)
                progress.update(done, f"{tokens / (time.monotonic() - began):.0f} tokens/s")

            return prepare_answers(self.model, self.config.data, self._prompts, report)

    def _train(self, data: TrainingData, held_out: list[Answer]) -> PyTree:
        train, method = self.config.train, self.config.method
        ends, first = stage_ends(method, train.steps), self._checkpoints.latest
        stage = bisect.bisect_right(ends, max(first - 1, 0))  # of the update before, whose state was saved
        state = begin(self._checkpoints, method, train, stage, self.base, self.mesh, self._whole)
        began, groups = time.monotonic(), 0
        with Progress("training", train.steps, "steps", done=first) as progress:
            for step in range(first, train.steps):
                if step and train.eval_every and step % train.eval_every == 0:  # again where a run goes on from here
                    top = self._evaluate(step, state, held_out[:_QUICK])
                    progress.message(f"step {step}, held-out top-1 {np.round(top, 3).tolist()}")
                batch = data.batch(step)
                groups += int((batch.points >= 0).sum())
                if step == ends[stage]:
                    stage = bisect.bisect_right(ends, step)
                    state = enter_stage(method, train, stage, state.best(train))
                state, metrics = train_step(
                    method, train, stage, self.base, state, put_batch(batch, self.mesh), whole=self._whole
                )
                metrics = {name: float(value) for name, value in metrics.items()}
                self._check_finite(step, metrics)
                rate = groups / (time.monotonic() - began)
                right = "/".join(f"{value:.2f}" for name, value in metrics.items() if name.startswith("top1"))
                progress.update(step + 1, f"loss {metrics['loss']:.3f}, top-1 {right}, {rate:.0f} groups/s")
                self._log.write({"step": step + 1, "groups_per_second": round(rate, 1)} | metrics)
                last = step + 1 == train.steps
                if (step + 1) % train.save_every == 0 or last:
                    self._checkpoints.save(step + 1, state)
                if self._stop() and not last:
                    self._end_early(step + 1, state)
        self._checkpoints.finish()
        if 0 < train.eval_every < train.steps:  # the last point of the curve, on the same answers as the others
            self._evaluate(train.steps, state, held_out[:_QUICK])
        return state.best(self.config.train)

    def _end_early(self, step: int, state: TrainState) -> NoReturn:
        """Save what so many updates have made, and stop there."""
        if self._checkpoints.latest < step:
            self._checkpoints.save(step, state)
        self._checkpoints.finish()
        raise Stopped(f"stopped after update {step} of {self.config.train.steps}; --resume goes on from there")

    def _check_finite(self, step: int, metrics: dict[str, float]) -> None:
        if math.isfinite(metrics["loss"] + metrics["gradient_norm"]):
            return
        self._checkpoints.finish()  # the newest may still be on its way
        kept, rate = self._checkpoints.latest, self.config.train.learning_rate
        raise UserError(
            f"loss or gradient is no longer finite at step {step + 1}: {metrics}; --resume would come to the same: "
            f"give another --output and a train.learning-rate below {rate:g} "
            f"({f'the last good checkpoint, of step {kept}, is kept' if kept else 'no checkpoint was written'})"
        )

    def _evaluate(self, step: int, state: TrainState, answers: list[Answer]) -> np.ndarray:
        """Accuracies on the way; the best adapter so far goes to best/, but for whole bases. Returns top-1 [M]."""
        method, dtype = self.config.method, self.config.train.adapter_dtype
        trainable = state.best(self.config.train)

        def report(done: int) -> None:
            if self._stop():
                self._end_early(step, state)

        accuracy = evaluate(method, trainable, self.base, answers, report)
        self._log.write({"step": step, "held_out": len(answers)} | _rounded(accuracy))
        score = float(accuracy.top(1).mean())
        if score > self._best and not method.replaces_base:
            self._best, new = score, self.output / ".best.tmp"
            info = self._provenance(accuracy, [], 0) | {"score": score, "step": step}
            trainable = self._as_stored(trainable)
            save_adapter(new, Adapter(method, trainable, self.model.fingerprint, info, self._frequent), dtype)
            as_leader(lambda: swap_folder(new, self.output / _BEST))
        return accuracy.top(1)

    def _finish(self, trainable: PyTree, held_out: list[Answer], answers: list[Answer], fit: int) -> Adapter:
        """Evaluate what the training came to, and write it; so many of the answers were fit to train on."""
        adapter, model = self._result(trainable)
        method, weights, own = tuned(adapter.method, adapter.trainable, model)  # what is measured is what decodes
        probed = held_out[: self.config.train.eval_answers or None]

        def report(done: int) -> None:
            progress.update(done)
            if self._stop() and done < progress.total:
                raise Stopped("stopped in the last evaluation; --resume does it again")

        with Progress("evaluation", len(probed), "answers") as progress:
            accuracy = evaluate(method, weights, own.base, probed, report)
        self._log.write({"step": self.config.train.steps, "held_out": len(probed)} | _rounded(accuracy))
        info = self._provenance(accuracy, answers, fit)
        if own is not self.model:
            for name, base in (("base", self.model.base), ("own", own.base)):
                with Progress(f"perplexity, {name}", len(held_out), "answers") as progress:
                    entropies = answer_entropies(base, held_out, report)
                info.setdefault("perplexity", {})[name] = perplexity(entropies)
            info["answer_entropies"] = entropies.tolist()
        if model is not self.model:
            info["base"] = f"{OWN_MODEL}, made from {info['base']}"
        adapter = dataclasses.replace(adapter, info=info, frequent_tokens=self._frequent)
        save_adapter(self.output, adapter, self.config.train.adapter_dtype)
        return adapter

    def _result(self, trainable: PyTree) -> tuple[Adapter, Model]:
        """The adapter and the base it is for, which is written beside it where the training has made a new one."""
        method, model = self.config.method, self.model
        if method.replaces_base:
            method, trainable, model = tuned(method, trainable, model)
            save_model(model, self.output / OWN_MODEL, "orbax")
        return Adapter(method, self._as_stored(trainable), model.fingerprint, {}), model

    def _as_stored(self, trainable: PyTree) -> PyTree:
        """The trainable pytree as the adapter's file will hold it, so that what is measured is what ships."""
        dtype = self.config.train.adapter_dtype
        trainable = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), trainable)
        if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(trainable)):
            raise UserError(f"some weights do not fit {dtype}; --resume with --train.adapter-dtype float32")
        return trainable

    def _describe(self) -> dict[str, Any]:
        """What makes this run this run: settings, base, and the content of its prompts; no paths of this machine."""
        run, data = describe(self.config), self.config.data
        limits = (data.held_out_tokens, data.max_answer_tokens)
        keys = [cache_file(self.model, data, limit).stem for limit in limits]
        del run["data"]["cache"]
        for part, key in ((run, "model"), (run, "tree"), (run["data"], "prompts")):
            part[key] = known_as(part[key])
        identity = {
            "fingerprint": self.model.fingerprint,
            "answers": keys,
            "order": ORDER,
            "dtype": str(self.base.dtype),
        }
        return json.loads(json.dumps(run | identity))

    def _provenance(self, accuracy: Accuracy, answers: list[Answer], fit: int) -> dict[str, Any]:
        run = self._describe()
        known = np.maximum(accuracy.by_rank, 1e-6).tolist()  # a drafter that is never right has a tree too
        tokens = sum(len(answer.answer_tokens) for answer in answers)
        seen = min(fit, self.config.train.steps * self.config.train.batch_size)
        return {
            "base": run["model"],
            "tree": plan_to_json(method_plan(self.config.method, self.config.tree, known)),
            "draft_vocabulary": self.config.draft_vocabulary,
            "training": run["train"],
            "data": run["data"] | {"answers": len(answers), "answer_tokens": tokens, "answers_seen": seen},
            "accuracy": accuracy.by_rank.tolist(),
            "accuracy_positions": accuracy.positions,
        }


def _rounded(accuracy: Accuracy) -> dict[str, list[float]]:
    return {f"top{k}": np.round(accuracy.top(k), 4).tolist() for k in (1, 5, 10)}
