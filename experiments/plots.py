"""Pictures of ablations: curves against what a table varies, and pseudo states on their way up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.decoding_studies import DECODING_STUDIES
from experiments.studies import STUDIES
from jaxspec.plotting import picture
from jaxspec.training.evaluate import lost_distances, top

_STYLES = {1: "-", 5: "--"}  # of top-1 and top-5


def plot_ablations(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Accuracy against every quantity that has an axis, and similarity through the layers. Returns the pictures."""
    trainings, decoding, pictures = results["trainings"], results["decoding"], []
    panels = [(_accuracies, study, trainings.get(study.name)) for study in STUDIES if study.axis]
    panels += [(_by_distance, study, trainings.get(study.name)) for study in STUDIES if study.by_distance]
    panels += [(_speeds, study, decoding.get(study.name)) for study in DECODING_STUDIES if study.axis]
    panels = [panel for panel in panels if panel[-1]]
    if panels:
        pictures.append("ablations-curves.png")
        lines = -(-len(panels) // 3)
        with picture(folder / pictures[-1], lines, 3, (14, 4 * lines), dpi=90) as grid:
            for axes, (draw, study, found) in zip(grid, panels, strict=False):
                draw(axes, found)
                axes.set(ylim=(0, None), **({"xlabel": study.axis} if study.axis else {}))
                axes.set_title(study.title, fontsize=9)
            for axes in grid[len(panels) :]:
                axes.axis("off")
    if results["similarity"]:
        pictures.append("ablations-similarity.png")
        with picture(folder / pictures[-1], 1, 1, (6, 4), dpi=90) as [axes]:
            for step, curve in results["similarity"].items():
                axes.plot([int(layer) for layer in curve], list(curve.values()), marker=".", label=step)
            axes.set(xlabel="layers passed", ylabel="cosine similarity", title="pseudo and real hidden states")
            axes.legend(fontsize=8)
    return pictures


def _accuracies(axes: Any, trainings: Mapping[str, Any]) -> None:
    """Top-1 and top-5 per distance against the labels of a study, but for trainings that lost a probe."""
    kept = {float(label): r["accuracy"] for label, r in trainings.items() if not lost_distances(r["accuracy"])}
    for k, style in _STYLES.items():
        tops = [top(accuracy, k) for accuracy in kept.values()]
        for d in range(min(map(len, tops), default=0)):
            axes.plot([*kept], [t[d] for t in tops], style, color=f"C{d}", marker=".", label=f"top-{k}, d={d + 1}")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def _by_distance(axes: Any, trainings: Mapping[str, Any]) -> None:
    """Top-1 and top-5 of every row against the distance."""
    for number, (label, r) in enumerate(trainings.items()):
        for k, style in _STYLES.items():
            tops = top(r["accuracy"], k)
            name = label if k == 1 else None
            axes.plot(range(1, len(tops) + 1), tops, style, color=f"C{number}", marker=".", label=name)
    axes.set(xlabel="distance", ylabel="accuracy: top-1, dashed top-5")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=7)


def _speeds(axes: Any, rows: Mapping[str, Any]) -> None:
    """Speed and tokens per step against the labels of a study."""
    drafted = {float(label): r for label, r in rows.items() if label != "autoregressive"}
    for key, name in (("speedup", "speed against autoregressive"), ("tokens_per_step", "tokens per step")):
        axes.plot([*drafted], [r[key] for r in drafted.values()], marker=".", label=name)
    axes.legend(fontsize=7)
