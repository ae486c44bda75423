"""docs/claims.md from the results of the lab: which of the papers' headline claims hold under equal terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.lab.domain_claims import domain_sections
from experiments.lab.entries import SHIPPED, TRAINED
from experiments.lab.jobs import FIRST_NODES
from experiments.lab.lab import Lab
from experiments.lab.page import Row, finder, row_of, section
from experiments.lab.size_claims import size_sections
from experiments.lab.statistics import LEVEL, POWER, Difference, Spread, compare, holm, pooled_spread, shown
from experiments.lab.terms import NODES
from experiments.lab.tree_claims import tree_sections
from jaxspec.files import writable, write_atomically

Rows = Mapping[str, Row]


@dataclasses.dataclass(frozen=True)
class Claim:
    """That one method makes more tokens per step than another.

    Attributes:
      text: the claim, as a reader of the paper would say it.
      source: the paper, and its table or figure.
      better: the entry that is said to be ahead.
      worse: the other one.
      label: the draft that both are compared with, as scores name it.
    """

    text: str
    source: str
    better: str
    worse: str
    label: str = f"alone-{FIRST_NODES}"


# At most twelve: each one more makes the others harder to show.
HEADLINES = (
    Claim("Hidden Transfer is ahead of Medusa", "Hidden Transfer, Table 1", "hidden_transfer", "medusa"),
    Claim("Amphista is ahead of Medusa", "Amphista, Table 1", "amphista", "medusa"),
    Claim("Amphista is ahead of Hydra++", "Amphista, Table 1", "amphista", "hydra++"),
    Claim("Amphista is ahead of Medusa in large trees", "Amphista, Table 6", "amphista", "medusa", "alone-64"),
    Claim("Amphista is ahead of Hydra++ in large trees", "Amphista, Table 6", "amphista", "hydra++", "alone-64"),
    Claim("PPD is ahead of Medusa", "PPD, Table 6.1", "ppd", "medusa"),
    Claim("BiTA is ahead of Medusa", "BiTA, Figure 7", "bita", "medusa"),
)
_NAMES = {f"alone-{nodes}": f"{nodes} nodes" for nodes in NODES}
_NAMES |= {f"joined-{nodes}": f"{nodes} nodes, with lookup" for nodes in NODES}
_HEADS = ("claim", "source", "nodes", "rows", "tokens per step", "difference")
_TRAINED = ("updates", "seeds", "trained on")

_INTRO = f"""\
# The papers' claims

