"""How many tokens trees of different builders are expected to make: python -m experiments.trees.

PPD's Figure 6.6a, from the measured accuracies of an adapter, and with the exact search beside the thesis's builder.
Writes trees-builders.json and trees-builders.png.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.errors import check_at_least
from jaxspec.files import read_json, writable, write_atomically
from jaxspec.plotting import picture
from jaxspec.trees import dynamic_sparse_tree, expected, random_tree, sparse_tree, stripped_tree
from jaxspec.trees.plan import check_accuracy

STYLES = {"exact": "C0-", "stripped": "C1--", "full": "C2-", "random": "C3-"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare builders of trees by the tokens per step that they are expected to make.

    Attributes:
      adapter: folder of an adapter of a method with probes.
      sizes: candidates and probes of a tree together, the root and its probes not counted.
      seeds: random trees of each size, whose mean is taken.
      output: folder for the figures and their picture.
    """

    adapter: str = "adapters/ppd-smollm2-135m"
    sizes: tuple[int, ...] = tuple(range(4, 129, 4))
    seeds: int = 20
    output: str = "docs"


def main(args: list[str]) -> None:
    """Parse, build, draw."""
    options = parse(Options, args, prog="python -m experiments.trees")
    folder = writable(Path(options.output))
    check_at_least(options, {"seeds": 1})
    accuracy = check_accuracy(read_json(Path(options.adapter) / "adapter.json").get("accuracy"))
    found = compare(accuracy, options.sizes, options.seeds)
    content = {"adapter": options.adapter, "sizes": options.sizes, "tokens_per_step": found}
    write_atomically(folder / "trees-builders.json", (json.dumps(content, indent=1) + "\n").encode())
    draw(found, options.sizes, folder / "trees-builders.png")


def compare(accuracy: np.ndarray, sizes: Sequence[int], seeds: int) -> dict[str, list[float]]:
    """Expected tokens per step of every builder and size.

    Args:
      accuracy: [M, K] of the adapter.
      sizes: candidates and probes of a tree.
      seeds: random trees of each size.

    Returns:
      `exact` and `stripped`, the dynamic tree at its best and as the thesis builds it; `full`, the likeliest
      candidates with M probes each (5.3), and `random`, random ones with as many.
    """
    distances, ranks = accuracy.shape
    found: dict[str, list[float]] = {name: [] for name in STYLES}
    for rows in sizes:
        nodes = 1 + rows // (1 + distances)
        grown = [expected(random_tree(distances, ranks, nodes, seed), accuracy) for seed in range(seeds)]
        found["exact"].append(dynamic_sparse_tree(accuracy, rows).expected_tokens)
        found["stripped"].append(stripped_tree(accuracy, rows).expected_tokens)
        found["full"].append(sparse_tree(accuracy, nodes).expected_tokens)
        found["random"].append(float(np.mean([plan.expected_tokens for plan in grown])))
    return {name: np.round(tokens, 4).tolist() for name, tokens in found.items()}


def draw(found: dict[str, list[float]], sizes: Sequence[int], file: Path) -> None:
    """Draw tokens per step against the size."""
    with picture(file, 1, 1, (6, 4), dpi=90) as [axes]:
        for name, style in STYLES.items():
            axes.plot(sizes, found[name], style, label=name)
        axes.set(xlabel="candidates and probes", ylabel="expected tokens per step")
        axes.legend(fontsize=8)


if __name__ == "__main__":
    run_main(main)
