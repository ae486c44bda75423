"""The picture of a tuning: latency, tokens per step, and predicted against measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxspec.plotting import picture
from jaxspec.tuning.candidates import Option
from jaxspec.tuning.latency import RowLatency
from jaxspec.tuning.race import Trial


def plot_tuning(latency: RowLatency, options: Sequence[Option], trials: Sequence[Trial], file: Path) -> None:
    """Draw latency, tokens per step, and predicted against measured speed.

    Args:
      latency: of the machine.
      options: all trees, the best predicted first.
      trials: what was measured, by the names of options.
      file: PNG to write.
    """
    best: dict[float, Option] = {}
    for option in options:
        best[option.rows] = max(option, best.get(option.rows, option), key=lambda option: option.predicted)
    rows = sorted(best)
    with picture(file, 1, 3, (14, 4), dpi=110) as (steps, tokens, speed):
        steps.plot(latency.rows, [1e3 * s for s in latency.seconds], marker=".")
        steps.set(xlabel="rows", ylabel="milliseconds per step", title="latency", ylim=(0, None))
        tokens.plot(rows, [best[r].tokens for r in rows], marker=".")
        tokens.set(xlabel="rows", ylabel="tokens per step", title="expected, best tree of each size")
        speed.plot(rows, [best[r].predicted for r in rows], marker=".", label="predicted")
        where = {option.name: option.rows for option in options}
        for trial in trials:
            color = "C2" if trial.name in where else "C1"
            speed.plot(where.get(trial.name, 1), trial.tokens_per_second, "o", color=color)
        # the first trial is autoregressive decoding
        speed.axhline(trials[0].tokens_per_second, color="C1", linewidth=0.8, label="autoregressive, measured")
        speed.set(xlabel="rows", ylabel="tokens per second", title="speed (dots: measured)", ylim=(0, None))
        speed.legend(fontsize=8)
