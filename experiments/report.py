"""docs/ablations.md from saved results: tables, curves, and which of the papers' conclusions hold on this base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.claims import HOW_SPEEDS_COMPARE, compared_speeds
from experiments.decoding_studies import (
    ACCEPTED,
    DECODING_STUDIES,
    TEMPERATURES,
    TOGETHER,
    Cell,
    DecodingStudy,
)
from experiments.plots import plot_curves
from experiments.studies import SEEDS, STUDIES, Conclusion, Study
from experiments.verdicts import (
    BEST,
    CLOSE,
    Spreads,
    by_accuracy,
    by_perplexity,
    spreads,
)
from jaxspec.bench.metrics import Estimate
from jaxspec.bench.report import interval
from jaxspec.markdown import row, rule
from jaxspec.training.evaluate import lost_distances, top

_WORDS = ("holds", "does not hold", "in part", "no difference", "undecided", "not judged")
_NOT_FASTER = {"holds": "does not hold", "does not hold": "holds", "no difference": "holds"}
_OURS = "our question"


def training_section(study: Study, results: dict[str, Any], close: Spreads) -> list[str]:
    """The table of a study and its verdicts; `close` is what `spreads` says."""
    counts = sorted({(r["answers_seen"], r["answers"]) for r in results.values()})
    trained = f"Trained on {' or '.join(f'{seen:,} of {count:,}' for seen, count in counts)} answers."
    lines = [f"### {study.title}", "", f"{study.source}. {trained}", "", *_training_table(study, results), ""]
    for label, r in results.items():
        if lost := lost_distances(r["accuracy"]):
            probes = "probe at distance {} was" if len(lost) == 1 else "probes at distances {} were"
            probes = probes.format(" and ".join(map(str, lost)))
            lines += [f"{label}: the {probes} lost. No verdict on accuracies rests on it.", ""]
    there = [c for c in study.conclusions if {c.one, c.other} <= results.keys()]  # not of an older study
    for conclusion in there:
        pair = results[conclusion.one], results[conclusion.other]
        judged = by_perplexity(*pair) if conclusion.perplexity else by_accuracy(conclusion, *pair, close)
        lines.append(_said(conclusion, *judged))
    if any("perplexity" in r for r in results.values()):
        lines += ["", "Perplexities are of held-out answers that the frozen base gave greedily. Tuning on their like"]
        lines += ["makes them likelier: what is compared is one way of tuning with another, of each one training."]
    return [*lines, ""]


def _training_table(study: Study, results: dict[str, Any]) -> list[str]:
    """Accuracies by distance, and what a training took."""
    distances = max(len(r["accuracy"]) for r in results.values())
    rated, tuned = _has_rates(study), any("perplexity" in r for r in results.values())
    heads = [study.axis or "variant", *(f"top-{k} d={d + 1}" for k in BEST for d in range(distances))]
    heads += ["trained parameters", *(["learning rate"] if rated else [])]
    heads += ["perplexity, frozen base", "its own"] if tuned else []
    lines = [row(heads), rule(len(heads))]
    for label, r in results.items():
        missing = [""] * (distances - len(r["accuracy"]))
        cells = [label]
        for k in BEST:
            cells += [*(f"{value:.3f}" for value in top(r["accuracy"], k)), *missing]
        cells += [f"{r['parameters']:,}", *([study.settings(label)["learning_rate"]] if rated else [])]
        if tuned:
            cells += [f"{value:.3f}" for value in r["perplexity"].values()] if "perplexity" in r else ["", ""]
        lines.append(row(cells))
    return lines


def _has_rates(study: Study) -> bool:
    """Whether its variants have learning rates of their own."""
    return len({study.settings(label)["learning_rate"] for label in study.variants}) > 1


def _said(conclusion: Conclusion, word: str, measured: str) -> str:
    ours = f", {_OURS}" if conclusion.ours else ""
    return f"- {conclusion.text}: **{word}** ({measured}){ours}"


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
    lost = {label for label, r in trained.items() if r and lost_distances(r["accuracy"])}
    for label in sorted(lost):
        lines += [f"{label}: its training lost a probe, and no verdict rests on it.", ""]
    for conclusion in (c for c in study.conclusions if {c.one, c.other} <= results.keys()):
        if lost & {conclusion.one, conclusion.other}:
            lines.append(_said(conclusion, "not judged", "a probe was lost"))
            continue
        found = compared_speeds(results[conclusion.one], results[conclusion.other])
        word = found.holds if conclusion.gains else _NOT_FASTER.get(found.holds, found.holds)
        lines.append(_said(conclusion, word, found.measured))
    return [*lines, ""]


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
    said = "a step of Hidden Transfer costs less than one of PPD with as many rows"
    return [*lines, "", f"- {said}: **{word}** ({figures}), {_OURS}", ""]


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
        found = results["trainings"].get(study.name, {})
        needed = "answer_entropies" if any(c.perplexity for c in study.conclusions) else "accuracy"
        if any(needed not in found.get(label, {}) for label in study.variants):
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
    """How many of the papers' conclusions hold, table by table, and of our questions: from the sections' own lines."""
    found, ours = {}, []
    for title, *lines in sections:
        said = [line for line in lines if line.startswith("- ")]
        ours += [line for line in said if line.endswith(_OURS)]
        counts = _counted([line for line in said if not line.endswith(_OURS)])
        if any(counts):
            found[title.removeprefix("### ")] = counts
    if not found and not ours:
        return []
    lines = ["## Which conclusions hold on this base", "", row(["conclusions of", *_WORDS]), rule(1 + len(_WORDS))]
    if found:
        found |= {"**all of the papers'**": [sum(column) for column in zip(*found.values(), strict=True)]}
    found |= {"questions of ours": _counted(ours)} if ours else {}
    lines += [row([title, *(count or "" for count in counts)]) for title, counts in found.items()]
    return [*lines, "", "## Tables", ""]


def _counted(lines: Sequence[str]) -> list[int]:
    return [sum(f"**{word}**" in line for line in lines) for word in _WORDS]


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Write ablations.md and its plots.

    Args:
      results: what `ablate.py` saved.
      folder: where.

    Returns:
      The file.
    """
    trainings, decoding = results["trainings"], results["decoding"]
    close = spreads(trainings.get(SEEDS, {}))
    lines = _introduction(results["setting"], close, bool(trainings.get(SEEDS)))
    missing = not_run(results)
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += [f"Not run yet, or without what verdicts need: {names}.", ""]
    sections = [training_section(study, trainings[study.name], close) for study in STUDIES if trainings.get(study.name)]
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


