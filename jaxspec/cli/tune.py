"""Choose the fastest draft tree for this machine, and of a union the sources that pay."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxspec.cli.options import DrafterOptions, given_options, parse
from jaxspec.cli.program import enable_compilation_cache
from jaxspec.config import SamplingConfig
from jaxspec.decoding.method import method_text
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters import DrafterSpec, choice_folder, choose_tree, load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.choices import TunedChoice, choice_name, find_choice, save_choice
from jaxspec.drafters.costs import FILE as COSTS
from jaxspec.drafters.costs import GREEDY, SAMPLED, RowCosts, check_costs_file, save_costs
from jaxspec.drafters.defaults import cost_name, with_default
from jaxspec.drafters.drafter import Drafter
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import display_name, exclusive, new_folder, writable, write_atomically
from jaxspec.machine import this_machine
from jaxspec.methods import SelfSpeculative
from jaxspec.progress import Progress
from jaxspec.training.examples import unseen_prompts
from jaxspec.trees import TreePlan, save_plan
from jaxspec.tuning.plot import plot_tuning
from jaxspec.tuning.sizes import ROUNDS, measure_rows
from jaxspec.tuning.tune import TuneConfig, Tuning, answers_to_record, check_cache_length, tune


@dataclasses.dataclass(frozen=True)
class TuneOptions(DrafterOptions, TuneConfig):
    """Measure this machine, replay trees on recorded answers, race the best few, and write the choice.

    Of several methods, choose those that pay together. Of self_speculative, whose adapter is made here, search the
    settings, unless an adapter is given. On a CPU the layouts of the base's matrices are measured first.

    Attributes:
      quick: only measure what steps of a few rows cost, and keep it: all drafters choose rows by that unless they are
        tuned.
      prompts: a JSONL file of prompts, not those of a benchmark; empty takes the small set that ships. Of a file that
        the adapter was trained on, only the held-out prompts are used.
      column: field of that file with the prompt.
      trials: number of settings to try, for self_speculative.
      output: folder for tuned.json, tuning.png and the tree as tree.json; default the adapter's folder, for a union one
        in the user's cache. A search of settings needs a new folder, for the adapter.
      json: print the result as one JSON object.
    """

    quick: bool = False
    prompts: str = ""
    column: str = "prompt"
    trials: int = 200
    output: str = ""
    json: bool = False


_QUICK = ("quick", "batch_size", "cache_length", "json", *(field.name for field in dataclasses.fields(DrafterOptions)))


def main(args: list[str]) -> None:
    """Parse, load, tune, write, print."""
    options = parse(TuneOptions, args)
    make_sampler(SamplingConfig(options.temperature))  # refuses a bad temperature before anything is loaded
    if options.prompts and not Path(options.prompts).is_file():
        raise UserError(f"{options.prompts}: no such file")
    enable_compilation_cache()
    spec = options.drafter()
    chosen_here = {"tree": spec.tree, "vocabulary": None if options.quick else spec.vocabulary}
    if given := [name for name, value in chosen_here.items() if value is not None]:
        raise UserError(f"drafter {spec.text!r}: the {given[0]} is chosen here, leave it out")
    if options.quick:
        measure(options, spec)
    elif [type(each.method) for each in spec.methods] == [SelfSpeculative] and spec.adapter is None:
        build(options)
    else:
        choose(options, spec)


def build(options: TuneOptions) -> None:
    """Search the settings of self-speculative decoding on answers of the base, and write them as its adapter."""
    output = new_folder(options.output)
    check_at_least(options, {"trials": 1, "max_new_tokens": 2, "accuracy_prompts": 1})
    model = options.load_model()
    prompts = unseen_prompts(model, {}, options.prompts, options.column)
    texts = answers_to_record(model, prompts, options)
    with Progress("searching", options.trials, "settings") as progress:
        method, figures = SelfSpeculative().search(model.base, texts, options.trials, progress.update)
    info = {"base": display_name(options.model), "search": {"answers": len(texts), "trials": options.trials} | figures}
    save_adapter(output, Adapter(method, {}, model.fingerprint, info))
    row = {"method": method_text(method), "file": str(output / "adapter.json")} | figures
    print(json.dumps(row) if options.json else output)


def measure(options: TuneOptions, spec: DrafterSpec) -> None:
    """Measure what steps of a few rows cost, greedy and sampled ones; print that, and a drafter's sizes by it."""
    if useless := [name for name in given_options(options) if name not in _QUICK]:
        raise UserError(f"--quick replays and races nothing: it does not go with --{useless[0].replace('_', '-')}")
    check_at_least(options, {"batch_size": 1, "cache_length": 64})
    check_costs_file()
    began, drafter = time.monotonic(), load_to_tune(options, spec)
    check_cache_length(options.cache_length, drafter.model)
    costs = measure_rows(drafter, options.batch_size, options.cache_length)
    if note := save_costs(drafter.model, options.batch_size, costs, ROUNDS):
        print(note, file=sys.stderr)
    chosen = with_default(drafter, options.batch_size, costs)
    seconds = time.monotonic() - began
    print(json.dumps(costs_record(options, chosen, costs, seconds)) if options.json else costs_table(chosen, costs))
    print(f"written to {COSTS} after {seconds:.0f} s", file=sys.stderr)


