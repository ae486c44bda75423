"""docs/ablations.md from saved results: tables, curves, and which of the papers' conclusions hold on this base."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.decoding_studies import DECODING_STUDIES, SAMPLED, TEMPERATURES, TOGETHER
from experiments.plots import plot_ablations
from experiments.studies import SEEDS, STUDIES, Conclusion, Study
from experiments.verdicts import (
    BEST,
    CLOSE,
    HOW_SPEEDS_COMPARE,
    WORDS,
    Row,
    Spreads,
    Verdict,
    judge_decoding,
    judge_training,
    spreads,
)
from jaxspec.bench.metrics import Estimate
from jaxspec.bench.report import interval
from jaxspec.files import write_atomically
from jaxspec.markdown import table
from jaxspec.training.evaluate import lost_distances, top

Results = Mapping[str, Any]  # content of ablations.json


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
      title: its heading.
      paragraphs: the table, and what is to be said of it.
      verdicts: on the conclusions.
    """

    title: str
    paragraphs: list[str]
    verdicts: list[tuple[Conclusion, Verdict]] = dataclasses.field(default_factory=list)

    def markdown(self) -> str:
        """The part in Markdown."""
        said = [
            f"- {conclusion.text}: **{verdict.word}** ({verdict.measured}){', our question' * conclusion.ours}"
            for conclusion, verdict in self.verdicts
        ]
        return "\n\n".join([f"### {self.title}", *self.paragraphs, *["\n".join(said)] * bool(said)])


def is_whole(study: Study, rows: Mapping[str, Row]) -> bool:
    """Whether there are results of every row of a study."""
    return study.rows.keys() <= rows.keys()


def training_section(study: Study, trainings: Mapping[str, Row], close: Spreads) -> Section:
    """Accuracies by distance, what a training took, and verdicts; `close` is what `spreads` says."""
    distances = max(len(r["accuracy"]) for r in trainings.values())
    rates = {label: r["training"]["learning_rate"] for label, r in trainings.items()}
    rated, tuned = len({*rates.values()}) > 1, any("perplexity" in r for r in trainings.values())
    heads = [study.axis or "variant", *(f"top-{k} d={d + 1}" for k in BEST for d in range(distances))]
    heads += ["trained parameters", *["learning rate"] * rated, *["perplexity, frozen base", "its own"] * tuned]
    rows = []
    for label, r in trainings.items():
        tops = [[f"{value:.3f}" for value in top(r["accuracy"], k)] for k in BEST]
        cells = [label, *(cell for values in tops for cell in values + [""] * (distances - len(values)))]
        cells += [f"{r['parameters']:,}", *[rates[label]] * rated]
        perplexities = [f"{value:.3f}" for value in r["perplexity"].values()] if "perplexity" in r else ["", ""]
        rows.append(cells + perplexities * tuned)
    counts = sorted({f"{r['answers_seen']:,} of {r['answers']:,}" for r in trainings.values()})
    paragraphs = [f"{study.source}. Trained on {' or '.join(counts)} answers.", "\n".join(table(heads, rows))]
    lost = {label: ", ".join(map(str, lost_distances(r["accuracy"]))) for label, r in trainings.items()}
    if lost := "; ".join(f"{label} (distance {where})" for label, where in lost.items() if where):
        paragraphs.append(f"Training lost probes of {lost}. No verdict on accuracies rests on such a row.")
    if tuned:
        paragraphs.append(
            "Perplexities are of held-out answers that the frozen base gave greedily. Tuning on similar text makes "
            "them likelier: what is compared is one way of tuning with another, one training of each."
        )
    return Section(study.title, paragraphs, [(c, judge_training(c, trainings, close)) for c in study.conclusions])


def decoding_section(study: Study, rows: Mapping[str, Row], trainings: Mapping[str, Mapping[str, Row]]) -> Section:
    """Speeds and verdicts; `trainings` are those that some of the rows decode with."""
    heads = [study.axis or "variant", "rows", "tokens per step", "tokens/s", "speedup", "identical"]
    cells = "{rows} {tokens_per_step:.2f} {tokens_per_second:.1f} {speedup:.2f}"
    lines = [[label, *cells.format(**r).split(), f"{r['identical']} of {r['prompts']}"] for label, r in rows.items()]
    code = next(iter(rows.values()))["code"]
    paragraphs = [f"{study.source}. Code: {code}.", "\n".join(table(heads, lines))]
    trained = {label: entry.adapter for label, entry in study.rows.items() if not isinstance(entry.adapter, str)}
    found = {label: trainings.get(name, {}).get(variant) for label, (name, variant) in trained.items()}
    lost = [label for label, r in found.items() if r and lost_distances(r["accuracy"])]
    if lost:
        paragraphs.append(f"Training lost probes of {'; '.join(lost)}. No verdict rests on such a row.")
    return Section(study.title, paragraphs, [(c, judge_decoding(c, rows, lost)) for c in study.conclusions])


