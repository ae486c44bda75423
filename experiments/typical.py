"""Typical acceptance beside the base's own draw, by temperature: python -m experiments.typical --data question.jsonl.

PPD 6.2 and Table 6.1: tokens per step, speed, and as much of quality as a small base shows: how likely it finds a text,
and how much of it the base's other answers have, too. Its own samples have the same figures, which are those to reach.
typical.json is written temperature by temperature, and the same command continues; typical.png shows it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.metrics import Estimate, estimate
from jaxspec.bench.quality import rouge
from jaxspec.bench.questions import read_questions, stratified
from jaxspec.bench.report import interval
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match, Typical
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import read_json, writable, write_json
from jaxspec.generation.generate import Generation, generate
from jaxspec.machine import make_room_for_programs
from jaxspec.markdown import table
from jaxspec.plotting import picture
from jaxspec.progress import Progress
from jaxspec.training.data import AnsweredPrompt
from jaxspec.training.evaluate import answer_entropies
from jaxspec.tuning.race import in_turn
from jaxspec.versions import code_version
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model

RULES = {"match": Match(), "typical": Typical()}
FIGURES = {
    "tokens_per_step": "tokens per step",
    "speedup": "speed",
    "log_likelihood": "log-likelihood per token",
    "rouge_l": "ROUGE-L with other samples",
}
_TOGETHER = 4  # prompts whose other samples are drawn together


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure typical acceptance.

    Attributes:
      data: a question file as for `jaxspec bench`; the first turns are asked.
      method: what drafts, with its own tree.
      limit: questions, the same number from every category; 0 is all.
      tokens: of an answer at most.
      temperatures: to decode at.
      samples: further answers of the base to every question, to compare with.
      output: folder for typical.json and typical.png.
    """

    data: str
    method: str = "ppd"
    limit: int = 24
    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.4, 0.8, 1.0)
    samples: int = 4
    output: str = "docs"


def main(args: list[str]) -> None:
    """Parse, load, measure what has not been, show all."""
    options = parse(Options, args, prog="python -m experiments.typical")
    prompts = [question.turns[0] for question in stratified(read_questions(options.data), options.limit)]
    folder = writable(Path(options.output))
    check_at_least(options, {"samples": 1, "tokens": 2, "limit": 0})
    enable_compilation_cache()
    drafter = load_drafter(options.method, load_model(DEFAULT_MODEL), tree="own")
    found = measure_all(options, drafter, prompts, folder / "typical.json")
    print("\n".join(report(found)))
    draw(found, folder / "typical.png")


def measure_all(options: Options, drafter: Drafter, prompts: Sequence[str], file: Path) -> dict[str, Any]:
    """Measure every temperature that the file lacks, and write it there at once.

    Returns:
      {temperature: figures} of the whole file, the lowest first.

    Raises:
      UserError: the file holds another measurement.
    """
    settings = {name: getattr(options, name) for name in ("method", "limit", "tokens", "samples")}
    settings |= {"data": Path(options.data).name, "code": code_version()}
    kept = read_json(file) if file.exists() else {"settings": settings, "temperatures": {}}
    if kept.get("settings") != settings:
        raise UserError(f"{file}: measured with other settings, {kept.get('settings')}; give another --output")
    found = kept["temperatures"]
    for temperature in options.temperatures:
        if str(temperature) not in found:
            found[str(temperature)] = measure(drafter, prompts, temperature, options.tokens, options.samples)
            write_json(file, kept)
    return {temperature: found[temperature] for temperature in sorted(found, key=float)}


