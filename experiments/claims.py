"""What the papers claim, and judges that say from benchmarks and ablations whether it holds on another base."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.studies import SEEDS, Conclusion
from experiments.verdicts import CLOSE, by_accuracy, spreads
from jaxspec.bench.metrics import Estimate, Figures, estimate, figures
from jaxspec.bench.report import ALL, CLOSE_SPEED, Results, control_of, interval, reference_of
from jaxspec.training.evaluate import top

CHAT = ("writing", "roleplay", "stem", "humanities")  # of MT-Bench: neither code, mathematics, puzzles nor extraction
HOW_SPEEDS_COMPARE = (  # as `faster` does
    f"One is faster where the whole interval lies more than {CLOSE_SPEED} above 1; there is no difference where all of "
    f"it lies within {CLOSE_SPEED}; otherwise it is undecided. Intervals are over questions, of one process and one "
    "training of each adapter."
)
_RUN = ("data", "limit", "methods", "peers", "assistant")  # settings in which benchmarks that are compared may differ


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What claims are judged by.

    Attributes:
      benchmarks: the first one is the main one; others of the same settings add groups of questions.
      ablations: content of ablations.json; empty without one.
    """

    benchmarks: Sequence[Results]
    ablations: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was measured of a claim.

    Attributes:
      measured: in words.
      holds: `holds`, `does not hold`, `undecided`, `no difference`, `in part`, `not judged`, or in how many cases.
    """

    measured: str
    holds: str


class Judge(abc.ABC):
    """Says whether a claim holds."""

    @abc.abstractmethod
    def judge(self, evidence: Evidence) -> Verdict | None:
        """The verdict; None where the evidence does not tell."""


@dataclasses.dataclass(frozen=True)
class Faster(Judge):
    """One way is faster than another, question by question."""

    one: str
    other: str

    def judge(self, evidence: Evidence) -> Verdict | None:
        """From the main benchmark."""
        results = evidence.benchmarks[0]
        if not {self.one, self.other} <= results.rows.keys():
            return None
        found = figures(results.rows[self.one], results.rows[self.other])
        if found is None:
            return None
        speed, steps = found.speedup, [results.figures[way][ALL].tokens_per_step for way in (self.one, self.other)]
        measured = f"{interval(speed)} times its speed, {steps[0]:.2f} against {steps[1]:.2f} tokens per step"
        control = control_of(results)
        return Verdict(measured, faster(speed, max(CLOSE_SPEED, abs(control.value - 1) if control else 0)))


@dataclasses.dataclass(frozen=True)
class Predicts(Judge):
    """Of two adapters of the main benchmark, one has the token among its best more often, from a distance on.

    How many candidates count as the best may have several values.
    """

    one: str
    other: str
    best: tuple[int, ...] = (1,)
    first: int = 1

    def judge(self, evidence: Evidence) -> Verdict | None:
        """From the held-out accuracies that the adapters bring."""
        ways = evidence.benchmarks[0].setting["ways"]
        found = [ways.get(way, {}).get("accuracy") for way in (self.one, self.other)]
        if None in found or min(map(len, found)) < self.first:
            return None
        return _by_ranks(*found, self.best, self.first)


@dataclasses.dataclass(frozen=True)
class Trained(Judge):
    """Of two variants of an ablation's study, one has the token among its best more often."""

    study: str
    one: str
    other: str

    def judge(self, evidence: Evidence) -> Verdict | None:
        """From the ablations, as their page judges it."""
        trainings = evidence.ablations.get("trainings", {})
        found = trainings.get(self.study, {})
        if not {self.one, self.other} <= found.keys():
            return None
        one, other = found[self.one], found[self.other]
        close = spreads(trainings.get(SEEDS, {}))
        word, measured = by_accuracy(Conclusion(self.one, self.other, ""), one, other, close)
        return Verdict(f"{measured} (an ablation of {one['training']['steps']} updates)", word)


@dataclasses.dataclass(frozen=True)
class Decoded(Judge):
    """Of two variants of an ablation's study of decoding, one is faster, prompt by prompt."""

    study: str
    one: str
    other: str

    def judge(self, evidence: Evidence) -> Verdict | None:
        """From the ablations."""
        found = evidence.ablations.get("decoding", {}).get(self.study, {})
        if not {self.one, self.other} <= found.keys():
            return None
        one, other = found[self.one], found[self.other]
        verdict = compared_speeds(one, other)
        small = f"an ablation: {one['prompts']} prompts, {one['speedup']:.2f} and {other['speedup']:.2f} times "
        small += "autoregressive speed"
        if "code" not in one:
            small += ", of which version of decoding's code was not noted"
        elif one["code"] != evidence.benchmarks[0].setting["code"]:
            small += ", with another version of decoding's code than the main benchmark"
        return dataclasses.replace(verdict, measured=f"{verdict.measured} ({small})")