def steps_section(results: Mapping[str, Mapping[str, float]]) -> Section:
    """What rows that join late save."""
    conclusion = Conclusion(
        "Hidden Transfer, layers 10/14/18", "PPD",
        "a step of Hidden Transfer costs less than one of PPD with as many rows", ours=True,
    )  # fmt: skip
    saved = {rows: 1 - seconds / results["PPD"][rows] for rows, seconds in results[conclusion.one].items()}
    measured = ", ".join(f"{100 * share:.0f}% less at {rows} rows" for rows, share in saved.items())
    verdict = Verdict("holds" if min(saved.values()) > 0 else "does not hold", measured)
    lines = [[name, *(f"{1e3 * value:.1f}" for value in seconds.values())] for name, seconds in results.items()]
    paragraphs = [
        "A quarter of the rows are nodes, the others their probes.",
        "\n".join(table(["method", *(f"{rows} rows" for rows in saved)], lines)),
    ]
    return Section("Milliseconds of a step by rows", paragraphs, [(conclusion, verdict)])


def acceptance_section(results: Mapping[str, Mapping[str, list[Row]]]) -> Section:
    """Which of the lossless rules makes more tokens per step, and where."""
    asked = next(iter(results.values()))["match"][0]["prompts"]
    head = (
        "Both keep the distribution; `match` also keeps the text of every seed. The rule that is ahead makes more "
        f"tokens per step: the ratio of rejection's to match's, with its 95% interval, on {asked} held-out prompts, "
        f"every {TOGETHER} with a seed of their own; no filters. SPACE samples from its tuned base. Chains are short: "
        "when sampling, deeper nodes are rarely reached. Of so many comparisons one may be ahead by chance."
    )
    lines = []
    for label, rules in results.items():
        for name, cells in rules.items():
            shares = (f"{cell['tokens_per_step']:.2f}, {100 * cell['accepted']:.0f}%" for cell in cells)
            lines.append([label, name, *shares])
        lines.append([label, "ahead", *(_ahead(Estimate(**cell["against_match"])) for cell in rules["rejection"])])
    title = "Sampling with `match` or `rejection`: tokens per step, and accepted of offered drafts"
    return Section(title, [head, "\n".join(table(["", "rule", *(f"T = {t:g}" for t in TEMPERATURES)], lines))])


def _ahead(ratio: Estimate) -> str:
    """The rule that makes more tokens per step, from the ratio of rejection's to match's."""
    if ratio.low is None or ratio.low <= 1 <= ratio.high:
        return f"undecided, {interval(ratio)}"
    return f"{'rejection' if ratio.low > 1 else 'match'}, {interval(ratio)}"


def coverage_section(results: Mapping[str, float]) -> Section:
    """What a draft vocabulary holds."""
    lines = table(["tokens", *results], [["share", *(f"{share:.3f}" for share in results.values())]])
    head = "The most frequent tokens of the answers that the adapters were trained on."
    title = "Draft vocabulary: share of the tokens of held-out answers that it holds"
    return Section(title, [head, "\n".join(lines)])


def similarity_section(curves: Mapping[str, Mapping[str, float]]) -> Section:
    """Hidden Transfer Figure 4 in words."""
    rises, figures = [], []
    for step, curve in curves.items():
        (first, start), *_, (_, end) = curve.items()
        best = max(curve, key=curve.__getitem__)
        rises.append(end > start)
        highest = f"{curve[best]:.2f} after layer {best}, where it is highest"
        figures.append(f"{step}: {start:.2f} after layer {first}, {highest}, {end:.2f} after the last")
    conclusion = Conclusion("last layer", "first layer", "they end closer to the real ones than they begin")
    verdict = Verdict("holds" if all(rises) else "does not hold", f"cosine, {'; '.join(figures)}")
    title, source = "Pseudo states on their way up", "Hidden Transfer Figure 4, the adapter that ships."
    return Section(title, [source], [(conclusion, verdict)])


MEASURES = {  # what is neither a training nor a race of trees, and its section
    "coverage": coverage_section,
    "steps": steps_section,
    "similarity": similarity_section,
    "acceptance": acceptance_section,
}


