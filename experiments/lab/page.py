"""docs/leaderboard.md from the results of the lab."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.entries import DECODED, SHIPPED, TRAINED, UNTRAINED, Entry
from experiments.lab.jobs import FIRST_NODES, SEEDS, all_jobs
from experiments.lab.lab import Lab
from experiments.lab.statistics import pooled_spread, tokens_per_step
from experiments.lab.terms import NODES, Terms
from experiments.prompts import HELD_OUT, TRAINING
from jaxspec.files import writable, write_atomically
from jaxspec.markdown import table
from jaxspec.training.evaluate import top

_DISTANCES = 8  # whose accuracies are shown
_RESAMPLES = 2000
_APART = 0.03  # of a live check from its replay
_FIXED = NODES[-1]
_SMALL = f"alone-{FIRST_NODES}-small"
_TERMS = Terms()
_TEXT = _TERMS.text
Find = Callable[[str], dict[str, Any] | None]  # a job's row by its name, if it is done

_INTRO = """\
# Leaderboard

Drafters for one small base, the default model SmolLM2-135M-Instruct, all trained under the same terms and ranked by
what no hardware changes: how many tokens a step makes on held-out answers of the base.
"""
_HOW = f"""\
## Add to it

```
python -m experiments.lab list                                 # all jobs, and what is done
python -m experiments.lab run --minutes 60                     # work off the list; resumes where it stopped
python -m experiments.lab run --enter path/to/file.py:Class    # with a method of your own
python -m experiments.lab page                                 # write this page from the results
```

