"""Whether a conclusion or a claim holds, from the figures of ablations and benchmarks."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies import SEEDS, Conclusion
from jaxspec.bench.metrics import Estimate, Figures, estimate, figures
from jaxspec.bench.questions import group_of
from jaxspec.bench.report import CLOSE_SPEED, interval
from jaxspec.bench.results import ALL, Results, control_of, reference_of
from jaxspec.training.evaluate import lost_distances, top

WORDS = ("holds", "does not hold", "in part", "no difference", "undecided", "not judged")
BEST = (1, 5)  # how many candidates count as the best: every conclusion is judged by each
CLOSE = 0.01  # accuracies closer than this are called equal
CHAT = ("writing", "roleplay", "stem", "humanities")  # of MT-Bench: neither code, mathematics, puzzles nor extraction
HOW_SPEEDS_COMPARE = (
    f"One is faster where the whole interval lies more than {CLOSE_SPEED} above 1; there is no difference where all of "
    f"it lies within {CLOSE_SPEED}; otherwise it is undecided. Intervals are over questions, of one process and one "
    "training of each adapter."
)
_OPPOSITE = {"holds": "does not hold", "does not hold": "holds", "no difference": "holds"}
_MAY_DIFFER = ("data", "limit", "runs", "peers", "assistant")  # settings of benchmarks that are compared

Row = dict[str, Any]  # figures of one training, or of one way to decode
Spreads = dict[tuple[int, bool], float]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a claim holds.

    Attributes:
      word: one of `WORDS`, `not measured`, or in how many cases it holds.
      measured: what it rests on, in words.
    """

    word: str
    measured: str


NOT_MEASURED = Verdict("not measured", "")


def spreads(trainings: Mapping[str, Row]) -> Spreads:
    """How far two trainings that differ in the seed alone lie apart: twice the standard deviation of a difference.

    Args:
      trainings: of the study of seeds, by `NAME, seed N`. Those that lost a probe do not count.

    Returns:
      {(candidates that count as the best, whether it is the mean over distances): accuracy}, at least `CLOSE`, which
      is all there is where nothing was repeated.
    """
    groups = defaultdict(list)
    for label, training in trainings.items():
        if not lost_distances(training["accuracy"]):
            groups[label.partition(", seed")[0]].append(training["accuracy"])
    found = {}
    for k in BEST:
        tops = [np.array([top(a, k) for a in group]) for group in groups.values() if len(group) > 1]  # [seeds, M] each
        of_means = [each.mean(axis=1).var(ddof=1) for each in tops]
        of_distances = [each.var(axis=0, ddof=1).mean() for each in tops]
        for mean, variances in ((True, of_means), (False, of_distances)):
            found[k, mean] = max(CLOSE, 2 * math.sqrt(2 * np.mean(variances or [0])))
    return found


def judge_training(conclusion: Conclusion, trainings: Mapping[str, Row], close: Spreads) -> Verdict:
    """The verdict on a conclusion about the trainings of a study; `close` is what `spreads` says."""
    one, other = trainings[conclusion.one], trainings[conclusion.other]
    return by_perplexity(one, other) if conclusion.perplexity else by_accuracy(conclusion, one, other, close)


def by_accuracy(conclusion: Conclusion, one: Row, other: Row, close: Spreads) -> Verdict:
    """By top-1 and top-5, which must agree; a conclusion that holds by one of them alone holds `in part`."""
    accuracies = (one["accuracy"], other["accuracy"])
    if any(map(lost_distances, accuracies)):
        return Verdict("not judged", "a probe was lost")
    both, found = min(map(len, accuracies)), {}
    mean = both > 1 and not conclusion.distance
    for k in BEST:
        gaps = np.subtract(*(top(accuracy, k)[:both] for accuracy in accuracies))
        gap = gaps.mean() if mean else gaps[max(conclusion.distance - 1, 0)]
        found[f"top-{k} {gap:+.3f}"] = _sign(gap, close[k, mean], conclusion.gains)
    where, words = "mean over distances" if mean else f"at distance {conclusion.distance or 1}", {*found.values()}
    if len(words) == 1:
        return Verdict(words.pop(), ", ".join([where, *found]))
    word = "in part" if "holds" in words else "undecided"
    return Verdict(word, ", ".join([where, *(f"{gap}: {each}" for gap, each in found.items())]))


def _sign(gap: float, close: float, gains: bool) -> str:
    """What a difference says of the claim that it is positive, or (no gains) of the claim that it is not."""
    if not gains:
        return "holds" if gap < close else "does not hold"
    return "undecided" if abs(gap) < close else "holds" if gap > 0 else "does not hold"


