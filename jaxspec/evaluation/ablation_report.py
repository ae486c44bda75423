"""docs/ablations.md from saved results: tables, curves, and which of the papers' conclusions hold on this base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.evaluation.ablation_decoding import DECODING_STUDIES, DecodingStudy
from jaxspec.evaluation.ablations import STUDIES, Claim, Study

_CLOSE = 0.01  # top-1 accuracies closer than this are called equal
_CLOSE_SPEED = 0.03  # and speeds, relative to autoregressive decoding


def top(accuracy: Sequence[Sequence[float]], k: int) -> np.ndarray:
    """[M], how often the token is among the k best candidates."""
    return np.array(accuracy)[:, :k].sum(axis=1)


def verdict(difference: float, close: float) -> str:
    """What a difference says of the claim that it is positive."""
    if abs(difference) < close:
        return "no difference here"
    return "holds" if difference > 0 else "does not hold"


def training_section(study: Study, results: dict[str, Any]) -> list[str]:
    """The table of a study and its verdicts."""
    labels = [label for label in study.variants if label in results]
    distances = max(len(results[label]["accuracy"]) for label in labels)
    heads = [f"top-1 d={d + 1}" for d in range(distances)] + [f"top-5 d={d + 1}" for d in range(distances)]
    lines = [f"### {study.title}", "", f"{study.source}.", ""]
    lines += [_row([study.axis or "variant", *heads, "trained parameters", "groups/s"]), _rule(len(heads) + 3)]
    for label in labels:
        r = results[label]
        cells = [*top(r["accuracy"], 1), *[""] * (distances - len(r["accuracy"]))]
        cells += [*top(r["accuracy"], 5), *[""] * (distances - len(r["accuracy"]))]
        cells = [f"{cell:.3f}" if cell != "" else "" for cell in cells]
        lines.append(_row([label, *cells, f"{r['parameters']:,}", f"{r['groups_per_second']:.0f}"]))
    lines.append("")
    for claim in study.claims:
        if claim.better in results and claim.worse in results:
            better, worse = (top(results[label]["accuracy"], 1) for label in (claim.better, claim.worse))
            difference = float(np.mean(better - worse))
            lines.append(_claim(claim, difference, _CLOSE, "top-1, mean over distances"))
    return [*lines, ""]


def decoding_section(study: DecodingStudy, results: dict[str, Any]) -> list[str]:
    """The table of a decoding study and its verdicts."""
    heads = [study.axis or "variant", "rows", "tokens per step", "tokens/s", "speedup", "identical"]
    lines = [f"### {study.title}", "", f"{study.source}.", "", _row(heads), _rule(len(heads))]
    for label, r in results.items():
        figures = [r["rows"], f"{r['tokens_per_step']:.2f}", f"{r['tokens_per_second']:.1f}", f"{r['speedup']:.2f}"]
        lines.append(_row([label, *figures, f"{r['identical']} of {r['prompts']}"]))
    lines.append("")
    for claim in study.claims:
        better, worse = results[claim.better], results[claim.worse]
        lines.append(_claim(claim, better["speedup"] - worse["speedup"], _CLOSE_SPEED, "speedup"))
        lines[-1] += f" (tokens per step {better['tokens_per_step']:.2f} against {worse['tokens_per_step']:.2f})"
    return [*lines, ""]


def _claim(claim: Claim, difference: float, close: float, metric: str) -> str:
    return f"- {claim.text}: **{verdict(difference, close)}** ({metric} {difference:+.3f})"


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _rule(count: int) -> str:
    return _row(["---"] * count)


def steps_section(results: dict[str, dict[str, float]]) -> list[str]:
    """What rows that join late save."""
    rows = list(next(iter(results.values())))
    lines = ["### Milliseconds of a step by rows", "", "A quarter of the rows are nodes, the others their probes.", ""]
    lines += [_row(["method", *(f"{r} rows" for r in rows)]), _rule(len(rows) + 1)]
    lines += [_row([name, *(f"{1e3 * seconds[r]:.1f}" for r in rows)]) for name, seconds in results.items()]
    return [*lines, ""]


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Write ablations.md and its plots.

    Args:
      results: what `ablate.py` saved.
      folder: where.

    Returns:
      The file.
    """
    setting = results["setting"]
    lines = [
        "# Ablations of the papers on a small base",
        "",
        f"Made by `python ablate.py`; `python ablate.py --report` makes this page again from ablations.json. "
        f"Base: {setting['model']}. Every training has {setting['steps']} updates of about "
        f"{setting['groups']} insertion points on the base's own answers ({setting['machine']}); accuracies are those "
        f"of {setting['answers']} held-out answers at every position. Top-1 differences below {_CLOSE} count as none.",
        "",
    ]
    for study in STUDIES:
        if results["trainings"].get(study.name):
            lines += training_section(study, results["trainings"][study.name])
    for study in DECODING_STUDIES:
        if results["decoding"].get(study.name):
            lines += decoding_section(study, results["decoding"][study.name])
    if results["steps"]:
        lines += steps_section(results["steps"])
    pictures = plot_curves(results, folder)
    if pictures:
        lines += ["## Curves", "", *(f"![{name}]({name})" for name in pictures), ""]
    file = folder / "ablations.md"
    file.write_text("\n".join(lines))
    return file


def plot_curves(results: dict[str, Any], folder: Path) -> list[str]:
    """Accuracy against every quantity that has an axis, and similarity through the layers. Returns the pictures."""
    import matplotlib  # slow to import, needed once at the end

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures = []
    curves = [study for study in STUDIES if study.axis and len(results["trainings"].get(study.name, {})) > 1]
    if curves:
        figure, grid = plt.subplots(-(-len(curves) // 3), 3, figsize=(14, 4 * -(-len(curves) // 3)), squeeze=False)
        for axes, study in zip(grid.flat, curves, strict=False):
            _accuracy_curve(axes, study, results["trainings"][study.name])
        for axes in grid.flat[len(curves) :]:
            axes.axis("off")
        pictures.append(_save(figure, folder, "ablations-accuracy.png"))
    if results["similarity"]:
        figure, axes = plt.subplots(figsize=(6, 4))
        for step, curve in enumerate(results["similarity"], 1):
            axes.plot([int(layer) for layer in curve], list(curve.values()), marker=".", label=f"step {step}")
        axes.set(xlabel="layers passed", ylabel="cosine similarity", title="pseudo and real hidden states")
        axes.legend(fontsize=8)
        pictures.append(_save(figure, folder, "ablations-similarity.png"))
    return pictures


def _accuracy_curve(axes: Any, study: Study, results: dict[str, Any]) -> None:
    """Top-1 and top-5 per distance against the labels of a study."""
    x = [float(label) for label in results]
    for k, style in ((1, "-"), (5, "--")):
        tops = [top(r["accuracy"], k) for r in results.values()]
        for d in range(min(map(len, tops))):
            axes.plot(x, [t[d] for t in tops], style, color=f"C{d}", marker=".", label=f"top-{k}, d={d + 1}")
    axes.set(xlabel=study.axis, ylabel="accuracy", title=f"{study.title}", ylim=(0, None))
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7)


def _save(figure: Any, folder: Path, name: str) -> str:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(folder / name, dpi=90)
    plt.close(figure)
    return name
