"""Plot of a training run: loss, tokens per step, and accuracies on held-out and on training text, by update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import UserError
from jaxspec.files import read_whole_lines
from jaxspec.plotting import picture

_MEAN = 20  # updates over which accuracies on training text are averaged


def plot_training(log: Path, file: Path) -> None:
    """Draw a run's log.jsonl as a PNG file. Raises UserError if that cannot be written."""
    rows = read_whole_lines(log)
    updates = {r["step"]: r for r in rows if "loss" in r}  # a resumed run logs some steps twice
    try:
        with picture(file, 1, 3, (17, 4), dpi=110) as (left, middle, right):
            _draw(left, middle, right, updates, [r for r in rows if "top1" in r])
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror}); the adapter beside it is whole") from None


def _draw(
    left: Any, middle: Any, right: Any, updates: dict[int, dict[str, Any]], evaluations: list[dict[str, Any]]
) -> None:
    """Losses by update, tokens per step, and accuracies."""
    left.plot(list(updates), [r["loss"] for r in updates.values()], linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title="training loss")
    # evaluations during training are on fewer answers than the final one, which therefore is a point of its own
    *way, final = evaluations
    way = list({r["step"]: r for r in way if r["held_out"] == way[0]["held_out"]}.values())
    middle.plot([r["step"] for r in way], [r["tokens_per_step"] for r in way], marker=".")
    middle.plot(final["step"], final["tokens_per_step"], "x", color="C0")
    middle.set(xlabel="step", ylabel="tokens", title="tokens per step of the run's tree, by replay", xlim=(0, None))
    for k, style in ((1, "-"), (10, "--")):
        for distance, accuracy in enumerate(final[f"top{k}"]):
            series, colour = [r[f"top{k}"][distance] for r in way], f"C{distance}"
            label = f"top-{k} at distance {distance + 1}"
            right.plot([r["step"] for r in way], series, style, color=colour, marker=".", label=label)
            right.plot(final["step"], accuracy, "x" if k == 1 else "+", color=colour)
    for distance in range(len(final["top1"])):
        drawn = {step: r[key] for step, r in updates.items() if (key := f"top1@{distance + 1}") in r}
        mean = np.convolve(list(drawn.values()), np.ones(_MEAN) / _MEAN, "valid") if len(drawn) >= _MEAN else []
        right.plot(list(drawn)[_MEAN - 1 :], mean, color=f"C{distance}", alpha=0.4, linewidth=1)
    asked = f"{way[0]['held_out']} answers during training; " if way else ""
    title = f"held-out text: {asked}{final['held_out']} at the end (x, +)"
    right.set(xlabel="step", ylabel="accuracy", title=f"{title}\nfaint: training text, top-1, mean of {_MEAN} updates")
    right.set(xlim=(0, None), ylim=(0, 1))
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