@dataclasses.dataclass(frozen=True)
class GainsMore(Judge):
    """Methods gain more speed on a group of questions than on MT-Bench's conversations.

    The limits of a difference follow from those of its two parts, which know nothing of each other: their distances
    from the figures add up as squares (Zou and Donner, 2008).
    """

    group: str

    def judge(self, evidence: Evidence) -> Verdict | None:
        """From all benchmarks of the main one's settings, each side from the one that has the most questions of it."""
        chosen = self._sides(evidence)
        if not chosen:
            return None
        pairs = {way: (ours, chat) for way, ((ours, _), (chat, _)) in chosen.items()}
        measured = ", ".join(
            f"{way} {ours.speedup.value:.2f} against {chat.speedup.value:.2f} "
            f"(tokens per step {ours.tokens_per_step:.2f} against {chat.tokens_per_step:.2f})"
            for way, (ours, chat) in pairs.items()
        )
        steps = sum(ours.tokens_per_step > chat.tokens_per_step for ours, chat in pairs.values())
        measured += f"; tokens per step are higher for {steps} of {len(pairs)}"
        counts = sorted({(ours.questions, chat.questions) for ours, chat in pairs.values()})
        measured += "; " + ", ".join(f"{ours} questions against {chat}" for ours, chat in counts)
        if any(code != other for (_, code), (_, other) in chosen.values()):
            measured += "; decoding's code has changed between the two"
        if any(side.speedup.low is None for pair in pairs.values() for side in pair):
            return Verdict(f"{measured}, too few to judge", "not judged")
        more = sum(_above(ours.speedup, chat.speedup) for ours, chat in pairs.values())
        less = sum(_above(chat.speedup, ours.speedup) for ours, chat in pairs.values())
        counted = f"more for {more}, less for {less}, undecided for {len(pairs) - more - less}"
        clear = {(len(pairs), 0): "holds", (0, len(pairs)): "does not hold", (0, 0): "undecided"}
        return Verdict(measured, clear.get((more, less), counted))

    def _sides(self, evidence: Evidence) -> dict[str, tuple[_Side, _Side]]:
        """On the group and on conversations, with one and the same adapter."""
        found: dict[tuple[str, str], tuple[list[_Side], list[_Side]]] = {}
        for results in evidence.benchmarks:
            if _settings(results) != _settings(evidence.benchmarks[0]):
                continue
            for way, info in results.setting["ways"].items():
                if "adapter" in info:
                    sides = found.setdefault((way, info["adapter"]), ([], []))
                    for side, figures_of in zip(sides, (self._group, _conversations), strict=True):
                        side += [(f, results.setting["code"])] if (f := figures_of(results, way)) else []

        def most(side: list[_Side]) -> _Side:
            return max(side, key=lambda known: known[0].questions)

        return {way: (most(ours), most(chat)) for (way, _), (ours, chat) in found.items() if ours and chat}

    def _group(self, results: Results, way: str) -> Figures | None:
        """A way's figures on the group."""
        return results.figures.get(way, {}).get(self.group)


_Side = tuple[Figures, str]  # figures, and the version of the code that made them


def _conversations(results: Results, way: str) -> Figures | None:
    """A way's figures on MT-Bench's conversations."""
    ours, plain = (
        [[answer for answer in run if answer["category"] in CHAT] for run in results.rows[side]]
        for side in (way, reference_of(results.setting, way))
    )
    return figures(ours, plain)


def faster(ratio: Estimate, margin: float = CLOSE_SPEED) -> str:
    """The verdict on a ratio of speeds, by its whole interval, which must be so far from 1."""
    if ratio.low is None:
        return "undecided"
    if margin == CLOSE_SPEED and ratio.low > 1 - margin and ratio.high < 1 + margin:
        return "no difference"  # which a clock that is further off cannot show
    if ratio.low >= 1 + margin:
        return "holds"
    return "does not hold" if ratio.high <= 1 - margin else "undecided"


def compared_speeds(one: dict[str, Any], other: dict[str, Any]) -> Verdict:
    """Whether one way of decoding is faster than another, from what an ablation says of each."""
    steps = f"tokens per step {one['tokens_per_step']:.2f} against {other['tokens_per_step']:.2f}"
    if not one.get("seconds") or not other.get("seconds"):
        speeds = f"speedup {one['speedup']:.2f} against {other['speedup']:.2f}, without intervals"
        return Verdict(f"{speeds}; {steps}", "not judged")
    found = estimate(np.array(other["seconds"]) / np.array(one["seconds"]), np.median)
    return Verdict(f"{interval(found)} times its speed; {steps}", faster(found))


