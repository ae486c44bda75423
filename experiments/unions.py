"""How reliable the chances of sources are: python -m experiments.unions --prompts prompts.jsonl --output docs.

unions-reliability.png shows how often candidates of a chance come true, before and after calibration, by replay of the
base's own answers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.cli.tune import unseen_by_all
from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.source import temperature_key
from jaxspec.files import writable
from jaxspec.plotting import picture
from jaxspec.training.calibration import IDENTITY
from jaxspec.tuning.record import record
from jaxspec.tuning.replay import Replay, replay
from jaxspec.tuning.tune import own_answers
from jaxspec.weights.load import DEFAULT_MODEL, load_model

_BINS = 10  # of equal mass


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure and draw how reliable chances are.

    Attributes:
      sources: whose chances to check, each alone, at 8 rows.
      prompts: a JSONL file of prompts, for the chances.
      limit: prompts at most.
      temperature: of the answers that are replayed.
      output: folder for the picture.
    """

    sources: tuple[str, ...] = ("amphista", "hydra", "medusa", "suffix", "prompt_lookup")
    prompts: str = ""
    limit: int = 40
    temperature: float = 0.0
    output: str = "docs"


def main(args: list[str]) -> None:
    """Parse, load, draw."""
    options = parse(Options, args)
    folder = writable(Path(options.output))
    enable_compilation_cache()
    model = load_model(DEFAULT_MODEL)
    prompts = unseen_by_all(load_drafter(options.sources, model), options.prompts, "prompt")[: options.limit]
    sampling = SamplingConfig(options.temperature)
    texts = [text for text in own_answers(model, prompts, sampling, 128) if len(text[1]) > 1]
    found = {}
    for name in options.sources:
        alone = load_drafter(name, model, tree="best:8")
        recordings = record(alone, texts, sampling)
        nothing = {temperature_key(options.temperature): [IDENTITY] * alone.source.facts.distances}
        raw = dataclasses.replace(alone, sources=(dataclasses.replace(alone.source, calibration=nothing),))
        found[name] = tuple(replay(recordings, each, temperature=options.temperature) for each in (raw, alone))
    errors = {name: [round(calibration_error(each), 4) for each in pair] for name, pair in found.items()}
    print(json.dumps(errors, indent=1))
    name = "unions-reliability-sampled.png" if options.temperature else "unions-reliability.png"
    draw_reliability(found, folder / name)


def equal_mass(found: Replay) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of one source in bins of equal mass: how many, their mean chance, and how often they are right."""
    tried, right = found.tried[0].astype(float), found.right[0].astype(float)
    chance = (np.arange(len(tried)) + 0.5) / len(tried)
    place = np.minimum((np.cumsum(tried) - tried / 2) / max(tried.sum(), 1) * _BINS, _BINS - 1).astype(int)
    mass, said, came = (np.bincount(place, weights=w, minlength=_BINS) for w in (tried, tried * chance, right))
    return mass, said / np.maximum(mass, 1), came / np.maximum(mass, 1)


def calibration_error(found: Replay) -> float:
    """The mean over candidates of how far their bin's chance is from how often it came true."""
    mass, said, came = equal_mass(found)
    return float((mass * np.abs(said - came)).sum() / max(mass.sum(), 1))


def draw_reliability(found: dict[str, tuple[Replay, Replay]], file: Path) -> None:
    """Draw how often candidates came true against their chance, before and after calibration, a panel per source."""
    with picture(file, 1, len(found), (3.2 * len(found), 3.4), dpi=100) as panels:
        for axes, (name, pair) in zip(panels, found.items(), strict=True):
            axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
            for label, each in zip(("before", "after"), pair, strict=True):
                _, said, came = equal_mass(each)
                axes.plot(said, came, marker=".", label=f"{label}: {calibration_error(each):.3f}")
            axes.set(title=name, xlabel="chance", xlim=(0, 1), ylim=(0, 1))
            axes.legend(fontsize=8)


if __name__ == "__main__":
    run_main(main)
