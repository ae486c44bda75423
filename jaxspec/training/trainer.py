"""Training an adapter: the base is an argument, gradients reach the method's trainable pytree alone."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxspec.config import DataConfig, ModelConfig, TrainConfig
from jaxspec.errors import UserError
from jaxspec.files import write_atomically
from jaxspec.methods.adapter import OWN_MODEL, Adapter, check_drafts, method_plan, save_adapter, settle
from jaxspec.methods.base import Batch, Method, PyTree
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder
from jaxspec.model.hf import read_json
from jaxspec.model.load import Model, save_model
from jaxspec.progress import Progress
from jaxspec.training.batches import TrainingData
from jaxspec.training.data import MOST_DRAFTS, Answer, cache_file, frequent_tokens, prepare_answers
from jaxspec.training.evaluate import Accuracy, evaluate, perplexity
from jaxspec.training.examples import select_prompts
from jaxspec.training.plot import plot_training
from jaxspec.tree.plan import plan_to_json
from jaxspec.tree.spec import RANKS

_EVEN = [[1 / RANKS] * RANKS]  # accuracies that make any tree
_QUICK = 16  # held-out answers of an evaluation on the way


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One named training run: what configs/ holds and `train.py --config` takes.

    Attributes:
      model: the base, as `load_model` takes it.
      shapes: the base's shapes, so that the run can be inspected without its weights.
      method: what to train, with its settings.
      tree: the draft tree that goes with the adapter, as `jaxspec.tree.parse_tree` takes it.
      draft_vocabulary: V', draft only the tokens that the base itself uses most; 0 drafts them all.
      data: where the text comes from.
      train: how to train.
    """

    model: str
    shapes: ModelConfig
    method: Method
    tree: str = "sparse:3"
    draft_vocabulary: int = 0
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()


def check_config(config: RunConfig) -> None:
    """Raise UserError for settings that cannot train."""
    t, d = config.train, config.data
    if not config.method.trainable:
        raise UserError(f"method {config.method.name!r} has nothing to train")
    positive = [f"train.{name}" for name in ("steps", "batch_size", "insertions", "save_every")]
    positive += [
        f"data.{name}" for name in ("answers", "held_out", "batch_size", "max_answer_tokens", "held_out_tokens")
    ]
    for name in positive:
        part, field = name.split(".")
        if getattr(getattr(config, part), field) < 1:
            raise UserError(f"{name.replace('_', '-')} must be at least 1, got {getattr(getattr(config, part), field)}")
    check_drafts(config.draft_vocabulary, min(config.shapes.vocab_size, MOST_DRAFTS))
    config.method.abstract(config.shapes)  # refuses settings that do not fit the base
    method_plan(config.method, config.tree, _EVEN * config.method.max_distance)
    if t.microbatch < 0 or (t.microbatch and t.batch_size % t.microbatch):
        raise UserError(f"train.microbatch must divide train.batch-size {t.batch_size}, got {t.microbatch}")
    if min(t.eval_every, t.eval_answers, t.warmup) < 0:
        raise UserError("train.eval-every, train.eval-answers and train.warmup must not be negative")
    shortest = t.steps // len(config.method.stages)
    if t.warmup >= shortest:
        raise UserError(
            f"train.warmup {t.warmup} leaves nothing of a stage of {shortest} updates: train.steps are divided over "
            f"{len(config.method.stages)} stage(s)"
        )
    if not t.learning_rate > 0:
        raise UserError(f"train.learning-rate must be positive, got {t.learning_rate}")
    if t.sequence_length <= d.max_prompt_tokens:
        raise UserError(
            f"train.sequence-length {t.sequence_length} leaves no room for an answer behind prompts of up to "
            f"data.max-prompt-tokens {d.max_prompt_tokens}"
        )
    if d.max_prompt_tokens + max(d.max_answer_tokens, d.held_out_tokens) > config.shapes.max_positions:
        raise UserError(f"prompts and answers of data.* do not fit the base's {config.shapes.max_positions} positions")


