"""The log of a run: a JSONL file, on request TensorBoard event files, and a plot of it at the end."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import UserError
from jaxspec.files import drop_half_line, read_whole_lines
from jaxspec.parallel.processes import is_leader
from jaxspec.plotting import picture

_MEAN = 20  # updates over which the plot averages accuracies on training text


class RunLog(contextlib.AbstractContextManager):
    """The log: rows of figures, each with its `step`. Only the first of several processes writes.

    Args:
      folder: folder of log.jsonl and tensorboard/.
      tensorboard: whether to write for TensorBoard as well.
      done: updates of the checkpoint that the run resumes from; TensorBoard drops figures of later ones.
    """

    def __init__(self, folder: Path, tensorboard: bool, done: int):
        self._file, self._writer = folder / "log.jsonl", None
        if is_leader():
            drop_half_line(self._file)
        if tensorboard and is_leader():
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def __exit__(self, *error: object) -> None:
        if self._writer:
            self._writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Raises UserError if it cannot be written."""
        if not is_leader():
            return
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"{self._file}: cannot be written ({error.strerror})") from None
        if self._writer:
            self._draw(dict(row))

    def _draw(self, row: dict[str, Any]) -> None:
        """Write each figure under its name, and by distance where it has several values."""
        step, answers = row.pop("step"), row.pop("held_out", None)
        part = f"held-out-{answers}" if answers else "training"  # fewer answers during training than at the end
        for name, value in row.items():
            values = {f"/{d}": v for d, v in enumerate(value, 1)} if isinstance(value, list) else {"": value}
            for distance, number in values.items():
                self._writer.add_scalar(f"{part}/{name}{distance}", number, step)


def plot_training(log: Path, file: Path) -> None:
    """Plot a run's log.jsonl as a PNG file: loss, tokens per step, and accuracies on held-out and on training text.

    Raises UserError if the file cannot be written.
    """
    rows = read_whole_lines(log)
    updates = {r["step"]: r for r in rows if "loss" in r}  # a resumed run logs some steps twice
    try:
        with picture(file, 1, 3, (17, 4), dpi=110) as panels:
            _plot(panels, updates, [r for r in rows if "top1" in r])
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror}); the adapter beside it is whole") from None


def _plot(panels: Any, updates: dict[int, dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    left, middle, right = panels
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
