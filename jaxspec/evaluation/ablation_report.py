"""docs/ablations.md from saved results: tables, curves, and which of the papers' conclusions hold on this base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.evaluation.ablation_decoding import (
    ACCEPTED,
    DECODING_STUDIES,
    TEMPERATURES,
    TOGETHER,
    Cell,
    DecodingStudy,
)
from jaxspec.evaluation.ablations import STUDIES, Claim, Study
from jaxspec.evaluation.bench_report import interval
from jaxspec.evaluation.claims import CLOSE, HOW_SPEEDS_COMPARE, compared_speeds, top
from jaxspec.evaluation.markdown import row, rule
from jaxspec.evaluation.metrics import Estimate, estimate

_WORDS = ("holds", "does not hold", "no difference", "undecided", "not judged")
_NOT_FASTER = {"holds": "does not hold", "does not hold": "holds", "no difference": "holds"}


def verdict(difference: float, close: float, gains: bool = True) -> str:
    """What a difference says of the claim that it is positive, or (no gains) of the claim that it is not."""
    if not gains:
        return "holds" if difference < close else "does not hold"
    if abs(difference) < close:
        return "no difference here"
    return "holds" if difference > 0 else "does not hold"


def not_learnt(accuracy: Sequence[Sequence[float]]) -> list[int]:
    """Distances predicted far worse than a farther one, or next to never where the one before is: no method does so."""
    tops = top(accuracy, 5)
    overtaken = {d for d in range(1, len(tops)) if tops[d - 1] < 2 / 3 * max(tops[d:])}
    return sorted(overtaken | {d for d in range(2, len(tops) + 1) if tops[d - 1] < tops[d - 2] / 5})


def training_section(study: Study, results: dict[str, Any]) -> list[str]:
    """The table of a study and its verdicts."""
    distances = max(len(r["accuracy"]) for r in results.values())
    heads = [f"top-1 d={d + 1}" for d in range(distances)] + [f"top-5 d={d + 1}" for d in range(distances)]
    counts = sorted({(r["answers_seen"], r["answers"]) for r in results.values()})
    trained = f"Trained on {' or '.join(f'{seen:,} of {count:,}' for seen, count in counts)} answers."
    lines = [f"### {study.title}", "", f"{study.source}. {trained}", ""]
    tuned = any("perplexity" in r for r in results.values())
    heads += ["trained parameters", *(["learning rate"] if study.rates else [])]
    heads += ["perplexity, frozen base", "its own"] if tuned else []
    lines += [row([study.axis or "variant", *heads]), rule(len(heads) + 1)]
    for label, r in results.items():
        cells = [*top(r["accuracy"], 1), *[""] * (distances - len(r["accuracy"]))]
        cells += [*top(r["accuracy"], 5), *[""] * (distances - len(r["accuracy"]))]
        cells = [f"{cell:.3f}" if cell != "" else "" for cell in cells]
        cells.append(f"{r['parameters']:,}")
        cells += [study.rates.get(label, study.learning_rate)] if study.rates else []
        cells += [f"{value:.3f}" for value in r.get("perplexity", {}).values()] or [""] * 2 * tuned
        lines.append(row([label, *cells]))
    lines.append("")
    failed = {label: found for label, r in results.items() if (found := not_learnt(r["accuracy"]))}
    for label, found in failed.items():
        lost = " and ".join(map(str, found))
        unused = ", and no verdict rests on it" if study.claims else ""
        lines += [f"{label}: the probe at distance {lost} was lost early in training{unused}.", ""]
    for claim in study.claims:
        if not {claim.one, claim.other} <= results.keys():
            continue  # of an older study
        one, other = results[claim.one], results[claim.other]
        if claim.perplexity:
            lines.append(_perplexity_claim(claim, one, other))
            continue
        if failed.keys() & {claim.one, claim.other}:
            lines.append(f"- {claim.text}: **not judged**")
            continue
        both = min(len(one["accuracy"]), len(other["accuracy"]))
        gap = top(one["accuracy"][:both], claim.best) - top(other["accuracy"][:both], claim.best)
        difference = float(gap[claim.distance - 1] if claim.distance else np.mean(gap))
        where = f" at distance {claim.distance}" if claim.distance else ", mean over distances"
        of = f"top-{claim.best}{where}"
        lines.append(_claim(claim, difference, CLOSE, of))
    if tuned:
        lines += ["", "Perplexities are of held-out answers that the frozen base gave greedily. Tuning on their like"]
        lines += ["makes them likelier: what is compared is one way of tuning with another, of each one training."]
    return [*lines, ""]


def _perplexity_claim(claim: Claim, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether a perplexity is no higher than another, on the same answers."""
    if not all("answer_entropies" in r for r in (one, other)):
        return f"- {claim.text}: **not judged**"
    sums = np.stack([r["answer_entropies"] for r in (one, other)], axis=1)  # [n, 2, 2]
    found = estimate(sums, _perplexity_ratio)
    word = "undecided"
    if found.low is not None and found.high < 1 + CLOSE:
        word = "holds"
    if found.low is not None and found.low > 1 + CLOSE:
        word = "does not hold"
    return f"- {claim.text}: **{word}** ({interval(found, 3)} times its perplexity, {len(sums)} answers)"