The class is a method as in [Adding a method](adding-a-method.md). `run --only hydra` does one entry alone; several
processes may work on the same list. CONTRIBUTING.md says how to send results in, and
[Benchmarking](benchmarking.md#the-lab) how to carry the list to a machine without network.

## Terms

- **Text.** The base's own greedy answers, at most {_TEXT.max_answer_tokens} tokens each, to prompts that everybody has:
  {TRAINING:,} to train on, most of the 240 that ship with jaxspec and others that `experiments/prompts.py` composes,
  and {HELD_OUT} to score on, about other subjects. Of the former {_TEXT.held_out} are set aside to choose the
  learning rate and to calibrate chances. The answers are part of the repository, so that all machines train on the
  same ones.
- **Training.** {_TERMS.updates} updates, each on {_TERMS.sequences} answers in one pass, at up to {_TERMS.insertions}
  positions, so that every answer is seen once. All tokens may be drafted. The learning rate is the best of at most five
  in trainings of {_TERMS.trial_updates} updates with seed 0: one in the middle, a third of it, three times as much, and
  further out as long as the best is at an edge. The rest of a method's recipe is its config's.
- **Score.** Tokens per step by [replay](unions.md#tuning) of drafts of {", ".join(map(str, NODES[:-1]))} and
  {NODES[-1]} nodes, the root included, chosen per step by the method's own chances, alone and joined with prompt
  lookup. Columns: *same tree* is a fixed tree that all methods fill, *own tree* one chosen by the method's accuracies,
  *of 8,192 tokens* is with that draft vocabulary. Probe rows come on top of the nodes. Methods that draft along paths
  are recorded with the very shape they are scored with. A method that tunes its base is scored on that base's answers.
  What replay cannot tell is decoded: {", ".join(f"`{name}`" for name in DECODED)}.
- **Check.** {_TERMS.live} answers are decoded beside every replay. Where the two differ by more than {_APART:.0%} the
  table says so.
- **Intervals** are of 95%: answers are drawn anew, the same ones for all methods, and the spread between seeds, pooled
  over all methods, is added. A method is *ahead* of the next one where the interval of their difference is above 0.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of an entry: a score and a training per seed.

    Attributes:
      name: of the entry.
      scores: results of its score jobs, by seed.
      trainings: rows of its train jobs, by seed.
      live: result of the check of the first seed, where there is one.
    """

    name: str
    scores: Sequence[Mapping[str, Any]]
    trainings: Sequence[Mapping[str, Any]]
    live: Mapping[str, Any] | None

    @property
    def accuracy(self) -> Sequence[Sequence[float]] | None:
        """[M][K] of the first seed: by its recordings, or of what only predicts by its training's evaluation."""
        found = self.scores[0] if self.scores else self.trainings[0]["result"]
        return found.get("accuracy")

    def has(self, label: str) -> bool:
        """Whether it was drafted so."""
        return label in self.scores[0]["drafts"]

    def value(self, label: str) -> float:
        """Tokens per step, the mean over seeds."""
        return float(np.mean([tokens_per_step(score, label) for score in self.scores]))

    def resampled(self, label: str) -> np.ndarray:
        """[n], the same with answers drawn anew: the same ones for every row."""
        return np.mean([_resampled(score, label) for score in self.scores], axis=0)


def _resampled(score: Mapping[str, Any], label: str) -> np.ndarray:
    tokens, steps = np.array(score["tokens"]), np.array(score["drafts"][label]["steps"])
    chosen = np.random.default_rng(0).integers(0, len(tokens), (_RESAMPLES, len(tokens)))
    return tokens[chosen].sum(axis=1) / steps[chosen].sum(axis=1)


def spread_of_seeds(rows: Sequence[Row], label: str) -> float:
    """The standard deviation between seeds, pooled over all methods that have several; 0 where none has."""
    return pooled_spread([row.scores for row in rows], label).deviation


def half_width(resampled: np.ndarray, spread: float, seeds: Sequence[int]) -> float:
    """Half the width of the 95% interval of a value, or of a difference of values; `seeds` has the seeds of each."""
    return float(1.96 * np.sqrt(np.var(resampled) + sum(spread**2 / count for count in seeds)))


def write_page(lab: Lab, docs: Path, own: Sequence[Entry] = ()) -> Path:
    """Write leaderboard.md. Returns the file. Raises UserError for results of other terms or settings."""
    file, found = writable(docs) / "leaderboard.md", finder(lab, own)
    entries = [row_of(found, entry, entry.name) for entry in (*own, *TRAINED, *UNTRAINED)]
    shipped = [row_of(found, entry, f"shipped/{entry.name}") for entry in TRAINED if entry.name in SHIPPED]
    parts = [_INTRO, *_tables(entries), *_shipped([row for row in shipped if row.scores]), _HOW]
    write_atomically(file, "\n".join(parts).encode())
    return file


def finder(lab: Lab, own: Sequence[Entry] = ()) -> Find:
    """How to look up what is done. It raises UserError for results of other terms or settings."""
    jobs = {job.name: job for job in all_jobs(own)}
    return lambda name: lab.row(name) if name in jobs and lab.is_done(jobs[name]) else None


def row_of(found: Find, entry: Entry, prefix: str) -> Row:
    """What is known of an entry, or with the prefix `shipped/NAME` of the adapter that ships for it."""
    seeds = [f"{prefix}/seed-{seed}" for seed in SEEDS] if entry.rate and prefix == entry.name else [prefix]
    scores = [score["result"] for seed in seeds if (score := found(f"{seed}/score"))]
    if entry.name in DECODED and prefix == entry.name:
        scores = _decoded(found, prefix)
    trainings = [row for seed in seeds if (row := found(f"{seed}/train"))]
    live = found(f"{seeds[0]}/live")
    return Row(entry.name, scores, trainings, live and live["result"])


def _decoded(found: Find, prefix: str) -> list[dict[str, Any]]:
    """Answers that were decoded, in the form of a score; nothing where not all of them were."""
    drafts, tokens = {}, []
    for part in ("alone", "joined"):
        for nodes in NODES:
            row = found(f"{prefix}/decode-{part}-{nodes}")
            if row is None:
                continue
            tokens = row["result"]["tokens"]
            drafts[f"{part}-{nodes}"] = {"rows": row["result"]["rows"], "steps": row["result"]["steps"]}
    return [{"tokens": tokens, "drafts": drafts}] if f"alone-{FIRST_NODES}" in drafts else []


def _tables(rows: Sequence[Row]) -> list[str]:
    label = f"alone-{FIRST_NODES}"
    ranked = sorted((row for row in rows if row.scores), key=lambda row: -row.value(label))
    if not ranked:
        return ["## Nothing is scored yet\n\nThe first score makes the tables.\n"]
    trained = [row for row in rows if row.trainings]
    return [
        section(
            "Tokens per step",
            f"Ranked by drafts of {FIRST_NODES} nodes, alone. *Ahead*: of the method in the next line. [Terms](#terms) "
            "has what the columns are.",
            ["", "method", "seeds", *_heads(), "ahead", "live check"],
            [
                [place, f"`{row.name}`", len(row.scores), *_cells(row, ranked), _ahead(row, after, ranked), _check(row)]
                for place, (row, after) in enumerate(zip(ranked, [*ranked[1:], None], strict=True), 1)
            ],
        ),
        section(
            "Accuracy",
            "How often the best candidate, one of the five best, or one of the ten best at each distance is the token "
            "that comes, of seed 0. Where candidates depend on those before them: given that these are right.",
            ["method", "top-1 by distance", "top-5", "top-10"],
            [
                [f"`{row.name}`", *(_tops(row.accuracy, k) for k in (1, 5, 10))]
                for row in (*ranked, *(row for row in trained if not row.scores))
                if row.accuracy
            ],
        ),
        section(
            "Training",
            "Of seed 0, with the learning rate that was chosen.",
            [
                "method", "parameters", "learning rate", "updates per second", "seconds to compile", "memory, GiB",
                "device",
            ],
            [[f"`{row.name}`", *_training(row.trainings[0])] for row in trained],
        ),
    ]  # fmt: skip


def _shipped(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    text = (
        "The adapters that come with jaxspec under the same terms of scoring, drafting all tokens that they have "
        "learned. They were trained with budgets of their own, so they do not compare as methods."
    )
    heads = ["method", *_heads(), "learned tokens", "live check"]
    lines = [
        [f"`{row.name}`", *_cells(row, rows), row.scores[0]["learned_tokens"] or "all", _check(row)] for row in rows
    ]
    return [section("Adapters that ship", text, heads, lines)]


def _labels() -> list[str]:
    chosen = [f"{part}-{nodes}" for part in ("alone", "joined") for nodes in NODES]
    return [*chosen, f"same-{_FIXED}", f"own-{_FIXED}", _SMALL]


def _heads() -> list[str]:
    chosen = [f"{nodes} nodes" for nodes in NODES] + [f"{nodes}, with lookup" for nodes in NODES]
    return [
        *chosen,
        f"same tree, {_FIXED}",
        f"own tree, {_FIXED}",
        f"{FIRST_NODES}, of {_TERMS.small_vocabulary:,} tokens",
    ]


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    return [_cell(row, rows, label) if row.has(label) else "" for label in _labels()]


def _cell(row: Row, rows: Sequence[Row], label: str) -> str:
    width = half_width(row.resampled(label), spread_of_seeds(rows, label), [len(row.scores)])
    return f"{row.value(label):.2f} ± {width:.2f}"


def _ahead(row: Row, after: Row | None, rows: Sequence[Row]) -> str:
    label = f"alone-{FIRST_NODES}"
    if after is None:
        return ""
    paired = row.scores[0]["tokens"] == after.scores[0]["tokens"]
    others = after.resampled(label)
    difference = row.resampled(label) - (others if paired else others[::-1])  # of other answers: independent draws
    width = half_width(difference, spread_of_seeds(rows, label), [len(row.scores), len(after.scores)])
    return "yes" if row.value(label) - after.value(label) > width else "no"


def _check(row: Row) -> str:
    """What a replay of the answers that were decoded says beside what decoding made of them."""
    if row.live is None:
        return ""
    label, count = f"alone-{row.live['nodes']}", len(row.live["tokens"])
    score = row.scores[0]
    replayed = sum(score["tokens"][:count]) / sum(score["drafts"][label]["steps"][:count])
    decoded = sum(row.live["tokens"]) / sum(row.live["steps"])
    same = f"{decoded:.2f}" if abs(decoded / replayed - 1) <= _APART else f"**{decoded:.2f}, replayed {replayed:.2f}**"
    return f"{same} ({row.live['identical']} of {count} identical)"


def _tops(accuracy: Sequence[Sequence[float]], k: int) -> str:
    values = [f"{value:.3f}".lstrip("0") for value in top(accuracy, k)]
    return " / ".join(values[:_DISTANCES] + ["..."] * (len(values) > _DISTANCES))


def _training(row: Mapping[str, Any]) -> list[str]:
    found, measured = row["result"], row["measured"]
    return [
        f"{found['parameters']:,}",
        f"{found['learning_rate']:g}",
        f"{measured['updates_per_second']:g}",
        f"{measured['compile_seconds']:.0f}",
        f"{measured['peak_memory'] / 2**30:.1f}",
        row["device"],
    ]


def section(title: str, text: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table under a title; empty where it has no rows."""
    return "\n".join([f"## {title}", "", textwrap.fill(text, 120), "", *table(heads, rows), ""]) if rows else ""
