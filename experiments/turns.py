"""Drafters that take turns of a few steps: python -m experiments.turns --data question.jsonl --run suffix ppd.

For machines that are busy with other work, too. `jaxspec bench compare` takes turns by whole answers, so that a slow
moment of the machine falls on one drafter; here it falls on all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxspec.bench.metrics import estimate
from jaxspec.bench.questions import read_questions, stratified
from jaxspec.bench.report import interval
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import writable, write_json
from jaxspec.generation.generate import Generation, stream
from jaxspec.machine import device_name, make_room_for_programs
from jaxspec.markdown import table
from jaxspec.progress import Progress
from jaxspec.versions import code_version
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model

REFERENCE = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare drafters, in turns of a few steps, with autoregressive decoding, which takes part twice.

    Attributes:
      data: a question file as for `jaxspec bench`; the first turns are asked.
      run: drafters, as for `jaxspec decode --compare-with`.
      model: the base.
      limit: questions, the same number from every category; 0 is all.
      longest: tokens of a prompt; questions with longer ones are left out.
      tokens: of an answer at most.
      steps: of a turn.
      temperature: of sampling, 0 is greedy.
      seed: of sampling.
      output: folder for turns.json.
    """

    data: str
    run: tuple[str, ...] = ("eagle+suffix", "suffix", "ppd")
    model: str = DEFAULT_MODEL
    limit: int = 12
    longest: int = 400
    tokens: int = 128
    steps: int = 8
    temperature: float = 0.0
    seed: int = 0
    output: str = "runs/turns"


def load_drafters(options: Options, model: Model) -> dict[str, Drafter]:
    """The drafters by name, autoregressive decoding first. Raises UserError for one that decodes on another base."""
    drafters = {REFERENCE: autoregressive(model), f"{REFERENCE} again": autoregressive(model)}
    for name in options.run:
        if name in drafters:
            raise UserError(f"--run {name!r}: that drafter is there twice")
        drafters[name] = load_drafter(name, model, temperature=options.temperature)
        if drafters[name].model is not model:
            raise UserError(f"--run {name!r}: it decodes on a base that it has tuned, which has other texts")
    return drafters


def in_turns(
    drafters: dict[str, Drafter], prompt: Sequence[int], options: Options, random: np.random.Generator
) -> dict[str, Generation]:
    """Every drafter's answer to a prompt. In each round all that are not done decode a few steps, in random order."""
    settings = {"sampling": SamplingConfig(options.temperature), "seed": options.seed}
    running: dict[str, Iterator[Generation]] = {
        name: stream(drafter, prompt, options.tokens, steps_per_chunk=options.steps, **settings)
        for name, drafter in drafters.items()
    }
    answers: dict[str, Generation] = {}
    while running:
        for name in random.permutation(list(running)).tolist():
            answer = next(running[name], None)
            if answer is None:
                del running[name]
            else:
                answers[name] = answer
    return answers


def measure(drafters: dict[str, Drafter], prompts: Sequence[Sequence[int]], options: Options) -> dict[str, list]:
    """The answers of all drafters, of more than one token.

    A prompt for which something compiled is answered again: the first run of a size takes half a second longer, too.
    """
    answers: dict[str, list[Generation]] = {name: [] for name in drafters}
    random = np.random.default_rng(0)
    with Progress("comparing", len(prompts), "prompts") as progress:
        for number, prompt in enumerate(prompts, 1):
            make_room_for_programs()
            said = in_turns(drafters, prompt, options, random)
            if any(answer.compile_seconds for answer in said.values()):
                said = in_turns(drafters, prompt, options, random)
            if said[REFERENCE].steps:
                for name, answer in said.items():
                    answers[name].append(answer)
            progress.update(number)
    if not answers[REFERENCE]:
        raise UserError("no prompt has an answer of more than one token: there is no speed to measure")
    return answers


def report(answers: dict[str, list[Generation]]) -> list[str]:
    """A line per drafter; speeds are relative to autoregressive decoding of the same question."""
    rows, plain = [], answers[REFERENCE]
    seconds = {name: np.array([a.decode_seconds for a in each]) for name, each in answers.items()}
    tokens = {name: np.array([a.new_tokens - 1 for a in each]) for name, each in answers.items()}
    rates = {name: np.array([a.tokens_per_second for a in each]) for name, each in answers.items()}
    total = {name: tokens[name].sum() / seconds[name].sum() for name in answers}
    for name, each in answers.items():
        steps, speeds = sum(a.steps for a in each), rates[name] / rates[REFERENCE]
        same = sum(a.tokens == b.tokens for a, b in zip(each, plain, strict=True))
        rows.append(
            [
                name,
                f"{tokens[name].sum() / steps:.2f}",
                f"{1e3 * seconds[name].sum() / steps:.1f}",
                f"{total[name] / total[REFERENCE]:.2f}",
                interval(estimate(speeds, np.median)),
                f"{speeds.min():.2f}",
                f"{same} of {len(each)}",
            ]
        )
    head = ["drafter", "tokens per step", "ms per step", "speed, total", "median", "lowest", "identical"]
    return table(head, rows)


def main(args: list[str]) -> None:
    """Measure, print, write."""
    options = parse(Options, args, prog="python -m experiments.turns")
    check_at_least(options, {"limit": 0, "longest": 1, "tokens": 2, "steps": 1})
    questions = stratified(read_questions(options.data), options.limit)
    folder = writable(Path(options.output))
    enable_compilation_cache()
    model = load_model(options.model)
    prompts = [model.encode(question.turns[0]) for question in questions]
    prompts = [prompt for prompt in prompts if len(prompt) <= options.longest]
    if not prompts:
        raise UserError(f"{options.data}: no prompt has at most {options.longest} tokens")
    answers = measure(load_drafters(options, model), prompts, options)
    lines = report(answers)
    results = {
        "device": device_name(),
        "jax": jax.__version__,
        "code": code_version(),
        "settings": dataclasses.asdict(options) | {"data": Path(options.data).name},
        "answers": {
            name: [{"tokens": a.new_tokens, "steps": a.steps, "decode_seconds": a.decode_seconds} for a in each]
            for name, each in answers.items()
        },
    }
    write_json(folder / "turns.json", results)
    print("\n".join(lines))


if __name__ == "__main__":
    run_main(main)