def by_perplexity(one: Row, other: Row) -> Verdict:
    """Whether a perplexity is no higher than another, on the same answers."""
    sums = np.hstack([r["answer_entropies"] for r in (one, other)])  # [n, 4]
    ratio, word = estimate(sums.T, _perplexity_ratio), "undecided"
    if ratio.low is not None and ratio.high < 1 + CLOSE:
        word = "holds"
    if ratio.low is not None and ratio.low > 1 + CLOSE:
        word = "does not hold"
    return Verdict(word, f"{interval(ratio, 3)} times its perplexity, {len(sums)} answers")


def _perplexity_ratio(
    sums: np.ndarray, tokens: np.ndarray, other_sums: np.ndarray, other_tokens: np.ndarray, axis: int
) -> np.ndarray:
    """Of sums of -log P and numbers of tokens."""
    return np.exp(sums.sum(axis) / tokens.sum(axis) - other_sums.sum(axis) / other_tokens.sum(axis))


def judge_decoding(conclusion: Conclusion, rows: Mapping[str, Row], lost: Collection[str] = ()) -> Verdict:
    """The verdict on a conclusion about the speeds of a study; `lost` are rows whose training lost a probe."""
    one, other = rows[conclusion.one], rows[conclusion.other]
    if {conclusion.one, conclusion.other} & {*lost}:
        return Verdict("not judged", "a probe was lost")
    steps = f"tokens per step {one['tokens_per_step']:.2f} against {other['tokens_per_step']:.2f}"
    if not one["seconds"] or not other["seconds"]:
        speeds = f"speedup {one['speedup']:.2f} against {other['speedup']:.2f}, without intervals"
        return Verdict("not judged", f"{speeds}; {steps}")
    ratio = estimate(np.array(other["seconds"]) / np.array(one["seconds"]), np.median)
    word = faster(ratio) if conclusion.gains else _OPPOSITE.get(faster(ratio), "undecided")
    return Verdict(word, f"{interval(ratio)} times its speed; {steps}")


def faster(ratio: Estimate, margin: float = CLOSE_SPEED) -> str:
    """The verdict on a ratio of speeds: its whole interval must be farther from 1 than the margin."""
    if ratio.low is None:
        return "undecided"
    if margin == CLOSE_SPEED and ratio.low > 1 - margin and ratio.high < 1 + margin:
        return "no difference"  # which a less exact clock cannot show
    return "holds" if ratio.low >= 1 + margin else "does not hold" if ratio.high <= 1 - margin else "undecided"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What claims are judged by.

    Attributes:
      benchmarks: the first one is the main one; others of the same settings add groups of questions.
      ablations: `trainings` and `decoding` of ablations.json.
    """

    benchmarks: Sequence[Results]
    ablations: Mapping[str, Mapping[str, Mapping[str, Row]]]

    @property
    def main(self) -> Results:
        """The main benchmark."""
        return self.benchmarks[0]


def way_is_faster(one: str, other: str, evidence: Evidence) -> Verdict:
    """One way of the main benchmark is faster than another, question by question."""
    rows, control = evidence.main.rows, control_of(evidence.main)
    found = figures(rows[one], rows[other]) if {one, other} <= rows.keys() else None
    if found is None:
        return NOT_MEASURED
    steps = [f"{evidence.main.figures[way][ALL].tokens_per_step:.2f}" for way in (one, other)]
    word = faster(found.speedup, max(CLOSE_SPEED, abs(control.value - 1) if control else 0))
    return Verdict(word, f"{interval(found.speedup)} times its speed, {' against '.join(steps)} tokens per step")


def predicts_better(one: str, other: str, evidence: Evidence, best: Sequence[int] = (1,), first: int = 1) -> Verdict:
    """An adapter of the main benchmark is right more often than another: at some distances, and at none less often.

    Args:
      one: a way.
      other: another.
      evidence: its main benchmark says how accurate adapters are.
      best: how many candidates count as the best; the verdicts of all must agree.
      first: the first distance that counts.
    """
    accuracies = [evidence.main.setting["ways"].get(way, {}).get("accuracy", []) for way in (one, other)]
    both = min(map(len, accuracies))
    if both < first:
        return NOT_MEASURED
    where, words, measured = "/".join(map(str, range(first, both + 1))), set(), []
    for k in best:
        ours, theirs = (top(accuracy, k)[first - 1 : both] for accuracy in accuracies)
        listed = " against ".join(" / ".join(f"{value:.3f}" for value in values) for values in (ours, theirs))
        measured.append(f"top-{k} at distance {where}: {listed}")
        words.add(_signs(ours - theirs))
    return Verdict(words.pop() if len(words) == 1 else "in part", "; ".join(measured))


def _signs(gaps: np.ndarray) -> str:
    """What differences at several distances say of the claim that they are positive."""
    if np.abs(gaps).max() < CLOSE:
        return "no difference"
    return "holds" if gaps.min() > -CLOSE else "does not hold" if gaps.max() < CLOSE else "in part"


def training_is_better(study: str, one: str, other: str, evidence: Evidence) -> Verdict:
    """A training of an ablation predicts better than another."""
    trainings = evidence.ablations["trainings"]
    found = trainings.get(study, {})
    if not {one, other} <= found.keys():
        return NOT_MEASURED
    verdict = judge_training(Conclusion(one, other, ""), found, spreads(trainings.get(SEEDS, {})))
    steps = found[one]["training"]["steps"]
    return Verdict(verdict.word, f"{verdict.measured} (an ablation of {steps} updates)")


def decoding_is_faster(study: str, one: str, other: str, evidence: Evidence) -> Verdict:
    """A row of an ablation's table of speeds is faster than another, prompt by prompt."""
    found = evidence.ablations["decoding"].get(study, {})
    if not {one, other} <= found.keys():
        return NOT_MEASURED
    verdict = judge_decoding(Conclusion(one, other, ""), found)
    speeds = f"{found[one]['speedup']:.2f} and {found[other]['speedup']:.2f} times autoregressive speed"
    note = f"an ablation: {found[one]['prompts']} prompts, {speeds}, code {found[one]['code']}"
    return Verdict(verdict.word, f"{verdict.measured} ({note})")


