"""What drafters offer along the held-out answers, recorded; tokens per step by replay; answers decoded as a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lab.jobs import FIRST_NODES, Job
from experiments.lab.lab import Lab
from experiments.lab.recordings import load_recordings, save_recordings
from experiments.lab.terms import NODES, scored_texts
from jaxspec.drafters import load_drafter
from jaxspec.drafters.budget import Budget
from jaxspec.drafters.drafter import Drafter, method_plan
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError
from jaxspec.generation.generate import iterate
from jaxspec.methods import PromptLookup
from jaxspec.progress import Progress
from jaxspec.trees import medusa
from jaxspec.trees.plan import plan_to_json
from jaxspec.tuning.latency import with_sources
from jaxspec.tuning.record import ranks_of, record
from jaxspec.tuning.replay import replay

_TOGETHER = 8  # answers that a CPU records or decodes together; an accelerator takes all


def record_offers(lab: Lab, job: Job) -> dict[str, Any]:
    """Record what an entry and prompt lookup offer, with the shape that the recording's name says.

    The file goes to the work folder.

    Names: `all`, offers that depend on the text alone; `best-N`, of drafts of N nodes chosen per step; `same` and
    `own`, of fixed trees. With `-small` only the most frequent tokens are drafted.
    """
    kind, nodes, is_small = parse_recording(job.settings["recording"])
    drafter = shaped(drafter_of(lab, job, lab.terms.small_vocabulary if is_small else 0), kind, nodes)
    texts = scored_texts(drafter.model, lab.data)
    with Progress("recording", len(texts), "answers") as progress:
        recordings = record(
            drafter, texts, batch_size=together(texts), progress=progress.update, as_drafted=kind != "all"
        )
    file = recording_file(lab, job, job.settings["recording"])
    save_recordings(file, recordings, drafter)
    return {"answers": len(recordings), "megabytes": round(file.stat().st_size / 1e6, 1)}


def parse_recording(name: str) -> tuple[str, int, bool]:
    """What is recorded, of how many nodes, and whether with the small draft vocabulary."""
    kind, *rest = name.split("-")
    return kind, int(rest[0]) if kind == "best" else NODES[-1], "small" in rest


def recording_file(lab: Lab, job: Job, name: str) -> Path:
    """Where a recording lies."""
    return lab.folder(job) / f"recording-{name}.npz"


def drafter_of(lab: Lab, job: Job, vocabulary: int) -> Drafter:
    """The method, and beside it prompt lookup unless that is the method.

    Its adapter is the one that a job before has trained, or without such a job the one that ships.
    """
    names = list(dict.fromkeys([job.entry.method.name, PromptLookup.name]))
    drafter = load_drafter(names, lab.model, lab.folder(job) / "adapter" if job.needs else None, tree="own")
    trained = any(source.trained for source in drafter.sources)
    return drafter.with_tree(None, vocabulary) if trained else drafter


def shaped(drafter: Drafter, kind: str, nodes: int) -> Drafter:
    """A drafter as one of the kinds of recordings has it."""
    first, *others = drafter.sources
    if kind in ("same", "own"):
        alone = dataclasses.replace(drafter, sources=(first,))
        own_tree = f"sparse:{nodes}" if first.accuracy else first.tree
        tree = own_tree if kind == "own" else same_tree(first.facts.distances, nodes)
        return alone.with_tree(tree, 0 if first.trained else None)
    sources = (with_own_tree(first, nodes), *others)
    return with_sources(drafter, sources, f"best:{rows_of(nodes, sources)}")


def with_own_tree(source: Source, nodes: int) -> Source:
    """A trained source whose own tree, which it expands if it drafts along paths, has so many nodes."""
    if not (source.adapter and source.accuracy):
        return source
    plan = method_plan(source.method, source.config, f"sparse:{nodes}", source.accuracy)
    info = source.adapter.info | {"tree": plan_to_json(plan)}
    return dataclasses.replace(source, adapter=dataclasses.replace(source.adapter, info=info))


def rows_of(nodes: int, sources: Sequence[Source]) -> int:
    """The rows of a draft of so many nodes, probes included."""
    return next(rows for rows in range(nodes, 100 * nodes) if nodes_of(rows, sources) == nodes)


def nodes_of(rows: int, sources: Sequence[Source]) -> int:
    """The nodes of a draft of so many rows; 0 where they are too few."""
    try:
        return Budget(rows).divided(sources)[0]
    except UserError:
        return 0


def same_tree(distances: int, nodes: int) -> list[tuple[int, ...]]:
    """The paths of the tree that all methods fill: Medusa's published one, as deep as the method drafts."""
    return [path for path in medusa(nodes).states[0].paths if len(path) <= distances]