def measure(
    drafter: Drafter, prompts: Sequence[str], temperature: float, tokens: int, samples: int
) -> dict[str, dict[str, Any]]:
    """Decode the same prompts with both rules and autoregressively, in turn, and see what the texts are like.

    Args:
      drafter: what drafts.
      prompts: texts.
      temperature: of all answers, those that are compared with too.
      tokens: of an answer at most.
      samples: answers of the base with other seeds, to compare every answer with.

    Returns:
      Per rule, FIGURES, each an `Estimate` as plain values, and how many answers are `identical` to autoregressive
      decoding's. Speed is against autoregressive decoding, in pairs, the median; the log-likelihood is the base's at
      temperature 1, in nats.
    """
    prompts = sorted(prompts, key=len)  # those drawn together are padded to the longest
    plain, sampling = autoregressive(drafter.model), SamplingConfig(temperature)
    ask = functools.partial(generate, max_new_tokens=tokens, sampling=sampling)
    answers: dict[str, list[Generation]] = {name: [] for name in (*RULES, "autoregressive")}
    with Progress(f"temperature {temperature:g}", len(prompts), "prompts") as progress:
        for number, prompt in enumerate(prompts):
            runs = {name: functools.partial(ask, drafter, [prompt], acceptance=rule) for name, rule in RULES.items()}
            runs |= {"autoregressive": functools.partial(ask, plain, [prompt])}
            for name, said in in_turn(runs, number):
                answers[name] += said
            make_room_for_programs()
            progress.update(number + 1)
    others = [ask(plain, prompts, seed=seed, batch_size=_TOGETHER) for seed in range(1, samples + 1)]
    texts = [[other.text for other in each] for each in zip(*others, strict=True)]
    return {name: _figures(drafter.model, answers[name], answers["autoregressive"], texts) for name in RULES}


def _figures(
    model: Model, answers: Sequence[Generation], plain: Sequence[Generation], others: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Of one rule's answers, beside autoregressive decoding's and the texts of other samples, prompt by prompt."""
    pairs = [(a, p) for a, p in zip(answers, plain, strict=True) if a.steps and p.steps]
    made = np.array([[a.new_tokens - 1, a.steps] for a, _ in pairs]).T
    entropies = answer_entropies(model.base, [AnsweredPrompt(model.encode(a.prompt), a.tokens) for a in answers])
    scores = [np.mean([rouge(a.text, text)["ROUGE-L"] for text in of]) for a, of in zip(answers, others, strict=True)]
    estimates = {
        "tokens_per_step": estimate(made, _ratio),
        "speedup": estimate(np.array([a.tokens_per_second / p.tokens_per_second for a, p in pairs]), np.median),
        "log_likelihood": estimate(entropies.T * [[-1], [1]], _ratio),
        "rouge_l": estimate(np.array(scores), np.mean),
    }
    identical = sum(a.tokens == p.tokens for a, p in zip(answers, plain, strict=True))
    return {name: dataclasses.asdict(value) for name, value in estimates.items()} | {"identical": identical}


def _ratio(amounts: np.ndarray, numbers: np.ndarray, axis: int) -> np.ndarray:
    """The mean over all answers together."""
    return amounts.sum(axis) / numbers.sum(axis)


def report(found: dict[str, Any]) -> list[str]:
    """A table of what `measure_all` found."""
    rows = [
        [temperature, f"`{rule}`", *(interval(Estimate(**figures[name])) for name in FIGURES), figures["identical"]]
        for temperature, rules in found.items()
        for rule, figures in rules.items()
    ]
    return table(["temperature", "acceptance", *FIGURES.values(), "identical"], rows)


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw tokens per step and both figures of quality against the temperature, a line per rule."""
    shown = [name for name in FIGURES if name != "speedup"]
    with picture(file, 1, len(shown), (12, 3.6), dpi=100) as panels:
        for axes, name in zip(panels, shown, strict=True):
            for rule in RULES:
                values = [rules[rule][name]["value"] for rules in found.values()]
                axes.plot([*map(float, found)], values, marker=".", label=rule)
            axes.set(xlabel="temperature", ylabel=FIGURES[name])
            axes.legend(fontsize=8)


if __name__ == "__main__":
    run_main(main)
