"""One training run as a value: what to train, on what, how, over which devices."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from jaxspec.config import DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxspec.drafting.drafter import check_drafts, method_plan
from jaxspec.drafting.method import Method
from jaxspec.drafting.tree.plan import TreePlan
from jaxspec.drafting.tree.spec import RANKS
from jaxspec.errors import UserError, differences
from jaxspec.methods import METHODS
from jaxspec.training.data import MOST_DRAFTS
from jaxspec.training.step import pass_size
from jaxspec.weights.load import load_shapes

_EVEN = [[1 / RANKS] * RANKS]  # accuracies that make any tree
_FREE = {  # settings that change nothing of what is trained, or its rounding alone
    "data": ("batch_size", "cache"),
    "train": ("adapter_dtype", "eval_answers", "eval_every", "keep", "remat", "save_every", "tensorboard"),
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One named training run: what configs/ holds and `train.py --config` takes.

    Attributes:
      model: the base, as `load_model` takes it.
      method: what to train, with its settings.
      tree: the draft tree that goes with the adapter, as `jaxspec.drafting.tree.parse_tree` takes it.
      draft_vocabulary: V', draft only the tokens that the base itself uses most; 0 drafts them all.
      data: where the text comes from.
      train: how to train.
      mesh: over which devices.
    """

    model: str
    method: Method
    tree: str = "sparse:3"
    draft_vocabulary: int = 0
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()

    @functools.cached_property
    def shapes(self) -> ModelConfig:
        """The base's, which follow from its name: a run can be inspected without its weights."""
        return load_shapes(self.model)

    def plan(self) -> TreePlan:
        """The draft tree as it is without measured accuracies: for its size alone."""
        return method_plan(self.method, self.tree, _EVEN * self.method.max_distance)


def check_config(config: RunConfig) -> None:
    """Raise UserError for settings that cannot train."""
    t, d = config.train, config.data
    if not config.method.trainable:
        raise UserError(f"method {config.method.name!r} has nothing to train")
    positive = [f"train.{name}" for name in ("steps", "batch_size", "insertions", "save_every", "keep")]
    positive += [
        f"data.{name}" for name in ("answers", "held_out", "batch_size", "max_answer_tokens", "held_out_tokens")
    ]
    for name in positive:
        part, field = name.split(".")
        if getattr(getattr(config, part), field) < 1:
            raise UserError(f"{name.replace('_', '-')} must be at least 1, got {getattr(getattr(config, part), field)}")
    check_drafts(config.draft_vocabulary, min(config.shapes.vocab_size, MOST_DRAFTS))
    config.method.abstract(config.shapes)  # refuses settings that do not fit the base
    config.plan()
    parts = max(config.mesh.data * config.mesh.fsdp, 1)
    if t.batch_size % parts:
        raise UserError(f"mesh: data x fsdp = {parts} must divide train.batch-size {t.batch_size}")
    if t.microbatch < 0 or t.batch_size % pass_size(t, parts):
        raise UserError(
            f"train.microbatch times the {parts} part(s) of the batch must divide train.batch-size {t.batch_size}, got "
            f"{t.microbatch}"
        )
    if not 0 <= t.ema < 1:
        raise UserError(f"train.ema must be at least 0 and below 1, got {t.ema}")
    for name in ("eval_every", "eval_answers", "warmup", "clip", "seed"):
        if getattr(t, name) < 0:
            raise UserError(f"train.{name.replace('_', '-')} must not be negative, got {getattr(t, name)}")
    if d.held_out_seed < 0:
        raise UserError(f"data.held-out-seed must not be negative, got {d.held_out_seed}")
    stages = len(config.method.stages)
    shortest = t.steps // stages
    if t.warmup // stages >= shortest:
        raise UserError(
            f"train.warmup {t.warmup} leaves nothing of train.steps {t.steps}, both divided over {stages} stage(s)"
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


def describe(config: RunConfig) -> dict[str, Any]:
    """A run as plain values, for JSON."""
    return dataclasses.asdict(config) | {"method": {"name": config.method.name} | dataclasses.asdict(config.method)}


def training_settings(run: dict[str, Any]) -> dict[str, Any]:
    """Of what `describe` returns, what the trained weights depend on; the rest may differ when a run is resumed.

    A run of an older version had the defaults where it has no value.
    """
    kept = {name: value for name, value in run.items() if name not in ("tree", "draft_vocabulary", "mesh", "dtype")}
    method = METHODS.get(run["method"]["name"])
    kept["method"] = (json.loads(json.dumps(dataclasses.asdict(method()))) if method else {}) | run["method"]
    for part, defaults in (("data", DataConfig()), ("train", TrainConfig())):
        settings = dataclasses.asdict(defaults) | run[part]
        kept[part] = {name: value for name, value in settings.items() if name not in _FREE[part]}
    # gradients are means of a pass's targets: its size counts, of which the microbatch says a part; 0: the whole batch
    mesh, sizes = run.get("mesh", {}), {name: kept["train"][name] for name in ("batch_size", "microbatch")}
    together = pass_size(TrainConfig(**sizes), mesh.get("data", 1) * mesh.get("fsdp", 1))
    kept["train"]["microbatch"] = together if together < sizes["batch_size"] else 0
    return kept


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What `training_settings` differ in, in words."""
    old, new = (flatten_dict(settings, sep=".") for settings in (old, new))
    words = differences(old, new)
    if old["train.microbatch"] != new["train.microbatch"]:
        words.append("the sequences of a pass, train.microbatch x mesh.data x mesh.fsdp, must be as many, 0 for all")
    return "; ".join(words)


def check_same_run(held: dict[str, Any], run: dict[str, Any], folder: Path) -> None:
    """Raise UserError unless a run can go on as another: with what its weights depend on, over a base of its precision.

    Args:
      held: what the folder says of its run; one of an older version does not say the precision.
      run: the run that wants to go on there.
      folder: to be named.
    """
    old, new = training_settings(held), training_settings(run)
    if old != new:
        raise UserError(f"{folder} holds a run with other settings ({_differences(old, new)}); give another --output")
    dtype = held.get("dtype", run["dtype"])
    if dtype != run["dtype"]:
        raise UserError(
            f"{folder} holds a run over a base in {dtype}, not {run['dtype']}; continue it with --dtype {dtype} or "
            "give another --output"
        )
