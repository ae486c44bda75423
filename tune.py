"""Choose the fastest draft tree for this machine: python tune.py --method ppd [--batch-size B] [--cache-length S]."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

from jaxspec import SamplingConfig, UserError, load_model
from jaxspec.cli import enable_compilation_cache, parse, run_main
from jaxspec.decoding.sampling import make_sampler
from jaxspec.evaluation.tuning import Trial, measure_accuracy, measure_latency, plot_tuning, race
from jaxspec.methods.adapter import Adapter, adapter_plan, make_drafter, open_adapter
from jaxspec.methods.tuned import Choice, save_choice, this_machine
from jaxspec.model.load import DEFAULT_MODEL, Model
from jaxspec.training.data import read_prompts
from jaxspec.tree import expected
from jaxspec.tree.hardware import Option, make_option, rank_options


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure this machine, search trees, try the best few, and write the choice beside the adapter.

    Attributes:
      method: what drafts.
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, or a GGUF file.
      adapter: folder of a trained adapter; default the one that ships for this method and model.
      batch_size: prompts decoded together.
      cache_length: slots of the cache while step times are measured.
      temperature: 0 is greedy; other accuracies are measured anew on the prompts.
      prompts: a JSONL file of prompts to measure and try on, never a benchmark; empty takes the set that ships.
      column: field of that file that holds the prompt.
      num_prompts: how many of them to decode in the final trial.
      accuracy_prompts: how many of them to measure accuracies on; 0 takes the adapter's own where greedy.
      max_new_tokens: tokens per answer.
      max_rows: largest step to consider.
      finalists: trees to try by decoding, the best predicted ones.
      also: further trees to try, as decode.py takes them: sparse:16 random:16 ...
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      output: folder for the choice and the plot; default the adapter's.
      json: print the result as one JSON object.
    """

    method: str = "ppd"
    model: str = DEFAULT_MODEL
    adapter: str = ""
    batch_size: int = 1
    cache_length: int = 512
    temperature: float = 0.0
    prompts: str = ""
    column: str = "prompt"
    num_prompts: int = 12
    accuracy_prompts: int = 0
    max_new_tokens: int = 64
    max_rows: int = 64
    finalists: int = 4
    also: tuple[str, ...] = ()
    dtype: str = ""
    output: str = ""
    json: bool = False


def check(options: Options) -> None:
    """Raise UserError for settings that make no sense."""
    for name in ("batch_size", "num_prompts", "max_new_tokens", "finalists"):
        if getattr(options, name) < 1:
            raise UserError(f"{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.max_rows < 4:
        raise UserError(f"max-rows must be at least 4, got {options.max_rows}")
    if options.cache_length < 64:
        raise UserError(f"cache-length must be at least 64, got {options.cache_length}")
    if options.accuracy_prompts < 0:
        raise UserError(f"accuracy-prompts must not be negative, got {options.accuracy_prompts}")
    if options.prompts and not Path(options.prompts).is_file():
        raise UserError(f"{options.prompts}: no such file")
    make_sampler(SamplingConfig(options.temperature))


def accuracies(options: Options, model: Model, adapter: Adapter, prompts: list[str]) -> np.ndarray:
    """The adapter's own where they fit, else measured."""
    count = options.accuracy_prompts or (16 if options.temperature else 0)
    if not count:
        return np.array(adapter.info["accuracy"])
    sampling = SamplingConfig(options.temperature)
    tokens = 2 * options.max_new_tokens
    measured = measure_accuracy(model, adapter.method, adapter.trainable, prompts[:count], sampling, tokens)
    return measured.by_rank


def tune(options: Options) -> None:
    """Measure, search, try, write."""
    prompts = read_prompts(options.prompts, options.column)
    model = load_model(options.model, options.dtype or None)
    folder, adapter = open_adapter(options.method, model, options.adapter or None)
    for spec in options.also:  # refused before anything is measured
        adapter_plan(adapter, spec)
    method, sampling = adapter.method, SamplingConfig(options.temperature)
    accuracy = accuracies(options, model, adapter, prompts)
    latency = measure_latency(
        model, method, adapter.trainable, options.batch_size, options.cache_length, options.max_rows
    )
    ranked = rank_options(accuracy, latency, options.max_rows, method.probe_distances, method.probe_rows)
    tried = ranked[: options.finalists]
    for spec in options.also:
        plan = expected(adapter_plan(adapter, spec), accuracy)
        tried.append(make_option(spec, plan, latency, method.probe_distances, method.probe_rows))
    drafters = {option.name: make_drafter(adapter, option.plan) for option in tried}
    chosen = prompts[: options.num_prompts]
    trials = race(model, drafters, chosen, options.max_new_tokens, sampling, options.batch_size)
    best = max(trials, key=lambda trial: trial.speedup)
    plans = {option.name: option.plan for option in tried}
    info = {
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "expected_tokens": {o.name: round(o.plan.expected_tokens, 4) for o in tried},
        "predicted_tokens_per_second": {o.name: round(o.predicted, 2) for o in tried},
        "accuracy": np.round(accuracy, 5).tolist(),
        "rows": latency.rows,
        "milliseconds": [round(1e3 * seconds, 3) for seconds in latency.seconds],
    }
    choice = Choice(
        this_machine(), options.batch_size, options.cache_length, options.temperature, plans.get(best.name), best.name,
        info,
    )  # fmt: skip
    output = Path(options.output) if options.output else folder
    file = save_choice(output, method.name, choice)
    plot_tuning(latency, [*ranked, *tried[options.finalists :]], trials, output / "tuning.png")
    if options.json:
        print(json.dumps({"machine": choice.machine, "choice": choice.name, "file": str(file)} | info))
    else:
        print(report(trials, tried, best))
    print(f"written to {file}, plot in {output / 'tuning.png'}", file=sys.stderr)


def report(trials: list[Trial], tried: list[Option], best: Trial) -> str:
    """A table of what was tried, and the verdict."""
    expected = {option.name: option.plan.expected_tokens for option in tried} | {"autoregressive": 1.0}
    width = max(len(trial.name) for trial in trials)
    lines = [f"{'tree':{width}}  tokens/step  expected  tokens/s  speedup"]
    for t in trials:
        lines.append(
            f"{t.name:{width}}  {t.tokens_per_step:11.2f}  {expected[t.name]:8.2f}  {t.tokens_per_second:8.1f}  "
            f"{t.speedup:7.2f}"
        )
    if best.name == "autoregressive":
        lines.append("nothing pays on this machine: autoregressive decoding is the fastest")
    else:
        lines.append(f"fastest: {best.name}, {best.speedup:.2f} times autoregressive")
    return "\n".join(lines)


def main(args: list[str]) -> None:
    """Parse, check, tune."""
    options = parse(Options, args, prog="tune.py")
    check(options)
    enable_compilation_cache()
    tune(options)


if __name__ == "__main__":
    run_main(main)