def stage_ends(method: Method, steps: int) -> list[int]:
    """The update after the last one of every stage."""
    count = len(method.stages)
    return [steps * number // count for number in range(1, count + 1)]


def optimizer(train: TrainConfig, steps: int, factor: float = 1.0) -> optax.GradientTransformation:
    """AdamW on a cosine schedule of `steps` updates, `factor` times the configured learning rate."""
    peak = factor * train.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0 if train.warmup else peak, peak, train.warmup, steps)
    clip = optax.clip_by_global_norm(train.clip) if train.clip else optax.identity()
    return optax.chain(clip, optax.adamw(schedule, train.beta1, train.beta2, weight_decay=train.weight_decay))


def stage_optimizer(method: Method, train: TrainConfig, stage: int) -> optax.GradientTransformation:
    """The optimizer of one stage."""
    ends = [0, *stage_ends(method, train.steps)]
    return optimizer(train, ends[stage + 1] - ends[stage], method.stages[stage].learning_rate)


def moving(method: Method, trainable: PyTree, stage: int) -> PyTree:
    """The part of the trainable pytree that a stage trains."""
    names = method.stages[stage].trains
    return trainable if names is None else {name: trainable[name] for name in names}


@functools.partial(jax.jit, static_argnames=("method", "train", "stage"), donate_argnames=("trainable", "state"))
def train_step(
    method: Method, train: TrainConfig, stage: int, base: Base, trainable: PyTree, state: PyTree, batch: Batch
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """One update. Returns the new trainable, the new optimizer state, and metrics with `loss` and `gradient_norm`."""
    size = train.microbatch or train.batch_size
    parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
    trained = moving(method, trainable, stage)

    def loss(trained: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        everything = trainable | trained
        return method.loss(everything, method.fit_base(everything, base), batch, stage)

    def part(batch: Batch) -> tuple[PyTree, dict[str, jax.Array]]:
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained, batch)
        return gradients, metrics | {"loss": value}

    def add(sums: PyTree, batch: Batch) -> tuple[PyTree, None]:  # one gradient is held, however many are added
        return jax.tree.map(jnp.add, sums, part(batch)), None

    count = train.batch_size // size
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, first))
    sums, _ = jax.lax.scan(add, zeros, parts)
    gradients, metrics = jax.tree.map(lambda x: x / count, sums)
    updates, state = stage_optimizer(method, train, stage).update(gradients, state, trained)
    metrics |= {"gradient_norm": optax.tree.norm(gradients)}
    return trainable | optax.apply_updates(trained, updates), state, metrics


