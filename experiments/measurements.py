"""What is measured of adapters: speeds, step times, rules of acceptance, draft vocabularies and pseudo states."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.decoding_studies import TEMPERATURES, TIMED, TOGETHER
from experiments.studies import SpeedRow
from jaxspec.bench.metrics import estimate
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, Acceptance
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch
from jaxspec.drafters import load_adapter, load_drafter
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import Drafter, make_drafter
from jaxspec.generation.generate import generate
from jaxspec.methods import HiddenTransfer
from jaxspec.model.base import Base
from jaxspec.model.rows import read_layers
from jaxspec.progress import Progress
from jaxspec.training.data import AnsweredPrompt, insertion_points, make_batch
from jaxspec.trees import State, TreePlan, make_plan
from jaxspec.tuning.latency import step_times
from jaxspec.tuning.race import race
from jaxspec.versions import code_version
from jaxspec.weights.model import Model

_RULES = {name: rule() for name, rule in ACCEPTANCES.items() if rule.lossless}
_SIZES = (1024, 2048, 4096, 8192, 16384)  # of draft vocabularies


def load_drafters(
    entries: Mapping[str, SpeedRow], model: Model, folder: Callable[[str, str], Path]
) -> dict[str, Drafter]:
    """The drafters of a table by label; those of one adapter share the base that it may have tuned.

    Args:
      entries: rows of the table.
      model: the base.
      folder: of the adapter that a study has trained, by study and label.
    """

    @functools.cache
    def load(adapter: str | tuple[str, str]) -> Drafter:
        if isinstance(adapter, str):
            return load_drafter(adapter, model, tree="own")
        return make_drafter(load_adapter(folder(*adapter), model.config), model)

    return {
        label: load(entry.adapter).with_tree(entry.tree, entry.draft_vocabulary) for label, entry in entries.items()
    }


def measure_speeds(
    drafters: Mapping[str, Drafter], prompts: Sequence[str] | Sequence[list[int]], max_new_tokens: int
) -> dict[str, dict[str, Any]]:
    """Decode the same prompts with every drafter and autoregressively, in turn.

    Returns:
      {label: figures}, `autoregressive` among them: of the base that the method has tuned, where it has. All name the
      version of the code that decoded.
    """
    [base] = {drafter.model for drafter in drafters.values()}  # or a comparison would say nothing
    rows = {label: drafter.num_rows for label, drafter in drafters.items()} | {"autoregressive": 1}
    shared = {"prompts": len(prompts), "code": code_version()}
    trials = race(base, dict(drafters), prompts, max_new_tokens, SamplingConfig())
    return {trial.name: dataclasses.asdict(trial) | {"rows": rows[trial.name]} | shared for trial in trials}


def measure_steps(
    model: Model, cache_length: int = 512, rounds: int = 9, nodes: Sequence[int] = (2, 4, 8)
) -> dict[str, dict[str, float]]:
    """Seconds of a step by method and number of rows: nodes with all their probes, the same for every method."""
    drafters = {}
    for name, method in TIMED.items():
        adapter = Adapter(method, method.init(jax.random.key(0), model.base), model.fingerprint, {})
        for count in nodes:
            drafters[name, count] = make_drafter(adapter, model, _star(count, method.facts(model.config).probes), 0)
    results: dict[str, dict[str, float]] = {name: {} for name in TIMED}
    for (name, count), seconds in step_times(drafters, cache_length, rounds).items():
        results[name][str(drafters[name, count].num_rows)] = seconds
    return results


def _star(nodes: int, probes: int) -> TreePlan:
    """A root with candidates side by side, so many probes on every node."""
    paths = tuple((rank,) for rank in range(nodes - 1))
    return make_plan([State(paths, (probes,) * nodes, 1)])


def measure_coverage(frequent_tokens: np.ndarray, answers: Sequence[AnsweredPrompt]) -> dict[str, float]:
    """The share of the tokens of held-out answers that a draft vocabulary holds, by its size."""
    written = np.concatenate([answer.answer_tokens for answer in answers])
    return {str(size): float(np.isin(written, frequent_tokens[:size]).mean()) for size in _SIZES}


def measure_acceptance(
    label: str, drafter: Drafter, prompts: Sequence[str] | Sequence[list[int]], max_new_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Decode the same prompts with every lossless rule of acceptance at every temperature; `label` is for the progress.

    Returns:
      {rule: one cell per temperature}: `prompts`, `tokens_per_step`, `accepted` of the offered drafts, and for all
      rules but match `against_match`, the ratio of their tokens per step to match's with its interval.
    """
    results: dict[str, list[dict[str, Any]]] = {rule: [] for rule in _RULES}
    with Progress(label, len(TEMPERATURES), "temperatures") as progress:
        for number, temperature in enumerate(TEMPERATURES, 1):
            counts = {name: _counts(drafter, prompts, max_new_tokens, temperature, r) for name, r in _RULES.items()}
            for rule, found in counts.items():
                made, steps, accepted, offered = found.sum(axis=1).tolist()
                shares = {"tokens_per_step": made / steps, "accepted": accepted / offered}
                results[rule].append({"prompts": len(prompts)} | shares)
                if rule != "match":
                    ratio = estimate(np.vstack([found[:2], counts["match"][:2]]), _ratio)
                    results[rule][-1]["against_match"] = dataclasses.asdict(ratio)
            progress.update(number)
    return results


