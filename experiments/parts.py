"""What options of EAGLE and DFlash give in short trainings by the lab's terms: python -m experiments.parts.

Each is trained in turn, some minutes on a core, with the first seed and one learning rate, and its tokens per step are
those to expect of a fixed tree by its accuracies on answers that are not trained on. parts.json keeps the figures, and
what it has is not trained again. Prints a table.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lab.entries import TRAINED
from experiments.lab.lab import Lab
from experiments.lab.terms import NODES, Terms
from experiments.lab.training import run_of, train_run
from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.decoding.method import Method
from jaxspec.errors import UserError
from jaxspec.files import locked, read_json, writable, write_json
from jaxspec.markdown import table
from jaxspec.trees import sparse_tree
from jaxspec.weights.params import parameter_count

_ENTRIES = {entry.name: entry for entry in TRAINED}


def _eagle(**settings: Any) -> Method:
    return dataclasses.replace(_ENTRIES["eagle"].method, **settings)


def _dflash(**settings: Any) -> Method:
    return dataclasses.replace(_ENTRIES["dflash"].method, markov_rank=0, **settings)


_PUBLISHED = {"direct": False, "even": False}
_PUBLISHED_BLOCK = {"from_newest": False, "even": False, "sample_from_anchor": False}
_PUBLISHED_BLOCK |= {"head_norms": True, "mask_token": 4}
METHODS: dict[str, Method] = {
    "eagle": _eagle(),
    "eagle, a norm for each tap (3.1)": _eagle(fc_norm=True),
    "eagle, a norm behind the output (3.1)": _eagle(norm_output=True),
    "eagle, one norm over all taps": _eagle(norm_before_fc=True),
    "eagle as published": _eagle(**_PUBLISHED),
    "eagle 3.1 as published": _eagle(**_PUBLISHED, fc_norm=True, norm_output=True),
    "dflash": _dflash(),
    "dflash, convolution": _dflash(convolution=2),
    "dflash, selector": _dflash(selector_rank=64),
    "dflash, convolution and selector": _dflash(convolution=2, selector_rank=64),
    "dflash as published": _dflash(**_PUBLISHED_BLOCK),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Train methods with and without options, and compare them.

    Attributes:
      only: parts of the names of those that are trained; default all.
      updates: of a training.
      work: folder for prompts, answers and adapters.
      output: folder for parts.json.
    """

    only: tuple[str, ...] = ()
    updates: int = Terms.trial_updates
    work: str = "runs/parts"
    output: str = "runs/parts"


def train_part(lab: Lab, name: str, updates: int) -> dict[str, Any]:
    """Figures of one training: `accuracy` [M][K], `tokens_per_step` by nodes, and what it was."""
    method = METHODS[name]
    entry = dataclasses.replace(_ENTRIES[method.name], name=name, method=method)
    adapter = train_run(lab, run_of(lab.terms, lab.data, entry, 0, entry.rate, updates), lab.work / name)
    accuracy = np.array(adapter.info["accuracy"])
    expected = {str(nodes): round(sparse_tree(accuracy, nodes).expected_tokens, 3) for nodes in NODES}
    return {
        "tokens_per_step": expected,
        "accuracy": accuracy.round(4).tolist(),
        "parameters": parameter_count(adapter.trainable),
        "updates": updates,
        "settings": entry.settings,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def as_table(trainings: dict[str, Any]) -> list[str]:
    """Lines of Markdown, a row per training."""
    rows = []
    for name, row in trainings.items():
        first = " / ".join(f"{ranks[0]:.3f}".lstrip("0") for ranks in row["accuracy"][:3])
        steps = [f"{row['tokens_per_step'][str(nodes)]:.2f}" for nodes in NODES]
        rows.append([name, *steps, first, f"{row['parameters'] / 1e6:.1f}"])
    heads = [f"{nodes} nodes" for nodes in NODES]
    return table(["trained", *heads, "top-1 at distance 1 / 2 / 3", "parameters, million"], rows)


def _trainings(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def main(args: list[str]) -> None:
    """Train what is missing, and print the table."""
    options = parse(Options, args)
    chosen = [name for name in METHODS if not options.only or any(part in name for part in options.only)]
    if not chosen:
        raise UserError(f"none has {' or '.join(options.only)} in its name; there are: {'; '.join(METHODS)}")
    file = writable(Path(options.output)) / "parts.json"
    lab = Lab(Path(options.work) / "results", Path(options.work))
    for name in chosen:
        if name not in _trainings(file):
            row = train_part(lab, name, options.updates)
            with locked(file.with_suffix(".lock")):  # others may train the rest
                trainings = _trainings(file) | {name: row}
                write_json(file, {name: trainings[name] for name in METHODS if name in trainings})
    print("\n".join(as_table(_trainings(file))))


if __name__ == "__main__":
    run_main(main)
