"""Measure how well an adapter drafts the base's own answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

from jaxspec.cli.options import DrafterOptions, parse
from jaxspec.cli.program import enable_compilation_cache, mention_compilation
from jaxspec.drafters import DrafterSpec, open_adapter
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import display_name
from jaxspec.progress import Progress
from jaxspec.training.evaluate import top
from jaxspec.training.measure import Measured, measure, own_answers
from jaxspec.training.settings import DataConfig
from jaxspec.weights.model import Model


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(DrafterOptions):
    """Measure an adapter, whoever trained it: accuracies per distance, and tokens per step by replay.

    The base answers prompts, and the adapter's candidates are compared with its answers at every position.

    Attributes:
      prompts: a JSONL file or a data set, as for `jaxspec train`. Default the prompts that `jaxspec train` holds out of
        those that ship.
      column: field of the prompts.
      answers: how many prompts.
      max_new_tokens: of an answer.
      tree: draft tree of the replay, such as chain:3 or sparse:16; default the adapter's own.
      json: print the figures as JSON.
    """

    default_method: ClassVar[str] = "eagle"
    prompts: str = ""
    column: str = "prompt"
    answers: int = 20
    max_new_tokens: int = 128
    tree: str = ""
    json: bool = False


def main(args: list[str]) -> None:
    """Parse, load, answer, measure, print."""
    options = parse(EvaluateOptions, args)
    check_at_least(options, {"answers": 1, "max_new_tokens": 3})
    spec = options.drafter()
    if len(spec.methods) > 1 or spec.draft is not None or spec.draft_adapter is not None:
        raise UserError("evaluate measures the adapter of one method; jaxspec bench measures unions and draft models")
    enable_compilation_cache()
    mention_compilation()
    model = options.load_model()
    adapter = open_adapter(spec.methods[0].method.name, model, spec.adapter)
    answers = own_answers(
        model, evaluation_data(options.answers, options.max_new_tokens, options.prompts, options.column)
    )
    with Progress("evaluation", len(answers), "answers") as progress:
        found = measure(adapter, model, answers, options.tree or spec.tree or "", progress.update)
    if options.json:
        print(json.dumps(_figures(spec, adapter.method.name, model, len(answers), found)))
    else:
        print("\n".join(accuracy_lines(found)))


def evaluation_data(answers: int, tokens: int, prompts: str = "", column: str = "prompt") -> DataConfig:
    """The settings of so many held-out answers of at most so many tokens."""
    return DataConfig(prompts, column=column, answers=1, held_out=answers, held_out_tokens=tokens)


def accuracy_lines(found: Measured) -> list[str]:
    """Accuracies per distance and tokens per step in words."""
    tops = {k: top(found.accuracy.by_rank, k) for k in (1, 5, 10)}
    lines = [
        f"distance {d + 1}: " + "  ".join(f"top-{k} {values[d]:.3f}" for k, values in tops.items())
        for d in range(len(found.accuracy.by_rank))
    ]
    return [*lines, f"tokens per step: {found.tokens_per_step:.3f}, by replay of {found.accuracy.positions} positions"]


def _figures(spec: DrafterSpec, method: str, model: Model, answers: int, found: Measured) -> dict[str, Any]:
    adapter = display_name(str(Path(spec.adapter))) if spec.adapter else ""
    named = {"method": method, "adapter": adapter, "base": display_name(model.name), "answers": answers}
    return named | {name: value for name, value in found.info().items() if name != "calibration"}
