"""Pictures of ablations: curves against what a table varies, and pseudo states on their way up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.decoding_studies import DECODING_STUDIES, DecodingStudy
from experiments.studies import STUDIES, Study
from jaxspec.plotting import picture
from jaxspec.training.evaluate import lost_distances, top


def plot_curves(results: dict[str, Any], folder: Path) -> list[str]:
    """Accuracy against every quantity that has an axis, and similarity through the layers. Returns the pictures."""
    pictures = []
    curves = [(_accuracy_curve, study, results["trainings"].get(study.name)) for study in STUDIES if study.axis]
    curves += [(_distances, study, results["trainings"].get(study.name)) for study in STUDIES if study.by_distance]
    curves += [(_speed_curve, study, results["decoding"].get(study.name)) for study in DECODING_STUDIES if study.axis]
    curves = [(draw, study, found) for draw, study, found in curves if found]
    if curves:
        lines = -(-len(curves) // 3)
        pictures.append("ablations-curves.png")
        with picture(folder / pictures[-1], lines, 3, (14, 4 * lines), dpi=90) as grid:
            for axes, (draw, study, found) in zip(grid, curves, strict=False):
                draw(axes, study, found)
            for axes in grid[len(curves) :]:
                axes.axis("off")
    if results["similarity"]:
        pictures.append("ablations-similarity.png")
        with picture(folder / pictures[-1], 1, 1, (6, 4), dpi=90) as [axes]:
            for step, curve in enumerate(results["similarity"], 1):
                axes.plot([int(layer) for layer in curve], list(curve.values()), marker=".", label=f"step {step}")
            axes.set(xlabel="layers passed", ylabel="cosine similarity", title="pseudo and real hidden states")
            axes.legend(fontsize=8)
    return pictures


def _accuracy_curve(axes: Any, study: Study, results: dict[str, Any]) -> None:
    """Top-1 and top-5 per distance against the labels of a study, but for trainings that lost a probe."""
    results = {label: r for label, r in results.items() if not lost_distances(r["accuracy"])}
    x = [float(label) for label in results]
    for k, style in ((1, "-"), (5, "--")):
        tops = [top(r["accuracy"], k) for r in results.values()]
        for d in range(min(map(len, tops), default=0)):
            axes.plot(x, [t[d] for t in tops], style, color=f"C{d}", marker=".", label=f"top-{k}, d={d + 1}")
    axes.set(xlabel=study.axis, ylabel="accuracy", title=study.title, ylim=(0, None))
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def _distances(axes: Any, study: Study, results: dict[str, Any]) -> None:
    """Top-1 and top-5 of every variant against the distance."""
    for number, (label, r) in enumerate(results.items()):
        for k, style in ((1, "-"), (5, "--")):
            tops = top(r["accuracy"], k)
            name = label if k == 1 else None
            axes.plot(range(1, len(tops) + 1), tops, style, color=f"C{number}", marker=".", label=name)
    axes.set(xlabel="distance", ylabel="accuracy: top-1, dashed top-5", title=study.title, ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7)


def _speed_curve(axes: Any, study: DecodingStudy, results: dict[str, Any]) -> None:
    """Speed and tokens per step against the labels of a study."""
    drafted = {label: r for label, r in results.items() if label != "autoregressive"}
    for key, name in (("speedup", "speed against autoregressive"), ("tokens_per_step", "tokens per step")):
        axes.plot([float(label) for label in drafted], [r[key] for r in drafted.values()], marker=".", label=name)
    axes.set(xlabel=study.axis, title=study.title, ylim=(0, None))
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7)
