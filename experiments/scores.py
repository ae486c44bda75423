"""What a drafter is worth on held-out answers, by replay, which no hardware changes; and what its steps cost here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.bench.metrics import estimate
from jaxspec.config import DataConfig
from jaxspec.drafting.budget import Budget
from jaxspec.drafting.drafter import Drafter, autoregressive
from jaxspec.drafting.method import Method
from jaxspec.drafting.source import Source
from jaxspec.drafting.tree import chain, medusa
from jaxspec.errors import UserError
from jaxspec.machine import device_name
from jaxspec.progress import Progress
from jaxspec.training.data import prepare_answers
from jaxspec.training.examples import select_prompts
from jaxspec.tuning.latency import step_times
from jaxspec.tuning.record import Recording, record
from jaxspec.tuning.replay import replay
from jaxspec.tuning.unions import with_sources
from jaxspec.versions import code_version

NODES = (4, 16, 64)  # of drafts chosen per step, the root included
FIXED = 16  # nodes of the fixed trees
RANKS = 10
_CACHE = 512  # slots of the cache that steps are timed with


def score(drafter: Drafter, data: DataConfig) -> dict[str, Any]:
    """What a method is worth on held-out answers of the base that it decodes on, alone and with prompt lookup.

    Args:
      drafter: the method, and beside it prompt lookup unless that is the method.
      data: the held-out prompts.

    Returns:
      The code's version; how many answers; accuracy [M][K] per distance and rank; tokens per step with drafts chosen
      per step, by their nodes, `alone` and `joined`; with the `same` fixed tree as all others, and with its `own`.
    """
    model = drafter.model
    _, answers = prepare_answers(model, data, select_prompts(model, data))
    texts = [(answer.prompt_tokens, answer.answer_tokens) for answer in answers if len(answer.answer_tokens) > 1]
    with Progress("recording", len(texts), "answers") as progress:
        recordings = record(drafter, texts, progress=progress.update)
    found = {"code": code_version(), "answers": len(texts), "accuracy": np.round(accuracy(recordings, 0), 4).tolist()}
    for name, chosen in (("alone", [0]), ("joined", [0, 1]))[: len(drafter.sources)]:
        sources = [drafter.sources[i] for i in chosen]
        budgets = {nodes: with_sources(drafter, sources, f"best:{rows_of(nodes, sources)}") for nodes in NODES}
        found[name] = {nodes: _replayed(recordings, best, chosen) for nodes, best in budgets.items()}
    alone = with_sources(drafter, drafter.sources[:1], f"best:{rows_of(FIXED, drafter.sources[:1])}")
    method = alone.source.method
    own = f"sparse:{FIXED}" if alone.source.accuracy else chain(method.usual_depth)
    for name, tree in (("same", same_tree(method)), ("own", own)):
        found[name] = _replayed(recordings, alone.with_tree(tree), [0])
    return found


def rows_of(nodes: int, sources: Sequence[Source]) -> int:
    """The rows of a draft of so many nodes, probes included."""
    return next(rows for rows in range(nodes, 100 * nodes) if nodes_of(rows, sources) == nodes)


def nodes_of(rows: int, sources: Sequence[Source]) -> int:
    """The nodes of a draft of so many rows; 0 where they are too few."""
    try:
        return Budget(rows).divided(sources)[0]
    except UserError:
        return 0


def same_tree(method: Method) -> list[tuple[int, ...]]:
    """The paths of the tree that all methods fill: Medusa's published one, as deep as the method drafts."""
    return [path for path in medusa(FIXED).states[0].paths if len(path) <= method.max_distance]


def _replayed(recordings: Sequence[Recording], drafter: Drafter, sources: Sequence[int]) -> dict[str, Any]:
    """Tokens per step with their 95% interval over answers, and the rows of a step."""
    found = replay(recordings, drafter, sources)
    ratio = estimate(np.stack([found.tokens, found.steps]), lambda t, s, axis: t.sum(axis) / s.sum(axis))
    values = [None if x is None else round(x, 4) for x in (ratio.value, ratio.low, ratio.high)]
    return {"tokens_per_step": values[0], "interval": values[1:], "rows": drafter.num_rows}


def accuracy(recordings: Sequence[Recording], source: int) -> np.ndarray:
    """[M, 10], how often the candidate of each rank at each distance is the token that comes.

    Where candidates depend on those before them, of the positions at which the text was among those.
    """
    offer = recordings[0].offers[source]
    depends = offer.parent is not None
    hits, counted = np.zeros((offer.tokens.shape[1], RANKS)), np.zeros(offer.tokens.shape[1])
    for recording in recordings:
        for d, (reached, here, right, log_p) in enumerate(recording.along_answer(source)):
            counts = np.ones(len(here), bool)
            if depends:
                counts = reached & (here.any(axis=1) | (d == 0))  # behind a leaf nothing is predicted
            order = np.argsort(np.where(here, -log_p, np.inf), axis=1, kind="stable")[:, :RANKS]
            ranked = np.take_along_axis(right, order, axis=1)[counts]
            hits[d, : ranked.shape[1]] += ranked.sum(axis=0)
            counted[d] += counts.sum()
    return hits / np.maximum(counted, 1)[:, None]


def time_steps(drafter: Drafter) -> dict[str, Any]:
    """Milliseconds of a step with each number of nodes, and of an autoregressive one."""
    sources = drafter.sources[:1]
    drafters = {"autoregressive": autoregressive(drafter.model)}
    drafters |= {str(n): with_sources(drafter, sources, f"best:{rows_of(n, sources)}") for n in NODES}
    seconds = step_times(drafters, _CACHE, rounds=9)
    return {"milliseconds": {name: round(1e3 * s, 3) for name, s in seconds.items()}, "machine": device_name()}