def _counts(
    drafter: Drafter,
    prompts: Sequence[str] | Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    rule: Acceptance,
) -> np.ndarray:
    """[4, n]: the tokens that steps made, the steps, and the drafts accepted and offered.

    Of n batches of prompts, each with a seed of its own: what is drawn depends on seed and position alone, so that
    prompts of one seed are no independent sample.
    """
    counts, settings = [], {"sampling": SamplingConfig(temperature), "acceptance": rule, "batch_size": TOGETHER}
    for seed, first in enumerate(range(0, len(prompts), TOGETHER)):
        answers = generate(drafter, prompts[first : first + TOGETHER], max_new_tokens, seed=seed, **settings)
        parts = [[a.new_tokens - 1, a.steps, sum(a.accepted), sum(a.offered)] for a in answers]
        counts.append(np.sum(parts, axis=0))
    return np.array(counts).T


def _ratio(
    made: np.ndarray, steps: np.ndarray, other_made: np.ndarray, other_steps: np.ndarray, axis: int
) -> np.ndarray:
    """Tokens per step of one rule over those of another, all answers together."""
    return made.sum(axis) / steps.sum(axis) / (other_made.sum(axis) / other_steps.sum(axis))


@dataclasses.dataclass(frozen=True)
class _Watched(HiddenTransfer):
    """Hidden Transfer whose states are watched after each of the last layers."""

    watched: int = 1

    @property
    def exits(self) -> int:
        """How many."""
        return self.watched


def measure_similarity(adapter: Adapter, base: Base, answers: Sequence[AnsweredPrompt]) -> dict[str, dict[str, float]]:
    """Cosine similarity of pseudo to real hidden states of held-out answers (Hidden Transfer Figure 4).

    Returns:
      Per step, {layers passed: mean similarity}, from the first layer that the pseudo state passes on.
    """
    length = max(len(a.prompt_tokens) + len(a.answer_tokens) for a in answers)
    batches = [make_batch([a], [insertion_points(a, length)], length, length) for a in answers]
    curves = {}
    for step, layer in enumerate(adapter.method.layers, 1):
        settings = dataclasses.asdict(adapter.method) | {"distances": step, "layers": adapter.method.layers[:step]}
        method = _Watched(**settings, watched=base.decoder.config.num_layers - layer)
        sums, counts = zip(*(_cosines(method, adapter.trainable, base, batch) for batch in batches), strict=True)
        means = np.sum(sums, axis=0) / np.sum(counts)
        curves[f"step {step}"] = {str(passed): float(value) for passed, value in enumerate(means, layer + 1)}
    return curves


@functools.partial(jax.jit, static_argnames="method")
def _cosines(method: _Watched, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sums [watched] of the cosine between the last step's pseudo states and the real ones, and how many."""
    step, layers = method.distances, base.decoder.config.num_layers
    _, exits = method.probe(trainable, base, batch, step)
    final, _, read = read_layers(base, batch.tokens, tuple(range(layers - method.watched + 1, layers)))
    at = batch.points + step  # the token that a pseudo state stands for
    counted = (batch.points >= 0) & (at < batch.lengths[:, None])
    rows, at = jnp.arange(at.shape[0])[:, None], jnp.minimum(at, batch.tokens.shape[1] - 1)
    sums = []
    for pseudo, real in zip(exits, [*read.values(), final], strict=True):
        a, b = pseudo[:, :, -1, 0], real[rows, at]
        cosine = jnp.sum(a * b, axis=-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))
        sums.append(jnp.sum(cosine * counted))
    return jnp.stack(sums), jnp.sum(counted)