def _above(one: Estimate, other: Estimate) -> bool:
    """Whether the lower limit of a difference of two figures is above zero."""
    if one.low is None or other.low is None:
        return False
    return one.value - other.value > math.hypot(one.value - one.low, other.high - other.value)


def _settings(results: Results) -> dict[str, Any]:
    """What benchmarks have in common whose groups of questions are compared."""
    settings = {name: value for name, value in results.setting["settings"].items() if name not in _RUN}
    return settings | {name: results.setting[name] for name in ("fingerprint", "dtype", "device")}


def _by_ranks(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], best: Sequence[int], first: int
) -> Verdict:
    """What `compared` says for every number of candidates that count as the best, together."""
    verdicts = [compared(one, other, k, first) for k in best]
    words = {verdict.holds for verdict in verdicts}
    return Verdict("; ".join(v.measured for v in verdicts), words.pop() if len(words) == 1 else "in part")


def compared(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], k: int, first: int) -> Verdict:
    """Whether one accuracy is above another at some of the distances that both have, and below it at none.

    Args:
      one: [M][K], per distance and rank.
      other: likewise.
      k: ranks that count.
      first: the first distance that counts.
    """
    both = min(len(one), len(other))
    ours, theirs = (top(accuracy[first - 1 : both], k) for accuracy in (one, other))
    listed = [" / ".join(f"{value:.3f}" for value in values) for values in (ours, theirs)]
    where = "/".join(map(str, range(first, both + 1)))
    measured, gap = f"top-{k} at distance {where}: {listed[0]} against {listed[1]}", ours - theirs
    if np.abs(gap).max() < CLOSE:
        return Verdict(measured, "no difference")
    if gap.min() > -CLOSE:
        return Verdict(measured, "holds")
    return Verdict(measured, "does not hold" if gap.max() < CLOSE else "in part")


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says.

    Attributes:
      text: in our words.
      source: where.
      judge: who says whether it holds.
    """

    text: str
    source: str
    judge: Judge


CLAIMS = (
    Claim(
        "deep prompts predict better than masks alone", "our reading of BiTA, Table 3",
        Trained("bita_prompting", "deep, hard labels", "masks only, hard labels"),
    ),
    Claim(
        "deep prompts are faster than masks alone", "BiTA, Table 3",
        Decoded("bita_prompting_speed", "deep", "masks only"),
    ),
    Claim("Hidden Transfer is faster than Medusa", "Hidden Transfer, Table 1", Faster("hidden_transfer", "medusa")),
    Claim("Hidden Transfer predicts better than Medusa", "its Figure 3", Predicts("hidden_transfer", "medusa")),
    Claim("Amphista is faster than Medusa", "Amphista, Table 1", Faster("amphista", "medusa")),
    Claim("Amphista is faster than Hydra++", "Amphista, Table 1", Faster("amphista", "hydra")),
    Claim("Amphista predicts better than Medusa", "Amphista, Figure 1", Predicts("amphista", "medusa")),
    Claim("PPD is faster than Medusa", "PPD, Table 6.1", Faster("ppd", "medusa")),
    Claim("PPD predicts distant tokens better than Medusa", "PPD, 6.3", Predicts("ppd", "medusa", (1, 5, 10), 2)),
    Claim(
        "mathematics gains more than conversation", "BiTA, Table 7; SPACE, Table 4; PPD, 6.2; Amphista, A.2.2",
        GainsMore("math_reasoning"),
    ),
    Claim(
        "code gains more than conversation", "BiTA, Table 1; SPACE, Table 1; PPD, 6.2; Amphista, A.2.2",
        GainsMore("humaneval"),
    ),
)  # fmt: skip

# Speedups as the papers report them: method, base, device, figures, where they stand.
PAPERS = (
    (
        "PPD", "Vicuna-7B", "A100-40GB",
        "MT-Bench, sampled: 2.24 at 2.54 tokens per step (Medusa 2.09 at 2.51)", "Table 6.1, from its tokens/s",
    ),
    ("BiTA", "LLaMA-2-7B-chat", "A800", "XSum 2.19, MT-Bench 2.38, HumanEval-X 2.73", "Table 1"),
    ("SPACE", "LLaMA-2-7B", "A800", "XSum 1.94, HumanEval-X 3.18, at 2.23 and 3.54 tokens per step", "Table 1"),
    ("Hidden Transfer", "Vicuna-7B", "A100-80GB", "XSum 1.79, GSM8K 2.22 (Medusa 1.39 and 1.73)", "Table 1"),
    ("Amphista", "Vicuna-7B", "A100-40GB", "Spec-Bench 2.13 (Medusa 1.50, Hydra++ 2.03)", "Table 1"),
)  # fmt: skip
