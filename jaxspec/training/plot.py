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
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(list(losses), list(losses.values()), linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title="training loss")
    evaluations = {r["step"]: r for r in rows if "top1" in r}
    for k in (1, 10):
        values = [r[f"top{k}"] for r in evaluations.values()]
        for distance in range(len(values[0])):
            label, style = f"top-{k} at distance {distance + 1}", "-" if k == 1 else "--"
            series = [v[distance] for v in values]
            right.plot(list(evaluations), series, style, color=f"C{distance}", marker=".", label=label)
    right.set(xlabel="step", ylabel="accuracy", title="held-out text", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    plt.close(figure)
    try:
        write_atomically(picture, content.getvalue())
    except OSError as error:
        raise UserError(f"{picture}: cannot be written ({error.strerror}); the adapter beside it is whole") from None
