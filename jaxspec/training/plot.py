"""The picture of a training run: loss and held-out accuracy against steps."""

from __future__ import annotations

import io
import json
from pathlib import Path

from jaxspec.errors import UserError
from jaxspec.files import write_atomically


def plot_training(log: Path, picture: Path) -> None:
    """Draw a run.

    Args:
      log: log.jsonl of the run.
      picture: PNG to write.

    Raises:
      UserError: it cannot be written.
    """
    import matplotlib  # slow to import, needed once at the end

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in rows if "loss" in r}  # a resumed run logs some steps twice
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4))
    left.plot(list(losses), list(losses.values()), linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title="training loss")
    # fewer answers are asked on the way than at the end: a point of its own, where a line would show the others' rise
    *way, final = (r for r in rows if "top1" in r)
    way = list({r["step"]: r for r in way if r["held_out"] == way[0]["held_out"]}.values())
    for k, style in ((1, "-"), (10, "--")):
        for distance, accuracy in enumerate(final[f"top{k}"]):
            series, colour = [r[f"top{k}"][distance] for r in way], f"C{distance}"
            label = f"top-{k} at distance {distance + 1}"
            right.plot([r["step"] for r in way], series, style, color=colour, marker=".", label=label)
            right.plot(final["step"], accuracy, "x" if k == 1 else "+", color=colour)
    asked = f"{way[0]['held_out']} answers on the way; " if way else ""
    right.set(xlabel="step", ylabel="accuracy", title=f"held-out text: {asked}{final['held_out']} at the end (x, +)")
    right.set(xlim=(0, None), ylim=(0, 1))
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    plt.close(figure)
    try:
        write_atomically(picture, content.getvalue())
    except OSError as error:
        raise UserError(f"{picture}: cannot be written ({error.strerror}); the adapter beside it is whole") from None