Which headline claims of the papers hold for the default model, SmolLM2-135M-Instruct, where all methods have the same
text, updates and scoring ([terms](leaderboard.md#terms)). `python -m experiments.lab page` writes this page from the
results in `experiments/results`.

- **What is compared** is tokens per step at a number of nodes. The papers compare speeds, or tokens per step, of larger
  models. Probe rows of PPD, BiTA and Hidden Transfer come on top of the nodes, and cost time: the tables have both.
- **Paired.** Both methods draft along the same held-out answers, and the difference is tested, two-sided, by its spread
  over answers. Intervals are of 95%, each by itself.
- **Seeds.** The spread between seeds, pooled over all methods that have several, is part of every interval.
- **Headline claims** follow the papers' main tables. They were listed, in `experiments/lab/claims.py`, when scores of
  the first seed were there already. Their p values have Holm's correction over all {len(HEADLINES)}: the chance that
  any verdict is an accident of the answers is at most {LEVEL:.0%}. A claim that is not measured counts with p = 1, so
  that no other becomes weaker when it is. A claim *holds*, or *the opposite holds*, where its corrected p is below
  {LEVEL}. Otherwise it is *undecided*, and the verdict says which difference would have been seen with a chance of
  {POWER:.0%}, at the strictest of Holm's levels, {LEVEL} / {len(HEADLINES)}.
- **Exploratory** is everything else, here and in [Ablations](ablations.md): nothing there is corrected, and of so many
  comparisons some come out by chance.
- Not tested here: claims about the quality of a tuned base, and about early exits, which predict and do not draft.
  Claims about speed are tested with the costs of rows, of trees and numbers of masks alone.
"""


@dataclasses.dataclass(frozen=True)
class _Tested:
    """A claim with the difference that was measured."""

    claim: Claim
    better: Row
    worse: Row
    difference: Difference
    spread: Spread

    @property
    def seeds(self) -> list[int]:
        return [len(self.better.scores), len(self.worse.scores)]


def write_claims(lab: Lab, docs: Path) -> Path:
    """Write claims.md. Returns the file. Raises UserError for results of other terms or settings."""
    file, found = writable(docs) / "claims.md", finder(lab)
    equal = {entry.name: row_of(found, entry, entry.name) for entry in TRAINED}
    shipped = {entry.name: row_of(found, entry, f"shipped/{entry.name}") for entry in TRAINED if entry.name in SHIPPED}
    parts = [_INTRO, _seeds(equal), _headlines(equal), _explored(equal), _of_shipped(shipped), *tree_sections(found)]
    parts += [*domain_sections(), *size_sections()]
    write_atomically(file, "\n".join(filter(None, parts)).encode())
    return file


def measure(claim: Claim, rows: Rows) -> _Tested | None:
    """The difference that a claim is about; None where one of the two is not scored so."""
    pair = [rows[name] for name in (claim.better, claim.worse) if name in rows]
    if len(pair) < 2 or not all(row.scores and row.has(claim.label) for row in pair):
        return None
    spread = pooled_spread([row.scores for row in rows.values() if row.scores], claim.label)
    return _Tested(claim, *pair, compare(pair[0].scores, pair[1].scores, claim.label, spread), spread)


def verdict(tested: _Tested, corrected: float, claims: int) -> str:
    """What is said of a headline claim.

    Args:
      tested: with what was measured.
      corrected: p value with Holm's correction.
      claims: how many are tested together.
    """
    difference, strictest = tested.difference, LEVEL / claims
    if corrected >= LEVEL:
        return f"**undecided**; a difference of {difference.detectable(strictest):.2f} would have been seen"
    said = "**holds**" if difference.value > 0 else "**the opposite holds**"
    if tested.spread.freedom:
        return said
    limit = difference.tolerated_spread(strictest, tested.seeds)
    return f"{said} for these trainings; it falls if the spread of seeds is above {limit:.2f}"


def _seeds(rows: Rows) -> str:
    """What is known of the spread between seeds."""
    spread = pooled_spread([row.scores for row in rows.values() if row.scores], f"alone-{FIRST_NODES}")
    if spread.freedom:
        return (
            f"The spread between seeds is {spread.deviation:.3f} tokens per step at {FIRST_NODES} nodes "
            f"(degrees of freedom: {spread.freedom}).\n"
        )
    return (
        "No method has been trained with several seeds yet: **the spread between seeds is not measured**, and\n"
        "intervals are over answers alone. A verdict says above which spread, as a standard deviation of tokens\n"
        "per step, it would fall.\n"
    )


def _headlines(rows: Rows) -> str:
    tests = [measure(claim, rows) for claim in HEADLINES]
    corrected = holm([1.0 if test is None else test.difference.p_value for test in tests])
    lines = [
        [*_named(claim), "", "", "", "", "**not measured**"]
        if test is None
        else [*_named(claim), *_measured(test), shown(p), verdict(test, p, len(HEADLINES)), *_trained(test)]
        for claim, test, p in zip(HEADLINES, tests, corrected, strict=True)
    ]
    return section(
        "Headline claims",
        "Updates, seeds and device are of the trainings of both methods.",
        [*_HEADS, "p, corrected", "verdict", *_TRAINED],
        lines,
    )


def _explored(rows: Rows) -> str:
    tests = [measure(claim, rows) for claim in _other_drafts(HEADLINES)]
    lines = [
        [*_named(test.claim), *_measured(test), shown(test.difference.p_value), *_trained(test)]
        for test in tests
        if test
    ]
    text = "The same pairs with drafts of other sizes, and beside prompt lookup. p values are not corrected."
    return section("Exploratory: other drafts", text, [*_HEADS, "p", *_TRAINED], lines)


def _of_shipped(rows: Rows) -> str:
    tests = [measure(claim, rows) for claim in HEADLINES]
    lines = [[*_named(test.claim), *_measured(test), shown(test.difference.p_value)] for test in tests if test]
    text = (
        "Adapters were trained once each, with text and updates of [their own](adapters.md): what is compared is these "
        "adapters, not methods."
    )
    return section("Exploratory: adapters that ship", text, [*_HEADS, "p"], lines)


def _other_drafts(claims: Sequence[Claim]) -> Iterable[Claim]:
    """The pairs of the claims with every draft that no claim is about."""
    pairs = {(claim.better, claim.worse): claim for claim in reversed(claims)}
    headlines = {(claim.better, claim.worse, claim.label) for claim in claims}
    for pair in reversed(pairs):
        for label in _NAMES:
            if (*pair, label) not in headlines:
                yield dataclasses.replace(pairs[pair], label=label)


def _named(claim: Claim) -> list[str]:
    return [claim.text, claim.source, _NAMES[claim.label]]


def _measured(test: _Tested) -> list[str]:
    """Rows, tokens per step and their difference."""
    label, difference = test.claim.label, test.difference
    rows = [row.scores[0]["drafts"][label]["rows"] for row in (test.better, test.worse)]
    low, high = difference.value - difference.half_width(), difference.value + difference.half_width()
    return [
        f"{rows[0]} and {rows[1]}",
        f"{test.better.value(label):.2f} against {test.worse.value(label):.2f}",
        f"{difference.value:+.3f} ({low:+.3f} to {high:+.3f})",
    ]


def _trained(test: _Tested) -> list[str]:
    """Updates, seeds and devices; one word where both have the same."""
    rows = (test.better, test.worse)
    updates = [f"{training['result']['updates']}" for row in rows for training in row.trainings]
    devices = [training["device"] for row in rows for training in row.trainings]
    return [", ".join(dict.fromkeys(updates)), " and ".join(map(str, test.seeds)), ", ".join(dict.fromkeys(devices))]