def sections_of(results: Results) -> list[Section]:
    """A section for everything that has been measured as a whole."""
    trainings, decoding, close = results["trainings"], results["decoding"], spreads(results["trainings"].get(SEEDS, {}))
    trained = [study for study in STUDIES if is_whole(study, trainings.get(study.name, {}))]
    raced = [study for study in DECODING_STUDIES if is_whole(study, decoding.get(study.name, {}))]
    return [
        *(training_section(study, trainings[study.name], close) for study in trained),
        *(decoding_section(study, decoding[study.name], trainings) for study in raced),
        *(write(results[name]) for name, write in MEASURES.items() if results[name]),
    ]


def not_run(results: Results) -> list[str]:
    """Names of studies and measurements that the results lack, or have without the times that verdicts need."""
    missing = [study.name for study in STUDIES if not is_whole(study, results["trainings"].get(study.name, {}))]
    for study in DECODING_STUDIES:
        rows = results["decoding"].get(study.name, {})
        if not is_whole(study, rows) or not all(r["seconds"] for r in rows.values()):
            missing.append(study.name)
    whole = results | {"acceptance": SAMPLED.keys() <= results["acceptance"].keys()}  # measured one by one
    return missing + [name for name in MEASURES if not whole[name]]


def verdicts_table(sections: Sequence[Section]) -> str:
    """How many of the papers' conclusions hold, table by table, and how many of our questions."""
    papers = {s.title: [verdict.word for c, verdict in s.verdicts if not c.ours] for s in sections}
    counted = {title: words for title, words in papers.items() if words}
    counted["**all of the papers'**"] = [word for words in papers.values() for word in words]
    counted["questions of ours"] = [verdict.word for s in sections for c, verdict in s.verdicts if c.ours]
    lines = [[title, *(words.count(word) or "" for word in WORDS)] for title, words in counted.items()]
    return "\n".join(table(["conclusions of", *WORDS], lines))


def write_report(results: Results, folder: Path) -> Path:
    """Write ablations.md and its plots into a folder. Returns the page."""
    sections, missing = sections_of(results), ", ".join(f"`{name}`" for name in not_run(results))
    parts = [introduction(results["setting"], spreads(results["trainings"].get(SEEDS, {})))]
    parts += [f"Not judged, since they were not run or recorded no intervals: {missing}."] if missing else []
    parts += ["## Which conclusions hold on this base", verdicts_table(sections), "## Tables"]
    parts += [section.markdown() for section in sections]
    pictures = plot_ablations(results, folder)
    parts += ["## Curves", "\n".join(f"![{name}]({name})" for name in pictures)] if pictures else []
    page = folder / "ablations.md"
    write_atomically(page, ("\n\n".join(parts) + "\n").encode())
    return page


def introduction(setting: Mapping[str, Any], close: Spreads) -> str:
    """What all tables have in common, and how conclusions are judged."""
    prompts = f" --prompts {setting['prompts']}" if setting["prompts"] else ""
    machine = f" ({setting['machine']})" if setting["machine"] else ""
    mean, single = (f"{close[1, mean]:.3f} (top-1) and {close[5, mean]:.3f} (top-5)" for mean in (True, False))
    return f"""# Ablations of the papers on a small base

Made by `python -m experiments.ablate{prompts}`; with `--report` it makes this page again from ablations.json.
Other prompts make a page of their own, in another `--docs`. Tables say how many answers there were to train on
(`--answers`), and under *identical* how many prompts were decoded (`--decode-prompts`).

Base: {setting["model"]}. Where a table says nothing else, a training has {setting["steps"]} updates, each on two of the
base's own answers at up to 128 positions, with a short warm-up and clipped gradients. Accuracies are of
{setting["eval_answers"]} held-out answers at every position; speeds are medians over prompts, all entries in
turn{machine}.

How conclusions are judged: every variant was trained once, and a difference of accuracies is *undecided* where the seed
alone may cause it: below {mean} as a mean over distances,
below {single} at one. These are twice the standard deviation of the
difference of two trainings that differ in the seed alone (first table), and at least {CLOSE}. How much other held-out
answers would change is not counted. A claim that nothing is gained holds where no more than that is gained. A
conclusion that holds by top-1 or by top-5 alone holds *in part*. A perplexity is no higher than another where the 95%
interval of their ratio, over answers, ends below {1 + CLOSE}, and higher where it begins above. {HOW_SPEEDS_COMPARE}"""
