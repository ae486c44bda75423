"""The list of jobs, the most valuable first.

shipped      what ships, scored: no training                         PPD, Hidden Transfer, ...
rates        the learning rate of an entry, tried on seed 0
train        seed 0 of all entries, then 1, then 2
offers       what a trained entry offers along the held-out answers, recorded
score        tokens per step by replay of what was recorded
live         answers decoded: a check of the replay, or what replay cannot tell
ranks        which of the candidates of what ships the tokens that come are
trees        steps of the papers' fixed trees, counted from ranks
sizes        some of them decoded, in turn, and timed
variant      a row of the papers' ablations, trained
equality     are texts those of autoregressive decoding, on this device?
steps, drafter, program, race
             milliseconds and kernels of steps, tokens per second: alone on the machine
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.lab.entries import DECODED, SHIPPED, TRAINED, UNTRAINED, Entry
from experiments.lab.terms import NODES, Terms
from experiments.lab.tree_tables import DECODED_TREES, RANKED, TREES
from experiments.studies import STUDIES

SEEDS = (0, 1, 2)
FIRST_NODES = 16  # what is recorded first of methods that draft along paths


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One job as data.

    Attributes:
      name: of its result, parts divided by slashes.
      kind: what is done, a name of `KINDS`.
      decides: what its result is for.
      entry: what it is about; None for checks of a device.
      seed: of the training.
      settings: what else the kind takes, plain values.
      needs: jobs whose results it reads.
      alone: it measures time, and runs on a machine that does nothing else.
      accelerator: it is too large for a CPU.
    """

    name: str
    kind: str
    decides: str
    entry: Entry | None = None
    seed: int = 0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    alone: bool = False
    accelerator: bool = False

    @property
    def folder(self) -> str:
        """Where all jobs about the same adapter keep what they make."""
        return self.name.rpartition("/")[0]


def all_jobs(own: Iterable[Entry] = ()) -> list[Job]:
    """Every job, in order; with the entries of the reader's own in front."""
    rounds = [job for seed in SEEDS for entry in (*own, *TRAINED) if entry.rate for job in trained(entry, seed)]
    return [
        *(job for entry in (*own, *UNTRAINED) if not entry.rate for job in scored(entry, entry.name)),
        *(job for entry in TRAINED if entry.name in SHIPPED for job in shipped(entry)),
        *(job for entry in TRAINED if entry.name in TREES for job in counted(entry)),
        *EQUALITY,
        *rounds,
        *variants(),
        *TIMED,
    ]


def shipped(entry: Entry) -> Iterator[Job]:
    """The adapter that ships for a method, with drafts of 16 and 64 nodes."""
    kept = [name for name in recordings_of(entry) if name in ("all", f"best-{FIRST_NODES}", f"best-{NODES[-1]}")]
    yield from scored(entry, f"shipped/{entry.name}", recordings=kept)


def counted(entry: Entry) -> Iterator[Job]:
    """The papers' fixed trees of the adapter that ships for a method."""
    prefix, decides = f"shipped/{entry.name}", "what the papers say of trees"
    yield Job(f"{prefix}/ranks", "ranks", decides, entry, settings={"answers": RANKED})
    settings = {"trees": TREES[entry.name]}
    yield Job(f"{prefix}/trees", "trees", decides, entry, settings=settings, needs=(f"{prefix}/ranks",))
    if specs := DECODED_TREES.get(entry.name):
        settings = {"trees": specs, "answers": 6, "tokens": 64}
        yield Job(f"{prefix}/sizes", "sizes", decides, entry, settings=settings, alone=True)


def trained(entry: Entry, seed: int) -> Iterator[Job]:
    """A training, the learning rate first, and its score."""
    prefix, large = f"{entry.name}/seed-{seed}", entry.accelerator
    rates = f"{entry.name}/rates"
    if seed == 0:
        yield Job(rates, "rates", "the learning rate", entry, accelerator=large)
    yield Job(f"{prefix}/train", "train", "the leaderboard", entry, seed, needs=(rates,), accelerator=large)
    if entry.drafts:
        yield from scored(entry, prefix, seed, (f"{prefix}/train",))