def score(lab: Lab, job: Job) -> dict[str, Any]:
    """Tokens per step of an entry by replay of its recordings.

    Returns:
      `tokens` of every answer, its first left out; `accuracy` [M][K]; and by what was drafted with, `alone-16`,
      `joined-16`, `same-64`, `own-64`, `alone-16-small` and so on, `rows` and `steps` of every answer.
    """
    found: dict[str, Any] = {"drafts": {}}
    for name in (need.rpartition("/offers-")[2] for need in job.needs):
        kind, nodes, is_small = parse_recording(name)
        recordings, drafter = load_recordings(recording_file(lab, job, name), lab.model)
        if not is_small:
            first = drafter.sources[0]
            rounded = np.round(ranks_of(recordings, 0).accuracy, 4).tolist()
            found |= {"tokens": [len(recording.answer) - 1 for recording in recordings], "accuracy": rounded}
            found |= {"learned_tokens": first.facts.learned_tokens}
        for label, shape, sources in _replays(kind, nodes, is_small, len(drafter.sources)):
            part = shaped(dataclasses.replace(drafter, sources=drafter.sources[: len(sources)]), *shape)
            steps = replay(recordings, part, sources).steps.tolist()
            found["drafts"][label] = {"rows": part.num_rows, "steps": steps}
    return found


def _replays(kind: str, nodes: int, is_small: bool, sources: int) -> list[tuple[str, tuple[str, int], list[int]]]:
    """What is replayed from a recording: labels, shapes and the numbers of the sources."""
    parts = [("alone", [0]), ("joined", [0, 1])][:sources]
    if kind in ("same", "own"):
        return [(f"{kind}-{nodes}", (kind, nodes), [0])]
    counts = [nodes] if kind == "best" else [FIRST_NODES] if is_small else NODES
    ending = "-small" if is_small else ""
    found = [(f"{part}-{count}{ending}", ("best", count), numbers) for count in counts for part, numbers in parts]
    if kind == "all" and not is_small:
        found += [(f"{fixed}-{nodes}", (fixed, nodes), [0]) for fixed in ("same", "own")]
    return found


def decode_live(lab: Lab, job: Job) -> dict[str, Any]:
    """Decode the first answers, or all: tokens and steps of each, and how many are the base's own, token for token."""
    nodes, part, count = (job.settings[name] for name in ("nodes", "part", "answers"))
    drafter = drafter_of(lab, job, 0)
    if part == "alone":
        drafter = dataclasses.replace(drafter, sources=drafter.sources[:1])
    drafter = shaped(drafter, "best", nodes)
    texts = scored_texts(drafter.model, lab.data)
    texts = texts[: count or len(texts)]
    tokens, steps, same = [], [], 0
    with Progress("decoding", len(texts), "answers") as progress:
        prompts = [prompt for prompt, _ in texts]
        answers = iterate(drafter, prompts, lab.terms.text.max_answer_tokens, batch_size=together(texts))
        for done, (found, (_, answer)) in enumerate(zip(answers, texts, strict=True), 1):
            tokens.append(found.new_tokens - 1)
            steps.append(found.steps)
            same += found.tokens == answer
            progress.update(done)
    return {"nodes": nodes, "rows": drafter.num_rows, "tokens": tokens, "steps": steps, "identical": same}


def together(texts: Sequence[Any]) -> int:
    """How many of some answers to record or decode at once."""
    return _TOGETHER if jax.default_backend() == "cpu" else len(texts)