def _introduction(setting: dict[str, Any], close: Spreads, repeated: bool) -> list[str]:
    """What all tables have in common, and how conclusions are judged."""
    prompts = f" --prompts {setting['prompts']}" if setting["prompts"] else ""
    machine = f" ({setting['machine']})" if setting["machine"] else ""
    source = "twice the standard deviation of the difference of two trainings that differ in the seed alone"
    source = f"These are {source} (first table), and at least {CLOSE}." if repeated else "Seeds are not compared yet."
    return [
        "# Ablations of the papers on a small base",
        "",
        f"Made by `python ablate.py{prompts}`; `python ablate.py --report` makes this page again from ablations.json.",
        "Other prompts make a page of their own, in another `--docs`. Tables say how many answers there were to train",
        "on (`--answers`), and under *identical* how many prompts decoded (`--decode-prompts`).",
        "",
        f"Base: {setting['model']}. Where a table says nothing else a training has {setting['steps']} updates, each on",
        "two of the base's own answers at up to 128 positions, with a short warm-up and gradients clipped. Accuracies",
        f"are of {setting['eval_answers']} held-out answers at every position; speeds are medians over prompts, all",
        f"entries in turn{machine}.",
        "",
        "How conclusions are judged: every variant was trained once, and a difference of accuracies is *undecided*",
        f"where the seed alone may make it: below {_listed(close, True)} as a mean over distances, below",
        f"{_listed(close, False)} at one.",
        source,
        "How much other held-out answers would change is not counted. A claim that nothing is gained holds where no",
        "more than that is. A conclusion that holds by top-1 or by top-5 alone holds *in part*. A perplexity is no",
        "higher than another where the 95% interval of their ratio, over answers, ends below",
        f"{1 + CLOSE}, and higher where it begins above. {HOW_SPEEDS_COMPARE}",
        "",
    ]


def _listed(close: Spreads, mean: bool) -> str:
    return f"{close[1, mean]:.3f} (top-1) and {close[5, mean]:.3f} (top-5)"