def scored(
    entry: Entry, prefix: str, seed: int = 0, after: tuple[str, ...] = (), recordings: Sequence[str] = ()
) -> Iterator[Job]:
    """The jobs that score a drafter; what replay cannot tell is decoded instead.

    Args:
      entry: what drafts.
      prefix: of the jobs' names.
      seed: of its training.
      after: jobs that come before.
      recordings: what is recorded; default all.
    """
    shared = {"decides": "the leaderboard", "entry": entry, "seed": seed}
    if entry.name in DECODED:
        for nodes in NODES:
            for part in ("alone", "joined"):
                settings = {"nodes": nodes, "part": part, "answers": 0}
                yield Job(f"{prefix}/decode-{part}-{nodes}", "live", settings=settings, needs=after, **shared)
        return
    recordings = recordings or recordings_of(entry)
    for name in recordings:
        settings = {"recording": name}
        yield Job(f"{prefix}/offers-{name}", "offers", settings=settings, needs=after, **shared)
    made = tuple(f"{prefix}/offers-{name}" for name in recordings)
    yield Job(f"{prefix}/score", "score", needs=made, **shared)
    settings = {"nodes": FIRST_NODES, "part": "alone", "answers": Terms.live}
    yield Job(f"{prefix}/live", "live", settings=settings, needs=after, **shared)


def recordings_of(entry: Entry) -> list[str]:
    """The recordings that an entry is scored by.

    What depends on the text alone is recorded once. Methods that draft along paths are recorded with every shape that
    they are scored with. A second column has a smaller draft vocabulary.
    """
    first = f"best-{FIRST_NODES}" if entry.along_paths else "all"
    others = [f"best-{nodes}" for nodes in NODES if nodes != FIRST_NODES] + ["same", "own"]
    smaller = [f"{first}-small"] if entry.rate else []
    return [first, *(others if entry.along_paths else []), *smaller]


def variants() -> Iterator[Job]:
    """Rows of the papers' ablations, seed by seed."""
    for seed in SEEDS:
        for study in STUDIES:
            for label, entry in study.rows.items():
                name = f"ablations/{study.name}/{label.replace('w/o', 'without')}/seed-{seed}"
                yield Job(name, "variant", study.source, entry, seed, {"study": study.name, "label": label})


def _equal(name: str, drafter: str, tree: str | None = None, **settings: Any) -> Job:
    """Are the texts of a drafter those of autoregressive decoding, on an accelerator?"""
    usual = {"dtype": "float32", "temperature": 0.0, "prompt_tokens": 0, "new_tokens": 64, "prompts": 8}
    given = {"drafter": drafter, "tree": tree} | usual | settings
    return Job(f"device/equal/{name}", "equality", "losslessness there", settings=given, accelerator=True)


def _timed(name: str, kind: str, **settings: Any) -> Job:
    """Something that an accelerator does alone, so that its time can be measured."""
    decides = "what a step costs there"
    return Job(f"device/{name}", kind, decides, settings=settings, alone=True, accelerator=True)


_SIZES = "best:1@1,4@1.05,8@1.1,16@1.2"
_EMBEDDED = {"shapes": "smollm2-135m", "dtype": "bfloat16", "batch_sizes": [1], "cache_length": 512}
_SEVEN = _EMBEDDED | {"shapes": "7b"}
_DRAFTING = {"trees": ["best:8", "best:16", "best:32"], "dtype": "bfloat16", "cache_length": 512}
_UNIONS = {
    "drafters": ["hidden_transfer+suffix", "amphista+suffix", "eagle+suffix"],
    **{"dtype": "bfloat16", "prompts": 12, "new_tokens": 128},
}
EQUALITY = (
    _equal("suffix-long", "suffix", prompt_tokens=1500, prompts=2),
    _equal("eagle+suffix-sizes", "eagle+suffix", _SIZES),
    _equal("ppd", "ppd"),
    _equal("hidden_transfer+suffix", "hidden_transfer+suffix", "best:16"),
    _equal("hidden_transfer+suffix-sampled", "hidden_transfer+suffix", "best:16", temperature=0.8),
    _equal("token_recycling", "token_recycling"),
    _equal("lookahead", "lookahead"),
)
TIMED = (
    _timed("steps/smollm2", "steps", **_EMBEDDED, rows=[1, 8, 16, 32, 64]),
    _timed("steps/7b", "steps", **_SEVEN, rows=[1, 8, 32, 64]),
    _timed("steps/smollm2-without-graphs", "steps", **_EMBEDDED, rows=[1, 16], without_graphs=True),
    _timed("steps/eagle+suffix", "drafter", drafter="eagle+suffix", **_DRAFTING),
    _timed("steps/hidden_transfer+suffix", "drafter", drafter="hidden_transfer+suffix", **_DRAFTING),
    _timed("race/best-16", "race", tree="best:16", **_UNIONS),
    _timed("race/best-32", "race", tree="best:32", **_UNIONS),
    _timed("steps/7b-without-graphs", "steps", **_SEVEN, rows=[1, 8], without_graphs=True),
    _timed("program/smollm2", "program", settings={"function": "time_steps", **_EMBEDDED, "rows": [1, 16]}),
)
