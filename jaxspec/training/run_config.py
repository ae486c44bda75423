"""Training runs: their settings, and the named runs in configs/, a file per paper."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import runpy
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from jaxspec.config import MeshConfig, ModelConfig
from jaxspec.decoding.method import Facts, Method, abstract_trainable
from jaxspec.drafters.drafter import method_plan
from jaxspec.drafters.source import check_drafts
from jaxspec.errors import UserError, check_at_least, differences, first_line, suggest
from jaxspec.files import shipped_folder
from jaxspec.parallel.sharding import check_mesh
from jaxspec.training.data import MOST_DRAFTS
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.training.step import pass_size
from jaxspec.trees.plan import TreePlan
from jaxspec.trees.spec import RANKS
from jaxspec.weights.load import load_shapes
from jaxspec.weights.templates import check_template

_POSITIVE = (
    *(f"train.{name}" for name in ("steps", "batch_size", "lengths", "insertions", "save_every", "keep")),
    *(f"data.{name}" for name in ("answers", "held_out", "batch_size", "max_answer_tokens", "held_out_tokens")),
)
_NOT_NEGATIVE = (
    *(f"train.{name}" for name in ("together", "microbatch", "eval_every", "eval_answers", "warmup", "clip", "seed")),
    "data.held_out_seed",
)
_SHOWN = 4  # differing settings in a message
_FREE = (  # settings that change nothing of the trained weights but their rounding
    *("tree", "draft_vocabulary", "dtype", "data.batch_size", "data.cache"),
    *(f"train.{name}" for name in ("adapter_dtype", "eval_answers", "eval_every", "keep", "lengths", "remat")),
    *(f"train.{name}" for name in ("save_every", "tensorboard", "together")),
    *(f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)),
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A named training run, as in configs/ and `jaxspec train --config`.

    Attributes:
      model: the base, as `load_model` takes it.
      method: the method to train, with its settings.
      tree: the draft tree that goes with the adapter, as `jaxspec.trees.parse_tree` takes it.
      draft_vocabulary: V', draft only this many tokens, those that the base uses most; 0 drafts all.
      data: training text.
      train: optimizer and schedule.
      mesh: devices that share the work.
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
        """The base's shapes, which follow from its name: a run can be inspected without the weights."""
        return load_shapes(self.model)

    @property
    def facts(self) -> Facts:
        """Of the method on the base."""
        return self.method.facts(self.shapes)

    @property
    def accuracy(self) -> list[list[float]]:
        """[M][K], accuracies that are all alike, in place of measured ones."""
        return [[1 / RANKS] * RANKS] * self.facts.distances

    def plan(self) -> TreePlan:
        """The draft tree as it is without measured accuracies: for its size alone."""
        return method_plan(self.method, self.shapes, self.tree, self.accuracy)


def load_papers() -> dict[str, dict[str, RunConfig]]:
    """All runs, by paper (the name of its file) and by the run's name; raises what `_read_runs` raises."""
    return {path.stem: _read_runs(path) for path in _files()}


def _files() -> list[Path]:
    return sorted(shipped_folder("configs").glob("*.py"))