def _perplexity_ratio(sums: np.ndarray, axis: int = 0) -> np.ndarray:
    """Of sums of -log P and numbers of tokens [..., n, 2, 2], n at `axis`."""
    total = sums.sum(axis=axis)
    entropy = total[..., 0] / total[..., 1]
    return np.exp(entropy[..., 0] - entropy[..., 1])


def decoding_section(study: DecodingStudy, results: dict[str, Any], trainings: dict[str, Any]) -> list[str]:
    """The table of a decoding study and its verdicts; `trainings` are those that some of its entries decode with."""
    heads = [study.axis or "variant", "rows", "tokens per step", "tokens/s", "speedup", "identical"]
    code = next(iter(results.values())).get("code")
    made = f"Measured with version {code} of what decodes." if code else "The version of the code was not noted."
    lines = [f"### {study.title}", "", f"{study.source}. {made}", "", row(heads), rule(len(heads))]
    for label, r in results.items():
        figures = [r["rows"], f"{r['tokens_per_step']:.2f}", f"{r['tokens_per_second']:.1f}", f"{r['speedup']:.2f}"]
        lines.append(row([label, *figures, f"{r['identical']} of {r['prompts']}"]))
    lines.append("")
    trained = {label: trainings.get(e.study, {}).get(e.variant) for label, e in study.entries.items()}
    lost = {label for label, r in trained.items() if r and not_learnt(r["accuracy"])}
    for label in sorted(lost):
        lines += [f"{label}: its training lost a probe, and no verdict rests on it.", ""]
    for claim in study.claims:
        if lost & {claim.one, claim.other}:
            lines.append(f"- {claim.text}: **not judged**")
            continue
        found = compared_speeds(results[claim.one], results[claim.other])
        word = found.holds if claim.gains else _NOT_FASTER.get(found.holds, found.holds)
        lines.append(f"- {claim.text}: **{word}** ({found.measured})")
    return [*lines, ""]


def _claim(claim: Claim, difference: float, close: float, metric: str) -> str:
    return f"- {claim.text}: **{verdict(difference, close, claim.gains)}** ({metric} {difference:+.3f})"


def steps_section(results: dict[str, dict[str, float]]) -> list[str]:
    """What rows that join late save."""
    rows = list(next(iter(results.values())))
    lines = ["### Milliseconds of a step by rows", "", "A quarter of the rows are nodes, the others their probes.", ""]
    lines += [row(["method", *(f"{r} rows" for r in rows)]), rule(len(rows) + 1)]
    lines += [row([name, *(f"{1e3 * seconds[r]:.1f}" for r in rows)]) for name, seconds in results.items()]
    early, late = results["PPD"], results["Hidden Transfer, layers 10/14/18"]
    saved = {r: 1 - late[r] / early[r] for r in rows}
    word = "holds" if min(saved.values()) > 0 else "does not hold"
    figures = ", ".join(f"{100 * share:.0f}% less at {r} rows" for r, share in saved.items())
    lines += ["", f"- a step of Hidden Transfer costs less than one of PPD with as many rows: **{word}** ({figures})"]
    return [*lines, ""]


