"""`jaxspec import`: a drafter that other software has trained as an adapter."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import tyro

from jaxspec.cli.evaluate import accuracy_lines, evaluation_data
from jaxspec.cli.options import load_base, parse
from jaxspec.cli.program import enable_compilation_cache
from jaxspec.config import MeshConfig
from jaxspec.drafters.adapter import save_adapter
from jaxspec.drafters.published import Interpretation, read_published
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import display_name, new_folder
from jaxspec.progress import Progress
from jaxspec.training.measure import Measured, measure, own_answers
from jaxspec.weights.load import DEFAULT_MODEL
from jaxspec.weights.model import Model

_TREE = "sparse:16"  # of an imported adapter, by its measured accuracies


@dataclasses.dataclass(frozen=True)
class ImportOptions:
    """Make an adapter of a published drafter, which other software has trained for a base.

    The drafter is tried on answers that the base gives to a few prompts, so that a drafter that does not fit shows as a
    number. Where its files can mean several things, all are tried, and the best one is kept.

    Attributes:
      drafter: a folder, or a name owner/model of the Hugging Face hub.
      model: the base that it was trained for: smollm2-135m (the default), a Hugging Face directory or hub name, a base
        written by `jaxspec train` or `jaxspec export`, or a GGUF file.
      output: the directory of the adapter; it must not exist.
      depth: how far ahead it drafts; default what its files say, else what its form is trained for.
      answers: prompts that the base answers.
      max_new_tokens: of an answer.
      template: chat template in place of the tokenizer's, as for `jaxspec decode`.
      dtype: dtype of the base's weights, as for `jaxspec decode`.
      weights: the base's kernels in few bits, likewise.
    """

    drafter: tyro.conf.Positional[str]
    model: str = DEFAULT_MODEL
    output: str = ""
    depth: int = 0
    answers: int = 20
    max_new_tokens: int = 128
    template: str = ""
    dtype: str = ""
    weights: str = ""


def main(args: list[str]) -> None:
    """Parse, read, try, write."""
    options = parse(ImportOptions, args)
    output = new_folder(options.output)
    check_at_least(options, {"depth": 0, "answers": 1, "max_new_tokens": 3})
    enable_compilation_cache()
    model = load_base(options.model, options.dtype, MeshConfig(), options.template, options.weights)
    readings = [_deepened(each, options.depth) for each in read_published(options.drafter, model)]
    answers = own_answers(model, evaluation_data(options.answers, options.max_new_tokens))
    found = []
    for reading in readings:
        with Progress("evaluation", len(answers), "answers") as progress:
            found.append(measure(reading.adapter, model, answers, _TREE, progress.update))
        if reading.meaning:
            print(f"{reading.meaning}: {found[-1].tokens_per_step:.3f} tokens per step")
    best = max(range(len(readings)), key=lambda i: found[i].tokens_per_step)
    if readings[best].meaning:
        print(f"kept: {readings[best].meaning}")
    _save(readings[best], found[best], model, options, output)
    print("\n".join(accuracy_lines(found[best])))
    if found[best].tokens_per_step < 1.1:
        print("it hardly ever drafts right: trained for another base or another chat template?", file=sys.stderr)
    method = readings[best].adapter.method.name
    print(f"adapter: {output}, of method {method}")


def _deepened(reading: Interpretation, depth: int) -> Interpretation:
    """A reading that drafts so far ahead; 0: as it is."""
    if not depth:
        return reading
    method = reading.adapter.method
    if "depth" not in {field.name for field in dataclasses.fields(method)}:
        raise UserError(f"{method.name} drafts as far as it has learned: leave --depth out")
    return dataclasses.replace(
        reading, adapter=dataclasses.replace(reading.adapter, method=dataclasses.replace(method, depth=depth))
    )


def _save(reading: Interpretation, found: Measured, model: Model, options: ImportOptions, output: Path) -> None:
    published = reading.adapter.info["published"] | {"source": display_name(options.drafter)}
    if reading.meaning:
        published["meaning"] = reading.meaning
    data = {"answers": options.answers, "max_new_tokens": options.max_new_tokens}
    info = (
        reading.adapter.info | {"base": display_name(model.name), "published": published, "data": data} | found.info()
    )
    save_adapter(output, dataclasses.replace(reading.adapter, info=info), published["dtype"])