def gains_more(group: str, evidence: Evidence) -> Verdict:
    """The ways of the main benchmark gain more speed on a group of questions than in MT-Bench's conversations."""

    def in_group(category: str) -> bool:
        return group_of(category) == group

    ways = [way for way, info in evidence.main.setting["ways"].items() if "adapter" in info]
    pairs = {way: (_on(in_group, way, evidence), _on(CHAT.__contains__, way, evidence)) for way in ways}
    pairs = {way: (ours, chat) for way, (ours, chat) in pairs.items() if ours and chat}
    if not pairs:
        return NOT_MEASURED
    measured = ", ".join(
        f"{way} {ours.speedup.value:.2f} against {chat.speedup.value:.2f} "
        f"(tokens per step {ours.tokens_per_step:.2f} against {chat.tokens_per_step:.2f})"
        for way, (ours, chat) in pairs.items()
    )
    steps = sum(ours.tokens_per_step > chat.tokens_per_step for ours, chat in pairs.values())
    counts = sorted({f"{ours.questions} questions against {chat.questions}" for ours, chat in pairs.values()})
    measured += f"; tokens per step are higher for {steps} of {len(pairs)}; {', '.join(counts)}"
    if any(side.speedup.low is None for pair in pairs.values() for side in pair):
        return Verdict("not judged", f"{measured}, too few to judge")
    more = sum(_above(ours.speedup, chat.speedup) for ours, chat in pairs.values())
    less = sum(_above(chat.speedup, ours.speedup) for ours, chat in pairs.values())
    clear = {(len(pairs), 0): "holds", (0, len(pairs)): "does not hold", (0, 0): "undecided"}
    counted = f"more for {more}, less for {less}, undecided for {len(pairs) - more - less}"
    return Verdict(clear.get((more, less), counted), measured)


def _on(belongs: Callable[[str], bool], way: str, evidence: Evidence) -> Figures | None:
    """A way's figures on some categories, from the benchmark that has the most questions of them."""
    found = []
    for results in evidence.benchmarks:
        if way in results.rows and _adapter(way, results) == _adapter(way, evidence.main):
            sides = (results.rows[name] for name in (way, reference_of(results.setting, way)))
            found.append(figures(*([[r for r in run if belongs(r["category"])] for run in runs] for runs in sides)))
    return max(filter(None, found), key=lambda side: side.questions, default=None)


def _adapter(way: str, results: Results) -> tuple[Any, ...]:
    """What must be the same for a way's figures to be compared between benchmarks."""
    return results.setting["ways"][way].get("adapter"), conditions(results)


def conditions(results: Results) -> dict[str, Any]:
    """What benchmarks have in common whose figures may be compared."""
    settings = {name: value for name, value in results.setting["settings"].items() if name not in _MAY_DIFFER}
    return settings | {name: results.setting[name] for name in ("fingerprint", "dtype", "device")}


def _above(one: Estimate, other: Estimate) -> bool:
    """Whether the lower limit of a difference of two figures is above zero.

    The limits follow from those of the two parts, which are independent: their distances from the figures add up as
    squares (Zou and Donner, 2008).
    """
    return one.value - other.value > math.hypot(one.value - one.low, other.high - other.value)