def acceptance_section(results: dict[str, dict[str, list[Cell]]]) -> list[str]:
    """Which of the lossless rules makes more tokens per step, and where."""
    lines = ["### Sampling with `match` or `rejection`: tokens per step, and accepted of offered drafts", ""]
    asked = next(iter(results.values()))["match"][0]["prompts"]
    lines += ["Both keep the distribution; `match` also keeps the text of every seed. Ahead is the rule that makes"]
    lines += [f"more tokens per step: the ratio of rejection's to match's, with its 95% interval, on {asked} held-out"]
    lines += [f"prompts, every {TOGETHER} with a seed of their own; no filters. SPACE samples from its tuned base."]
    lines += ["Chains are short: when sampling, what is deeper is rarely reached. Of so many comparisons one may be"]
    lines += ["ahead by chance.", ""]
    lines += [row(["", "rule", *(f"T = {t:g}" for t in TEMPERATURES)]), rule(2 + len(TEMPERATURES))]
    for label, rules in results.items():
        for name, found in rules.items():
            cells = (f"{cell['tokens_per_step']:.2f}, {100 * cell['accepted']:.0f}%" for cell in found)
            lines.append(row([label, name, *cells]))
        lines.append(row([label, "ahead", *(_ahead(Estimate(**cell["against_match"])) for cell in rules["rejection"])]))
    return [*lines, ""]


def _ahead(ratio: Estimate) -> str:
    """The rule that makes more tokens per step, from the ratio of rejection's to match's."""
    if ratio.low is None or ratio.low <= 1 <= ratio.high:
        return f"undecided, {interval(ratio)}"
    return f"{'rejection' if ratio.low > 1 else 'match'}, {interval(ratio)}"


def coverage_section(results: dict[str, float]) -> list[str]:
    """What a draft vocabulary holds."""
    lines = ["### Draft vocabulary: share of the tokens of held-out answers that it holds", ""]
    lines += ["The most frequent tokens of the answers that the adapters were trained on.", ""]
    lines += [row(["tokens", *results]), rule(1 + len(results))]
    return [*lines, row(["share", *(f"{share:.3f}" for share in results.values())]), ""]


def similarity_section(curves: list[dict[str, float]]) -> list[str]:
    """Hidden Transfer Figure 4 in words."""
    lines = ["### Pseudo states on their way up", "", "Hidden Transfer Figure 4, the adapter that ships.", ""]
    rises, figures = [], []
    for step, curve in enumerate(curves, 1):
        (first, start), *_, (_, end) = curve.items()
        best = max(curve, key=lambda layer: curve[layer])
        rises.append(end > start)
        figures.append(
            f"step {step}: {start:.2f} after layer {first}, {curve[best]:.2f} after layer {best}, where it is highest, "
            f"{end:.2f} after the last"
        )
    word = "holds" if all(rises) else "does not hold"
    lines.append(f"- they end closer to the real ones than they begin: **{word}** (cosine, {'; '.join(figures)})")
    return [*lines, ""]


def not_run(results: dict[str, Any]) -> list[str]:
    """Names of studies and measurements that the results lack, or have without what verdicts need."""
    missing = []
    for study in STUDIES:
        found, judged = results["trainings"].get(study.name, {}), any(claim.perplexity for claim in study.claims)
        if any(label not in found or judged > ("answer_entropies" in found[label]) for label in study.variants):
            missing.append(study.name)
    for study in DECODING_STUDIES:
        found = results["decoding"].get(study.name, {})
        if any(not found.get(label, {}).get("seconds") for label in study.entries):  # older results are without
            missing.append(study.name)
    lacking = {name: not results[name] for name in MEASURES}
    lacking["acceptance"] = not ACCEPTED.keys() <= results["acceptance"].keys()  # which is measured entry by entry
    return missing + [name for name in MEASURES if lacking[name]]


MEASURES = {  # what is neither a training nor a tree, and its section
    "coverage": coverage_section,
    "steps": steps_section,
    "similarity": similarity_section,
    "acceptance": acceptance_section,
}


