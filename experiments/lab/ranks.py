"""How right trained drafters are along the held-out answers, and what fixed trees make of that, without decoding.

A tree's step on an answer depends on nothing but the rank that the drafter gave to each token that came. Ranks are kept
as words, one character per position, so that they are part of the results and any tree can be counted later.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.lab.jobs import Job
from experiments.lab.lab import Lab
from experiments.lab.scoring import drafter_of, together
from experiments.lab.terms import scored_texts
from experiments.measurements import measure_speeds
from jaxspec.drafters.drafter import Drafter
from jaxspec.progress import Progress
from jaxspec.trees import TreePlan, parse_tree, random_tree, sparse_tree
from jaxspec.trees.plan import count_steps, expected
from jaxspec.trees.spec import RANKS
from jaxspec.tuning.record import ranks_of, record

_DIGITS = string.digits + string.ascii_lowercase  # of ranks below 36: recordings have at most 12 candidates
_NONE = "."  # the token that came was no candidate
_SEEDS = 20  # random trees of a size, whose mean is taken


def keep_ranks(lab: Lab, job: Job) -> dict[str, Any]:
    """Record what ships along the first answers, and keep the ranks of their tokens.

    Returns:
      `tokens` of every answer, its first left out; `ranks`, for every answer a word per distance, see `words_of`;
      `accuracy` [M][K] of the adapter, measured on other answers; `probe_rows` of one probe.
    """
    drafter = _alone(lab, job)
    texts = scored_texts(drafter.model, lab.data)[: job.settings["answers"]]
    with Progress("recording", len(texts), "answers") as progress:
        recordings = record(drafter, texts, batch_size=together(texts), progress=progress.update)
    return {
        "tokens": [len(recording.answer) - 1 for recording in recordings],
        "accuracy": drafter.source.accuracy,
        "probe_rows": drafter.source.facts.probe_rows,
        "ranks": [words_of(ranks) for ranks in ranks_of(recordings, 0).along_answers],
    }


def _alone(lab: Lab, job: Job) -> Drafter:
    """What ships, without the lookup that other jobs have beside it, all tokens drafted."""
    drafter = drafter_of(lab, job, 0)
    return dataclasses.replace(drafter, sources=drafter.sources[:1])


def decode_trees(lab: Lab, job: Job) -> dict[str, Any]:
    """Decode the first answers with fixed trees and autoregressively, in turn, and time them; see `measure_speeds`."""
    drafter = _alone(lab, job)
    drafters = {label: drafter.with_tree(spec, 0) for label, spec in job.settings["trees"].items()}
    prompts = [prompt for prompt, _ in scored_texts(drafter.model, lab.data)[: job.settings["answers"]]]
    return measure_speeds(drafters, prompts, job.settings["tokens"])


def words_of(ranks: np.ndarray) -> list[str]:
    """Ranks [T, M] as M words of T characters: a digit of base 36, or a dot where the token was no candidate."""
    return ["".join(_NONE if rank < 0 else _DIGITS[rank] for rank in column) for column in ranks.T]


def ranks_from(words: Sequence[str]) -> np.ndarray:
    """The inverse of `words_of`, [T, M] int."""
    return np.array(
        [[-1 if character == _NONE else _DIGITS.index(character) for character in word] for word in words]
    ).T


def count_trees(lab: Lab, job: Job) -> dict[str, Any]:
    """The steps that fixed trees take on every answer, from the ranks that the job before has kept.

    Trees are built from the adapter's accuracies. Of random ones the figures are means over several.

    Returns:
      `tokens` of every answer; for each of the job's `trees` by label `rows` of a step, `expected` tokens per step by
      the adapter's accuracies, `expected_here` by the accuracies on these very answers, and `steps` of every answer.
    """
    held = lab.result(job.needs[0])
    texts = [ranks_from(words) for words in held["ranks"]]
    here = accuracy_of(texts, len(held["accuracy"][0]))
    found = {}
    for label, spec in job.settings["trees"].items():
        plans = list(plans_of(spec, job.entry.name, held["accuracy"]))
        steps = np.mean([[count_steps(plan, ranks) for ranks in texts] for plan in plans], axis=0)
        again = [expected(plan, here) for plan in plans]
        found[label] = {
            "rows": max(plan.num_nodes + plan.num_probes * held["probe_rows"] for plan in plans),
            "expected": round(float(np.mean([plan.expected_tokens for plan in plans])), 4),
            "expected_here": round(float(np.mean([plan.expected_tokens for plan in again])), 4),
            "steps": [int(count) if count == int(count) else round(count, 2) for count in steps.tolist()],
        }
    return {"tokens": held["tokens"], "trees": found}


def accuracy_of(texts: Sequence[np.ndarray], candidates: int) -> np.ndarray:
    """How often the candidate of every rank was right at every distance, over all places of all answers.

    Distances that reach beyond the end of an answer are misses, which they are for counted steps, too.

    Args:
      texts: [T, M] int each, as `ranks_from` returns them.
      candidates: K, ranks from here on are left out.

    Returns:
      [M, K].
    """
    places = np.concatenate(texts)
    return np.stack([(places == rank).mean(axis=0) for rank in range(candidates)], axis=1)


def plans_of(spec: str, method: str, accuracy: Sequence[Sequence[float]]) -> Iterator[TreePlan]:
    """The tree of a specification with what to expect of it; of `random:NODES` several, of different seeds.

    `filled:SIZE` is the best full tree whose step has no more rows than that of `stripped:SIZE`.
    """
    distances, (builder, _, numbers) = len(accuracy), spec.partition(":")
    if builder == "random":
        plans = [random_tree(distances, RANKS, int(numbers), seed) for seed in range(_SEEDS)]
    elif builder == "filled":
        [stripped] = plans_of(f"stripped:{numbers}", method, accuracy)
        plans = [filled_tree(np.array(accuracy), stripped.num_nodes + stripped.num_probes)]
    else:
        plans = [parse_tree(spec, method, distances, accuracy, 1.0)]
    for plan in plans:
        yield expected(plan, accuracy)


def filled_tree(accuracy: np.ndarray, rows: int) -> TreePlan:
    """The full tree that makes most tokens by accuracies [M, K] in a step of at most so many rows.

    Its nodes carry as many probes as it is deep, so that a tree of fewer levels may have more nodes.
    """
    trees = (sparse_tree(accuracy[:depth], rows // (1 + depth)) for depth in range(1, len(accuracy) + 1))
    return max(trees, key=lambda plan: plan.expected_tokens)