def load_to_tune(options: TuneOptions, spec: DrafterSpec) -> Drafter:
    """The drafter with its own tree. Raises UserError for one that drafts nothing."""
    drafter = load_drafter(spec, options.load_model(), tree="own")
    if not drafter.drafts:
        raise UserError(choose_tree(drafter).note)
    return drafter


def costs_record(options: TuneOptions, chosen: Drafter, costs: RowCosts, seconds: float) -> dict[str, Any]:
    """Costs and choice as plain values for JSON."""
    drafting = costs.drafting[cost_name(chosen)]
    return {
        "method": chosen.name,
        "model": options.model,
        "machine": this_machine(),
        "dtype": chosen.model.precision,
        "batch_size": options.batch_size,
        "rows": costs.rows,
        "greedy_milliseconds": costs.costs[GREEDY],
        "sampled_milliseconds": costs.costs[SAMPLED],
        "drafting_milliseconds": drafting,
        "choice": chosen.shape.spec,
        "seconds": round(seconds, 1),
    }


def costs_table(chosen: Drafter, costs: RowCosts) -> str:
    """The table of costs, and the sizes that a step of the drafter may have."""
    greedy, sampled = costs.costs
    drafting = costs.drafting[cost_name(chosen)]
    lines = ["rows      greedy ms      sampled ms"]
    for rows, *both in zip(costs.rows, greedy, sampled, strict=True):
        shown = [f"{each:7.1f} ({each / first:.2f})" for each, first in zip(both, (greedy[0], sampled[0]), strict=True)]
        lines.append(f"{rows:4g}  {shown[0]}  {shown[1]}")
    lines.append(f"{chosen.name} drafts in {drafting[GREEDY]:.1f} ms, sampled in {drafting[SAMPLED]:.1f} ms")
    return "\n".join([*lines, f"choice: {chosen.shape.spec}"])


def choose(options: TuneOptions, spec: DrafterSpec) -> None:
    """Choose the fastest draft tree, and of a union the sources that pay."""
    drafter = load_to_tune(options, spec)
    prompts = unseen_by_all(drafter, options.prompts, options.column)
    output = writable(Path(options.output) if options.output else choice_folder(drafter))
    with exclusive(output):
        find_choice(output, drafter)  # refuses a damaged file before anything is measured
        tuning = tune(drafter, prompts, options)
        file = save_choice(output, choice_name(drafter), tuning.choice)
        if isinstance(tuning.choice.tree, TreePlan):
            write_atomically(output / "tree.json", json.dumps(_tree(tuning.choice)).encode())
        else:
            (output / "tree.json").unlink(missing_ok=True)  # of an earlier tuning
        plot_tuning(tuning.latency, tuning.options, tuning.trials, output / "tuning.png")
    print(json.dumps(record(options, tuning, choice_name(drafter), file)) if options.json else table(tuning))
    print(f"written to {file}, plot in {output / 'tuning.png'}", file=sys.stderr)


def unseen_by_all(drafter: Drafter, source: str, column: str) -> list[str]:
    """Prompts that no adapter of a drafter was trained on; the arguments of `unseen_prompts`."""
    adapters = [each.adapter for each in drafter.sources if each.trained]
    trained_on = [adapter.info.get("data", {}) for adapter in adapters] or [{}]
    first, *others = [unseen_prompts(drafter.model, data, source, column) for data in trained_on]
    return [prompt for prompt in first if all(prompt in other for other in others)]


def _tree(choice: TunedChoice) -> Any:
    """What was chosen as a tree file has it, or as a user writes it."""
    return save_plan(choice.tree, choice.sources[0]) if isinstance(choice.tree, TreePlan) else choice.tree


def record(options: TuneOptions, tuning: Tuning, method: str, file: Path) -> dict[str, Any]:
    """What was chosen as plain values for JSON: for what, and with the figures behind it."""
    choice = tuning.choice
    circumstances = ("machine", "dtype", "batch_size", "temperature", "draft_vocabulary")
    return {
        "method": method,
        "model": options.model,
        "choice": choice.name,
        "tree": _tree(choice),
        "sources": list(choice.sources),
        "calibration": dict(choice.calibration),
        **{name: getattr(choice, name) for name in circumstances},
        "file": str(file),
        **choice.info,
    }


def table(tuning: Tuning) -> str:
    """The table of trials, and the verdict."""
    found = {option.name: (option.rows, option.tokens) for option in tuning.options} | {"autoregressive": (1, 1.0)}
    width = max(len(trial.name) for trial in tuning.trials)
    lines = [f"{'tree':{width}}  rows  tokens/step  expected  tokens/s  speedup"]
    for t in tuning.trials:
        rows, expected = found[t.name]
        line = f"{t.name:{width}}  {rows:4.0f}  {t.tokens_per_step:11.2f}  {expected:8.2f}"
        lines.append(f"{line}  {t.tokens_per_second:8.1f}  {t.speedup:7.2f}")
    speedup = max(trial.speedup for trial in tuning.trials)
    verdict = f"fastest: {tuning.choice.name}, {speedup:.2f} times autoregressive"
    if tuning.choice.tree is None:
        verdict = "nothing pays on this machine: autoregressive decoding is the fastest"
    return "\n".join([*lines, verdict])