def verdicts_table(sections: Sequence[Sequence[str]]) -> list[str]:
    """How many of the conclusions under every table hold, from the sections' own lines."""
    heads = ["conclusions of", *_WORDS]
    found = {}
    for title, *lines in sections:
        conclusions = [line for line in lines if line.startswith("- ")]
        found[title.removeprefix("### ")] = [sum(f"**{word}" in line for line in conclusions) for word in _WORDS]
    found = {title: counts for title, counts in found.items() if any(counts)}
    if not found:
        return []
    lines = ["## Which conclusions hold on this base", "", row(heads), rule(len(heads))]
    lines += [row([title, *(count or "" for count in counts)]) for title, counts in found.items()]
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    return [*lines, row(["all", *total]), "", "## Tables", ""]


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Write ablations.md and its plots.

    Args:
      results: what `ablate.py` saved.
      folder: where.

    Returns:
      The file.
    """
    setting = results["setting"]
    prompts = f" --prompts {setting['prompts']}" if setting["prompts"] else ""
    lines = [
        "# Ablations of the papers on a small base",
        "",
        f"Made by `python ablate.py{prompts}`; `python ablate.py --report` makes this page again from ablations.json.",
        "Other prompts make a page of their own, in another `--docs`.",
        "",
        f"Base: {setting['model']}. Where a table says nothing else a training has {setting['steps']} updates, each on",
        "two of the base's own answers at up to 128 positions. Accuracies are those of",
        f"{setting['eval_answers']} held-out answers at every position; speeds are medians over prompts, all entries",
        f"in turn ({setting['machine']}). Differences of accuracy below {CLOSE} count as none; every variant was",
        "trained once, and a difference of little more may be the seed's. A perplexity is",
        f"no higher than another where the 95% interval of their ratio, over answers, ends below {1 + CLOSE}, and",
        f"higher where it begins above. {HOW_SPEEDS_COMPARE}",
        "",
    ]
    missing = not_run(results)
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += [f"Not run yet, or without what verdicts need: {names}.", ""]
    trainings, decoding = results["trainings"], results["decoding"]
    sections = [training_section(study, trainings[study.name]) for study in STUDIES if trainings.get(study.name)]
    sections += [
        decoding_section(study, decoding[study.name], trainings)
        for study in DECODING_STUDIES
        if decoding.get(study.name)
    ]
    sections += [write(results[name]) for name, write in MEASURES.items() if results[name]]
    lines += verdicts_table(sections) + [line for section in sections for line in section]
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
    curves = [(_accuracy_curve, study, results["trainings"].get(study.name)) for study in STUDIES if study.axis]
    curves += [(_distances, study, results["trainings"].get(study.name)) for study in STUDIES if study.by_distance]
    curves += [(_speed_curve, study, results["decoding"].get(study.name)) for study in DECODING_STUDIES if study.axis]
    curves = [(draw, study, found) for draw, study, found in curves if found]
    if curves:
        lines = -(-len(curves) // 3)
        figure, grid = plt.subplots(lines, 3, figsize=(14, 4 * lines), squeeze=False)
        for axes, (draw, study, found) in zip(grid.flat, curves, strict=False):
            draw(axes, study, found)
        for axes in grid.flat[len(curves) :]:
            axes.axis("off")
        pictures.append(_save(figure, folder, "ablations-curves.png"))
    if results["similarity"]:
        figure, axes = plt.subplots(figsize=(6, 4))
        for step, curve in enumerate(results["similarity"], 1):
            axes.plot([int(layer) for layer in curve], list(curve.values()), marker=".", label=f"step {step}")
        axes.set(xlabel="layers passed", ylabel="cosine similarity", title="pseudo and real hidden states")
        axes.legend(fontsize=8)
        pictures.append(_save(figure, folder, "ablations-similarity.png"))
    return pictures


def _accuracy_curve(axes: Any, study: Study, results: dict[str, Any]) -> None:
    """Top-1 and top-5 per distance against the labels of a study, but for trainings that lost a probe."""
    results = {label: r for label, r in results.items() if not not_learnt(r["accuracy"])}
    x = [float(label) for label in results]
    for k, style in ((1, "-"), (5, "--")):
        tops = [top(r["accuracy"], k) for r in results.values()]
        for d in range(min(map(len, tops), default=0)):
            axes.plot(x, [t[d] for t in tops], style, color=f"C{d}", marker=".", label=f"top-{k}, d={d + 1}")
    axes.set(xlabel=study.axis, ylabel="accuracy", title=f"{study.title}", ylim=(0, None))
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


def _save(figure: Any, folder: Path, name: str) -> str:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(folder / name, dpi=90)
    plt.close(figure)
    return name