def _read_runs(path: Path) -> dict[str, RunConfig]:
    """The runs of a file of configs/. Raises UserError for a file that cannot be read or has no `RUNS`."""
    try:
        return runpy.run_path(str(path))["RUNS"]
    except KeyError:
        raise UserError(f"{path}: no RUNS there; each file of configs/ holds a dict of that name") from None
    except (SyntaxError, ImportError, TypeError, NameError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def load_configs() -> dict[str, RunConfig]:
    """All runs by name. Raises UserError where two files have a run of the same name."""
    configs: dict[str, RunConfig] = {}
    for paper, runs in load_papers().items():
        if twice := [name for name in runs if name in configs]:
            raise UserError(f"configs/{paper}.py: another file has a run {twice[0]!r} too; rename one of them")
        configs |= runs
    return configs


def load_config(name: str) -> RunConfig:
    """The run of that name. Raises UserError, with a suggestion, for an unknown name, or one that two files have.

    A file that cannot be read is an error only where no other file has the run.
    """
    runs = []
    for path in _files():
        with contextlib.suppress(UserError):
            runs += [run for run_name, run in _read_runs(path).items() if run_name == name]
    if len(runs) == 1:
        return runs[0]
    configs = load_configs()
    raise UserError(f"unknown config {name!r}{suggest(name, configs)}; configs, by paper:\n{list_configs()}")


def list_configs() -> str:
    """The names of all runs, a line per paper."""
    return "\n".join(f"  {paper}: {', '.join(runs)}" for paper, runs in load_papers().items())


def split_config_name(args: list[str]) -> tuple[str, list[str]]:
    """Split `--config NAME` off a command line: the name, and the other arguments. Raises UserError without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    options, rest = parser.parse_known_args(args)
    if not options.config:
        raise UserError(f"say what to train with --config NAME; configs, by paper:\n{list_configs()}")
    return options.config, rest


def check_config(config: RunConfig) -> None:
    """Raise UserError for settings that cannot train."""
    if not config.facts.trained:
        raise UserError(f"method {config.method.name!r} has nothing to train")
    check_at_least(config, dict.fromkeys(_POSITIVE, 1) | dict.fromkeys(_NOT_NEGATIVE, 0))
    _check_data(config.data)
    _check_drafting(config)
    _check_training(config)
    _check_lengths(config)


def _check_data(data: DataConfig) -> None:
    weights = [source.weight for source in data.mixture]
    if weights and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise UserError(f"data.mixture: weights must not be negative, nor all 0, got {', '.join(map(str, weights))}")
    for name in filter(None, (data.template, *data.templates)):
        check_template(name)
    if len(set(data.templates)) < len(data.templates) or (data.templates and not data.chat):
        raise UserError(f"data.templates: each once, and none with --data.no-chat, got {', '.join(data.templates)}")
    if data.mixture and not data.prompts:
        for name in ("split", "column", "regenerate", "context_column", "answer_column"):
            if getattr(data, name) != getattr(DataConfig, name):
                option = name.replace("_", "-")
                raise UserError(f"data.{option} is of one source, and this is a mixture: --data.mixture.0.{option}")


def _check_drafting(config: RunConfig) -> None:
    learned = config.facts.learned_tokens
    for count in (config.draft_vocabulary, learned):
        check_drafts(count, min(config.shapes.vocab_size, MOST_DRAFTS))
    if learned and not 1 <= config.draft_vocabulary <= learned:
        raise UserError(
            f"draft-vocabulary must be 1 to {learned}, the tokens that {config.method.name} learns to draft "
            f"(method.vocabulary), got {config.draft_vocabulary}"
        )
    abstract_trainable(config.method, config.shapes)  # refuses settings that do not fit the base
    config.plan()


def _check_training(config: RunConfig) -> None:
    train, stages = config.train, len(config.facts.stages)
    copies, shards, _ = check_mesh(config.mesh)
    parts = copies * shards
    if train.batch_size % parts:
        raise UserError(f"mesh: data x fsdp = {parts} must divide train.batch-size {train.batch_size}")
    if train.batch_size % pass_size(train.batch_size, train.microbatch, parts):
        raise UserError(
            f"train.microbatch times the {parts} part(s) of the batch must divide train.batch-size "
            f"{train.batch_size}, got {train.microbatch}"
        )
    if not 0 <= train.ema < 1:
        raise UserError(f"train.ema must be at least 0 and below 1, got {train.ema}")
    if train.warmup // stages >= train.steps // stages:
        raise UserError(
            f"train.warmup {train.warmup} leaves nothing of train.steps {train.steps}, both divided over {stages} "
            "stage(s)"
        )
    if not train.learning_rate > 0:
        raise UserError(f"train.learning-rate must be positive, got {train.learning_rate}")
    if not 0 <= train.final_learning_rate <= 1:
        raise UserError(
            f"train.final-learning-rate is a share of train.learning-rate, between 0 and 1, got "
            f"{train.final_learning_rate}"
        )


def _check_lengths(config: RunConfig) -> None:
    data, length, positions = config.data, config.train.sequence_length, config.shapes.max_positions
    if length <= data.max_prompt_tokens:
        raise UserError(
            f"train.sequence-length {length} leaves no room for an answer after prompts of up to "
            f"data.max-prompt-tokens {data.max_prompt_tokens}"
        )
    if data.max_prompt_tokens + max(data.max_answer_tokens, data.held_out_tokens) > positions:
        raise UserError(f"prompts and answers of data.* do not fit the base's {positions} positions")


def describe(config: RunConfig) -> dict[str, Any]:
    """A run as plain values for JSON, without a mixture that `data.prompts` replaces."""
    run = dataclasses.asdict(config) | {"method": {"name": config.method.name} | dataclasses.asdict(config.method)}
    if config.data.prompts:
        run["data"]["mixture"] = ()
    return run


def _training_settings(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of `describe` that trained weights depend on, flat; the others may differ in a resumed run."""
    run = flatten_dict(run, sep=".")
    kept = {name: value for name, value in run.items() if name not in _FREE}
    # a gradient is a mean over the targets of a pass: keep the sequences of a pass on all devices, 0 for a whole batch
    batch_size = run["train.batch_size"]
    size = pass_size(batch_size, run["train.microbatch"], run["mesh.data"] * run["mesh.fsdp"])
    return kept | {"train.microbatch": size if size < batch_size else 0}


def check_same_run(held: dict[str, Any], run: dict[str, Any], folder: Path) -> None:
    """Raise UserError unless a run can resume the one that a folder holds.

    The settings that its weights depend on must match (see `_training_settings`), and the dtype of its base.
    """
    old, new = _training_settings(held), _training_settings(run)
    if old != new:
        words = differences(old, new)
        if len(words) > _SHOWN:
            words[_SHOWN:] = [f"and {len(words) - _SHOWN} more"]
        if old["train.microbatch"] != new["train.microbatch"]:
            words.append(
                "train.microbatch x mesh.data x mesh.fsdp, the sequences of a pass, must stay the same (0 means the "
                "whole batch)"
            )
        raise UserError(
            f"{folder} holds a run with other settings ({'; '.join(words)}); resume it with those, or give another "
            "--output"
        )
    if held["dtype"] != run["dtype"]:
        options = "--dtype " + held["dtype"].replace(" ", " --weights ")
        raise UserError(
            f"{folder} holds a run over a base in {held['dtype']}, not {run['dtype']}; resume it with {options} "
            "or give another --output"
        )
