"""Choose the fastest draft tree for this machine: python tune.py --method ppd [--batch-size B] [--cache-length S]."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from jaxspec import DataConfig, Model, SamplingConfig, UserError, load_model
from jaxspec.cli.options import enable_compilation_cache, parse, run_main
from jaxspec.drafting.adapter import Adapter, open_adapter
from jaxspec.drafting.choice import save_choice
from jaxspec.drafting.sampling import make_sampler
from jaxspec.drafting.tree import save_plan
from jaxspec.files import writable, write_atomically
from jaxspec.training.examples import read_prompts, select_prompts
from jaxspec.tuning.tune import TuneConfig, Tuning, check_tuning, plot_tuning, tune
from jaxspec.weights.load import DEFAULT_MODEL


@dataclasses.dataclass(frozen=True)
class Options(TuneConfig):
    """Measure this machine, search trees, try the best few, and write the choice beside the adapter.

    Attributes:
      method: what drafts.
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, a base that train.py or export.py made,
        or a GGUF file.
      adapter: folder of a trained adapter; default the one that ships for this method and model.
      prompts: a JSONL file of prompts, no benchmark; empty takes the small set that ships. Of the file that the
        adapter was trained on, only what training set aside is used.
      column: field of that file that holds the prompt.
      template: a chat template by name, where not the tokenizer's own: llama2, llama2-short, vicuna, vicuna-short or
        falcon.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      output: folder for tuned.json, tuning.png and the tree as tree.json; default the adapter's.
      json: print the result as one JSON object.
    """

    method: str = "ppd"
    model: str = DEFAULT_MODEL
    adapter: str = ""
    prompts: str = ""
    column: str = "prompt"
    template: str = ""
    dtype: str = ""
    output: str = ""
    json: bool = False


def report(tuning: Tuning) -> str:
    """A table of what was tried, and the verdict."""
    expected = {option.name: option.plan.expected_tokens for option in tuning.options} | {"autoregressive": 1.0}
    rows = {option.name: option.rows for option in tuning.options} | {"autoregressive": 1}
    width = max(len(trial.name) for trial in tuning.trials)
    # what is expected and predicted does not know of draft vocabularies
    lines = [f"{'tree':{width}}  rows  tokens/step  expected  tokens/s  speedup"]
    for t in tuning.trials:
        lines.append(
            f"{t.name:{width}}  {rows[t.name]:4.0f}  {t.tokens_per_step:11.2f}  {expected[t.name]:8.2f}  "
            f"{t.tokens_per_second:8.1f}  {t.speedup:7.2f}"
        )
    speedup = max(trial.speedup for trial in tuning.trials)
    verdict = f"fastest: {tuning.choice.name}, {speedup:.2f} times autoregressive"
    if tuning.choice.plan is None:
        verdict = "nothing pays on this machine: autoregressive decoding is the fastest"
    return "\n".join([*lines, verdict])


def unseen_prompts(options: Options, model: Model, adapter: Adapter) -> list[str]:
    """The prompts of the file; only those that training set aside, where the adapter was trained on the same file."""
    data = adapter.info.get("data", {})
    if data.get("prompts") != Path(options.prompts).name:  # both are empty for the set that ships
        return read_prompts(options.prompts, options.column)
    known = {field.name for field in dataclasses.fields(DataConfig)} - {"prompts", "cache"}
    config = DataConfig(options.prompts, **{name: value for name, value in data.items() if name in known})
    return [prompt.text for prompt in select_prompts(model, config)[: config.held_out]]


def main(args: list[str]) -> None:
    """Parse, tune, write, print."""
    options = parse(Options, args, prog="tune.py")
    config = TuneConfig(**{f.name: getattr(options, f.name) for f in dataclasses.fields(TuneConfig)})
    make_sampler(SamplingConfig(config.temperature))  # refuses a bad temperature before anything is loaded
    if options.prompts and not Path(options.prompts).is_file():
        raise UserError(f"{options.prompts}: no such file")
    enable_compilation_cache()
    model = load_model(options.model, options.dtype or None, template=options.template)
    folder, adapter = open_adapter(options.method, model, options.adapter or None)
    prompts = unseen_prompts(options, model, adapter)
    check_tuning(config, model, adapter, prompts)
    output = writable(Path(options.output) if options.output else folder)
    tuning = tune(model, adapter, prompts, config)
    choice = tuning.choice
    file = save_choice(output, options.method, choice)
    tree = choice.plan and save_plan(choice.plan, options.method)
    if tree:
        write_atomically(output / "tree.json", json.dumps(tree).encode())
    plot_tuning(tuning.latency, tuning.options, tuning.trials, output / "tuning.png")
    if options.json:
        made_for = {"method": options.method, "model": options.model, "choice": choice.name, "tree": tree}
        circumstances = ("machine", "dtype", "batch_size", "temperature", "draft_vocabulary")
        made_for |= {name: getattr(choice, name) for name in circumstances}
        print(json.dumps(made_for | {"file": str(file)} | choice.info))
    else:
        print(report(tuning))
    print(f"written to {file}, plot in {output / 'tuning.png'}", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
