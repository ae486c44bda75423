"""Calibrate the sources that ship: python -m experiments.calibrate --prompts train_prompts.jsonl.

What every source offers along the base's own answers, at each temperature, says how often it is right. Adapters get the
two numbers per distance into their adapter.json; those of methods without adapters are printed, for their files.
Distances beyond the adapter's own tree have the numbers of its last one.
"""

from __future__ import annotations

import dataclasses
import json

from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.config import SamplingConfig
from jaxspec.drafters import METHODS, load_drafter, ships
from jaxspec.drafters.source import temperature_key
from jaxspec.files import read_json, write_json
from jaxspec.training.calibration import IDENTITY
from jaxspec.training.examples import unseen_prompts
from jaxspec.tuning.record import Text, fit_calibration, record
from jaxspec.tuning.tune import own_answers
from jaxspec.weights.load import DEFAULT_MODEL, load_model


@dataclasses.dataclass(frozen=True)
class Options:
    """Fit calibrations, and write those of adapters into them.

    Attributes:
      prompts: a JSONL file of prompts; of the file that an adapter was trained on, what training set aside is used.
      limit: prompts at most.
      tokens: of an answer at most.
      temperatures: of the answers; 0 is greedy, which every calibration needs. Those of an adapter at other ones stay.
      methods: which; default all that ship.
    """

    prompts: str = ""
    limit: int = 64
    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0)
    methods: tuple[str, ...] = ()


def main(args: list[str]) -> None:
    """Parse, load, fit, write."""
    options = parse(Options, args)
    enable_compilation_cache()
    model = load_model(DEFAULT_MODEL)
    answered: dict[tuple, list[Text]] = {}
    for name in options.methods or [name for name in METHODS if ships(name, model)]:
        drafter = load_drafter(name, model, tree="own")
        adapter = drafter.source.adapter
        prompts = unseen_prompts(model, adapter.info.get("data", {}) if adapter else {}, options.prompts)
        found = {}
        for sampling in map(SamplingConfig, options.temperatures):
            key = drafter.model.fingerprint, sampling.temperature, *prompts[: options.limit]
            if key not in answered:
                answered[key] = own_answers(drafter.model, prompts[: options.limit], sampling, options.tokens)
            recordings = record(drafter, answered[key], sampling)
            table = fit_calibration(recordings, 0, [IDENTITY] * drafter.source.facts.distances)
            reached = min(drafter.shape.depth, len(table))  # a source offers as far as its own tree is deep
            table = [*table[:reached], *[table[reached - 1]] * (len(table) - reached)]
            found[temperature_key(sampling.temperature)] = table
        print(name, json.dumps(found), flush=True)
        if adapter:
            file = adapter.folder / "adapter.json"
            info = read_json(file)
            write_json(file, info | {"calibration": dict(sorted((info.get("calibration", {}) | found).items()))})


if __name__ == "__main__":
    run_main(main)