class Trainer:
    """One run in one folder: log.jsonl, checkpoints/, and at the end the adapter and training.png.

    A method that replaces its base leaves the new one in model/.

    Args:
      config: what to train and how.
      model: the base.
      output: the folder.
      resume: continue the run that the folder holds.

    Raises:
      UserError: settings that cannot train, a base of other shapes, or a folder that holds another run.
    """

    def __init__(self, config: RunConfig, model: Model, output: Path, resume: bool):
        check_config(config)
        if model.config != config.shapes:
            raise UserError(
                f"{model.name!r} has other shapes than the config: {model.config} instead of {config.shapes}"
            )
        self.config, self.model, self.output = config, model, output
        self._prompts = select_prompts(model, config.data)  # before anything is written
        self.base = Base(model.params, Decoder(model.config, remat=config.train.remat))
        self._identity = self._describe()
        self._claim(resume)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._checkpoints = ocp.CheckpointManager((output / "checkpoints").resolve(), options=options)

    def _claim(self, resume: bool) -> None:
        """Make sure that the folder is new, or holds this very run."""
        file = self.output / "run.json"
        if file.exists() and not resume:
            raise UserError(f"{self.output} holds a run already; continue it with --resume or give another --output")
        if file.exists() and training_settings(read_json(file)) != training_settings(self._identity):
            raise UserError(f"{self.output} holds a run with other settings ({file}); give another --output")
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(self._identity, indent=1).encode())
        except OSError as error:
            raise UserError(f"{self.output}: cannot be written ({error.strerror})") from None

    def run(self) -> Adapter:
        """Make or read the answers, train, evaluate, write the adapter."""
        with Progress("answers", len(self._prompts), "answers") as progress:
            began = time.monotonic()

            def report(done: int, tokens: int) -> None:
                if not tokens:  # these were in the cache
                    progress.skip(done)
                progress.update(done, f"{tokens / (time.monotonic() - began):.0f} tokens/s")

            held_out, answers = prepare_answers(self.model, self.config.data, self._prompts, report)
        data = TrainingData(answers, self.config.train)
        if data.left_out:
            print(f"{data.left_out} answers are too short to train on and are left out", file=sys.stderr)
        adapter, model = self._result(self._train(data, held_out))
        decoding, own = settle(adapter, model)  # what is measured is what decodes
        held_out = held_out[: self.config.train.eval_answers or None]
        with Progress("evaluation", len(held_out), "answers") as progress:
            accuracy = evaluate(decoding.method, decoding.trainable, own.base, held_out, progress.update)
        self._log({"step": self.config.train.steps, "held_out": len(held_out)} | _accuracies(accuracy))
        info = self._provenance(accuracy, answers)
        if own is not self.model:
            before, after = (perplexity(base, held_out) for base in (self.model.base, own.base))
            info["perplexity"] = {"base": before, "own": after}
        if model is not self.model:
            info["base"] = f"{OWN_MODEL}, made from {info['base']}"
        frequent = frequent_tokens(answers, model.config.vocab_size)
        adapter = dataclasses.replace(adapter, info=info, frequent_tokens=frequent)
        save_adapter(self.output, adapter, self.config.train.adapter_dtype)
        plot_training(self.output / "log.jsonl", self.output / "training.png")
        return adapter

    def _result(self, trainable: PyTree) -> tuple[Adapter, Model]:
        """The adapter and the base it is for, which is written beside it where the training has made a new one."""
        adapter, model = Adapter(self.config.method, trainable, self.model.fingerprint, {}), self.model
        if self.config.method.replaces_base:
            adapter, model = settle(adapter, model)
            save_model(model, self.output / OWN_MODEL, "orbax")
        return dataclasses.replace(adapter, trainable=self._as_stored(adapter.trainable)), model

    def _as_stored(self, trainable: PyTree) -> PyTree:
        """The trainable pytree as the adapter's file will hold it, so that what is measured is what ships."""
        dtype = self.config.train.adapter_dtype
        trainable = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), trainable)
        if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(trainable)):
            raise UserError(f"some weights do not fit {dtype}; --resume with --train.adapter-dtype float32")
        return trainable

    def _train(self, data: TrainingData, held_out: list[Answer]) -> PyTree:
        train, method = self.config.train, self.config.method
        ends = stage_ends(method, train.steps)
        first = self._checkpoints.latest_step() or 0
        stage = bisect.bisect_right(ends, max(first - 1, 0))  # of the update before, whose state was saved
        trainable, state = self._begin(first, stage)
        began, groups = time.monotonic(), 0
        with Progress("training", train.steps, "steps", done=first) as progress:
            for step in range(first, train.steps):
                batch = data.batch(step)
                if step == ends[stage]:
                    stage = bisect.bisect_right(ends, step)
                    state = stage_optimizer(method, train, stage).init(moving(method, trainable, stage))
                trainable, state, metrics = train_step(method, train, stage, self.base, trainable, state, batch)
                metrics = {name: float(value) for name, value in metrics.items()}
                if not math.isfinite(metrics["loss"] + metrics["gradient_norm"]):
                    raise UserError(
                        f"loss or gradient is no longer finite at step {step + 1}: {metrics}; lower "
                        f"train.learning-rate and start again, or --resume from step {self._checkpoints.latest_step()}"
                    )
                groups += int((batch.points >= 0).sum())
                rate = groups / (time.monotonic() - began)
                right = "/".join(f"{value:.2f}" for name, value in metrics.items() if name.startswith("top1"))
                progress.update(step + 1, f"loss {metrics['loss']:.3f}, top-1 {right}, {rate:.0f} groups/s")
                self._log({"step": step + 1, "groups_per_second": round(rate, 1)} | metrics)
                if (step + 1) % train.save_every == 0 or step + 1 == train.steps:
                    self._save(step + 1, trainable, state)
                if train.eval_every and (step + 1) % train.eval_every == 0 and step + 1 < train.steps:
                    some = held_out[:_QUICK]
                    accuracy = evaluate(method, trainable, self.base, some)
                    self._log({"step": step + 1, "held_out": len(some)} | _accuracies(accuracy))
                    progress.message(f"step {step + 1}, held-out top-1 {np.round(accuracy.top(1), 3).tolist()}")
        self._checkpoints.wait_until_finished()
        return trainable

    def _save(self, step: int, trainable: PyTree, state: PyTree) -> None:
        tree = {"trainable": trainable, "optimizer": state}
        self._checkpoints.save(step, args=ocp.args.StandardSave(tree))

    def _begin(self, step: int, stage: int) -> tuple[PyTree, PyTree]:
        """Trainable pytree and optimizer state, fresh before the first update, else of the checkpoint after `step`."""
        method, train = self.config.method, self.config.train

        def fresh() -> tuple[PyTree, PyTree]:
            # a copy: what starts as a part of the base must not be the base's own memory, which steps would reuse
            trainable = jax.tree.map(jnp.copy, method.init(jax.random.key(train.seed), self.base))
            return trainable, stage_optimizer(method, train, stage).init(moving(method, trainable, stage))

        if not step:
            return fresh()
        wanted = dict(zip(("trainable", "optimizer"), jax.eval_shape(fresh), strict=True))
        tree = self._checkpoints.restore(step, args=ocp.args.StandardRestore(wanted))
        tree = jax.tree.map(jnp.asarray, tree)
        return tree["trainable"], tree["optimizer"]

    def _log(self, row: dict[str, Any]) -> None:
        with (self.output / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _describe(self) -> dict[str, Any]:
        """What makes this run this run: settings, base, and the content of its prompts; no paths of this machine."""
        run, data = describe(self.config), self.config.data
        limits = (data.held_out_tokens, data.max_answer_tokens)
        keys = [cache_file(self.model, data, limit).stem for limit in limits]
        del run["data"]["cache"]
        for part, key in ((run, "model"), (run, "tree"), (run["data"], "prompts")):
            part[key] = Path(part[key]).name if Path(part[key]).exists() else part[key]
        return json.loads(json.dumps(run | {"fingerprint": self.model.fingerprint, "answers": keys}))

    def _provenance(self, accuracy: Accuracy, answers: list[Answer]) -> dict[str, Any]:
        run = self._describe()
        known = np.maximum(accuracy.by_rank, 1e-6).tolist()  # a drafter that is never right has a tree too
        tokens = sum(len(answer.answer_tokens) for answer in answers)
        return {
            "base": run["model"],
            "tree": plan_to_json(method_plan(self.config.method, self.config.tree, known)),
            "draft_vocabulary": self.config.draft_vocabulary,
            "training": run["train"],
            "data": run["data"] | {"answers": len(answers), "answer_tokens": tokens},
            "accuracy": accuracy.by_rank.tolist(),
            "accuracy_positions": accuracy.positions,
        }


def describe(config: RunConfig) -> dict[str, Any]:
    """A run as plain values, for JSON."""
    return dataclasses.asdict(config) | {"method": {"name": config.method.name} | dataclasses.asdict(config.method)}


def training_settings(run: dict[str, Any]) -> dict[str, Any]:
    """Of what `describe` returns, what the trained weights depend on; the rest may differ when a run is resumed.

    A run of an older version had the defaults where it has no value.
    """
    train = dataclasses.asdict(TrainConfig()) | run["train"]
    data = {name: value for name, value in dataclasses.asdict(DataConfig()).items() if name != "cache"} | run["data"]
    kept = {name: value for name, value in run.items() if name not in ("tree", "draft_vocabulary")}
    return kept | {"data": data, "train": {name: value for name, value in train.items() if name != "adapter_dtype"}}


def _accuracies(accuracy: Accuracy) -> dict[str, list[float]]:
    return {f"top{k}": np.round(accuracy.top(k), 4).tolist() for k in (1, 5, 10)}
