"""The ablations that are about decoding: trees and numbers of tokens against speed, and what late rows save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.probing import similarity, step_times
from experiments.studies import DISTILLED, Conclusion
from jaxspec.bench.metrics import estimate
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import ACCEPTANCES
from jaxspec.decoding.generate import generate
from jaxspec.decoding.loop import Drafter
from jaxspec.drafting.adapter import (
    Adapter,
    adapter_plan,
    load_adapter,
    make_drafter,
    open_adapter,
    settle,
)
from jaxspec.drafting.method import Method
from jaxspec.drafting.tree import TreePlan, chain, efficient
from jaxspec.methods import PPD, BiTA, HiddenTransfer
from jaxspec.progress import Progress
from jaxspec.training.data import Answer
from jaxspec.tuning.latency import star
from jaxspec.tuning.race import race
from jaxspec.versions import code_version
from jaxspec.weights.load import Model


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a table of decoding.

    Attributes:
      tree: its tree or a specification.
      method: whose shipped adapter decodes; empty where a variant's does.
      study: of the variant.
      variant: whose training decodes.
      draft_vocabulary: how many tokens to draft; 0 is all.
    """

    tree: str | TreePlan
    method: str = ""
    study: str = ""
    variant: str = ""
    draft_vocabulary: int = 0

    def adapter(self, model: Model, runs: Callable[[str, str], Path]) -> Adapter:
        """What decodes; `runs` gives the folder of a variant."""
        if self.method:
            return open_adapter(self.method, model)[1]
        return load_adapter(runs(self.study, self.variant), model.config)


@dataclasses.dataclass(frozen=True)
class DecodingStudy:
    """One table of decoding.

    Attributes:
      name: short, for files.
      title: what is compared.
      source: where the paper has it.
      entries: by label.
      conclusions: what the paper concludes, of speed.
      axis: name of the quantity that the labels are values of.
    """

    name: str
    title: str
    source: str
    entries: dict[str, Entry]
    conclusions: tuple[Conclusion, ...] = ()
    axis: str = ""


_DESIGNS = ("masks only", "shallow", "deep")
_NODES = (22, 35, 45, 64)
_COMPARED = ("Medusa", "Hydra", "Hydra++", "Amphista")
_VARIANTS = (
    "w/o auto-embedding", "w/o position encoding", "w/o staged adaptation", "one adaptation layer",
    "w/o sampled token", "Amphista-alpha",
)  # fmt: skip
_HEADS = {"Medusa": "medusa", "Hydra++": "hydra", "Amphista": "amphista"}

DECODING_STUDIES = (
    DecodingStudy(
        "bita_decoding", "BiTA: trees",
        "BiTA Table 4, with the adapter that ships, which learnt by distillation; all tokens are drafted",
        {
            "straightforward": Entry("straightforward:3", "bita"),
            **{f"full tree, k = {k}": Entry(f"cartesian:{k},{k},{k}", "bita") for k in (1, 2, 3, 4)},
            "efficient tree": Entry("efficient:5", "bita"),
            "efficient tree, thinning": Entry("efficient:5,4,3", "bita"),
        },
        (
            Conclusion("full tree, k = 1", "straightforward", "masks on every candidate pay"),
            Conclusion("full tree, k = 2", "full tree, k = 4", "wide full trees cost more than they bring"),
            Conclusion("efficient tree", "straightforward", "the efficient tree is faster than straightforward"),
            *(Conclusion("efficient tree", f"full tree, k = {k}", f"and than full trees of {k}") for k in (1, 2, 3, 4)),
        ),
    ),
    DecodingStudy(
        "bita_prompting_speed", "BiTA: speed by prompting design, efficient tree", f"BiTA Table 3, {DISTILLED}",
        {label: Entry("efficient:5", study="bita_prompting", variant=label) for label in _DESIGNS},
        (
            Conclusion("shallow", "masks only", "shallow prompts are a little faster"),
            Conclusion("deep", "shallow", "deep prompts are much faster"),
            Conclusion("deep", "masks only", "deep prompts are faster than masks alone"),
        ),
    ),
    DecodingStudy(
        "bita_prompts_speed", "BiTA: speed against the number of prompt tokens, efficient tree",
        f"BiTA Figure 8, {DISTILLED}",
        {str(n): Entry("efficient:5", study="bita_prompts", variant=str(n)) for n in (1, 4, 8, 16, 32, 64)},
        (
            Conclusion("16", "1", "sixteen are faster than one"),
            Conclusion("16", "8", "more are faster, up to about 16"),
            Conclusion("64", "16", "beyond 16 nothing is gained", gains=False),
        ),
        "prompt tokens",
    ),
    DecodingStudy(
        "bita_masks_speed", "BiTA: speed against the number of mask tokens, efficient tree",
        "BiTA Figure 9, with one adapter, trained with five masks by distillation, at a rate of 1e-2, and cut to "
        "fewer; the paper trains a model for every number",
        {str(m): Entry(efficient([5] * m), study="bita_masks", variant="5") for m in (1, 2, 3, 4, 5)},
        (
            Conclusion("3", "1", "three masks are faster than one"),
            Conclusion("3", "5", "three masks are faster than five"),
            Conclusion("4", "5", "and so are four"),
        ),
        "mask tokens",
    ),
    DecodingStudy(
        "space_masks_speed", "SPACE: speed against the number of mask tokens, chain",
        "SPACE Figure 6, with one adapter, trained with five masks and cut to shorter chains; the paper trains a model "
        "for every number",
        {str(m): Entry(chain(m), "space") for m in (1, 2, 3, 4, 5)},
        (
            Conclusion("3", "1", "three masks are faster than one"),
            Conclusion("5", "3", "five masks are faster than three"),
        ),
        "mask tokens",
    ),
    DecodingStudy(
        "amphista_variants_speed", "Amphista: variants, trees of 22 nodes", "Amphista Tables 4 and 5",
        {
            **{label: Entry("sparse:22", study="heads", variant=label) for label in _COMPARED},
            **{label: Entry("sparse:22", study="amphista_variants", variant=label) for label in _VARIANTS},
        },
        (
            Conclusion("Amphista", "Medusa", "Amphista is faster than Medusa"),
            Conclusion("Amphista", "Hydra++", "and faster than Hydra++"),
            Conclusion("Amphista", "w/o auto-embedding", "the auto-embedding block pays"),
            Conclusion("Amphista", "w/o staged adaptation", "staged adaptation pays"),
            Conclusion("Amphista", "one adaptation layer", "two layers are faster than one"),
            Conclusion("Amphista", "w/o sampled token", "the sampled token pays"),
            Conclusion("Amphista-alpha", "Amphista", "a second self-attention layer pays"),
        ),
    ),
    DecodingStudy(
        "heads_nodes", "Heads: nodes of the tree",
        "Amphista Table 6, with the adapters that ship: three heads, hundreds of updates, all tokens drafted",
        {f"{label}, {n} nodes": Entry(f"sparse:{n}", name) for label, name in _HEADS.items() for n in _NODES},
        (
            Conclusion("Amphista, 64 nodes", "Amphista, 22 nodes", "more nodes are faster"),
            Conclusion("Amphista, 22 nodes", "Medusa, 22 nodes", "Amphista is faster than Medusa in small trees"),
            Conclusion("Amphista, 64 nodes", "Medusa, 64 nodes", "and in large ones"),
            Conclusion("Amphista, 22 nodes", "Hydra++, 22 nodes", "Amphista is faster than Hydra++ in small trees"),
            Conclusion("Amphista, 64 nodes", "Hydra++, 64 nodes", "and in large ones"),
        ),
    ),
    DecodingStudy(
        "draft_vocabulary", "Draft vocabulary: tokens that may be drafted, trees of 4 nodes", "not in the papers",
        {
            f"{label}, {count or 'all'}": Entry("sparse:4", name, draft_vocabulary=count)
            for label, name in {"PPD": "ppd", "Medusa": "medusa"}.items()
            for count in (4096, 8192, 16384, 0)
        },
        (
            Conclusion("PPD, 8192", "PPD, all", "a draft vocabulary of 8192 pays for PPD", ours=True),
            Conclusion("Medusa, 8192", "Medusa, all", "and for Medusa", ours=True),
        ),
    ),
)  # fmt: skip


COUNTED = "ppd"  # whose adapter's counts of tokens are judged; all that ship have the same
_SIZES = (1024, 2048, 4096, 8192, 16384)


def run_coverage(model: Model, answers: Sequence[Answer]) -> dict[str, float]:
    """The share of the tokens of held-out answers that a draft vocabulary holds, by its size."""
    _, adapter = open_adapter(COUNTED, model)
    written = np.concatenate([answer.answer_tokens for answer in answers])
    return {str(size): float(np.isin(written, adapter.frequent_tokens[:size]).mean()) for size in _SIZES}


def run_decoding(
    study: DecodingStudy,
    model: Model,
    runs: Callable[[str, str], Path],
    prompts: Sequence[str],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Decode the same prompts with every entry of a study and autoregressively, in turn.

    Args:
      study: what to compare.
      model: the base.
      runs: (study, variant) to the folder of its adapter.
      prompts: texts.
      max_new_tokens: per answer.

    Returns:
      {label: figures}, `autoregressive` among them; of the base that the method has tuned, where it has. All name the
      version of the code that decoded.
    """
    drafters, bases = {}, set()
    for label, entry in study.entries.items():
        adapter, base = settle(entry.adapter(model, runs), model)
        bases.add(base)
        drafters[label] = make_drafter(adapter, adapter_plan(adapter, entry.tree), base, entry.draft_vocabulary)
    [base] = bases  # or a comparison would say nothing
    trials = race(base, drafters, prompts, max_new_tokens, SamplingConfig())
    rows = {label: drafter.num_rows for label, drafter in drafters.items()} | {"autoregressive": 1}
    shared = {"prompts": len(prompts), "code": code_version()}
    return {t.name: dataclasses.asdict(t) | {"rows": rows[t.name]} | shared for t in trials}


STEP_METHODS: dict[str, Method] = {
    "PPD": PPD(),
    "PPD from layer 10": PPD(entry=10),
    "PPD from layer 20": PPD(entry=20),
    "BiTA, 16 deep prompts": BiTA(),
    "BiTA from layer 10": BiTA(entry=10),
    "Hidden Transfer, layers 10/14/18": HiddenTransfer(),
}
_STEP_NODES = (2, 4, 8)


def run_steps(model: Model, cache_length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a step by method and number of rows: nodes with all their probes, the same for every method."""
    base, drafters = model.base, {}
    for name, method in STEP_METHODS.items():
        adapter = Adapter(method, method.init(jax.random.key(0), base), model.fingerprint, {})
        for nodes in _STEP_NODES:
            drafters[name, nodes] = make_drafter(adapter, star(nodes, method.probe_distances), model)
    seconds = step_times(model, drafters, cache_length, rounds)
    results: dict[str, dict[str, float]] = {name: {} for name in STEP_METHODS}
    for (name, nodes), value in seconds.items():
        results[name][str(drafters[name, nodes].num_rows)] = value
    return results


def run_similarity(model: Model, answers: Sequence[Answer]) -> list[dict[str, float]]:
    """Figure 4 of Hidden Transfer with the adapter that ships."""
    _, adapter = open_adapter("hidden_transfer", model)
    curves = similarity(adapter.method, adapter.trainable, model.base, answers)
    return [{str(layer): value for layer, value in curve.items()} for curve in curves]


Cell = dict[str, Any]
RULES = {name: rule() for name, rule in ACCEPTANCES.items() if rule.lossless}
TEMPERATURES = (0.3, 0.7, 1.0, 1.3)
TOGETHER = 4  # prompts that share a seed
ACCEPTED = {
    "SPACE, chain of 3": Entry("chain:3", "space"),
    "Medusa, chain of 3": Entry("chain:3", "medusa"),
    "SPACE, 5 nodes": Entry("sparse:5", "space"),
}


def run_acceptance(
    model: Model, label: str, entry: Entry, prompts: Sequence[str], max_new_tokens: int
) -> dict[str, list[Cell]]:
    """What both lossless rules come to, on the same prompts at every temperature.

    Args:
      model: the base.
      label: of the entry, for the progress line.
      entry: a method that ships, and its tree.
      prompts: texts.
      max_new_tokens: per answer.

    Returns:
      {rule: one cell per temperature}: `prompts`, `tokens_per_step`, `accepted` of the offered drafts, and for
      rejection `against_match`, the ratio of its tokens per step to match's with its interval.
    """
    _, adapter = open_adapter(entry.method, model)
    drafter = make_drafter(adapter, adapter_plan(adapter, entry.tree), model, entry.draft_vocabulary)
    results: dict[str, list[Cell]] = {rule: [] for rule in RULES}
    with Progress(label, len(TEMPERATURES), "temperatures") as progress:
        for number, temperature in enumerate(TEMPERATURES, 1):
            counts = {}
            for rule, acceptance in RULES.items():
                settings = {"sampling": SamplingConfig(temperature), "acceptance": acceptance}
                counts[rule] = _counts(model, drafter, prompts, max_new_tokens, **settings)
                results[rule].append({"prompts": len(prompts), **_shares(counts[rule])})
            ratio = estimate(np.vstack([counts[rule].T[:2] for rule in ("rejection", "match")]), _ratio)
            results["rejection"][-1]["against_match"] = dataclasses.asdict(ratio)
            progress.update(number)
    return results


def _counts(model: Model, drafter: Drafter, prompts: Sequence[str], max_new_tokens: int, **settings: Any) -> np.ndarray:
    """[n, 4]: the tokens that steps made, the steps, and the drafts accepted and offered.

    Of n batches of prompts, each with a seed of its own: what is drawn depends on seed and position alone, so that
    prompts of one seed are no independent sample.
    """
    counts = []
    for seed, first in enumerate(range(0, len(prompts), TOGETHER)):
        batch = prompts[first : first + TOGETHER]
        answers = generate(model, drafter, batch, max_new_tokens, seed=seed, batch_size=TOGETHER, **settings)
        parts = [[a.new_tokens - 1, a.steps, sum(a.accepted), sum(a.offered)] for a in answers]
        counts.append(np.sum(parts, axis=0))
    return np.array(counts)


def _shares(counts: np.ndarray) -> Cell:
    """Of all answers together."""
    made, steps, accepted, offered = counts.sum(axis=0).tolist()
    return {"tokens_per_step": made / steps, "accepted": accepted / offered}


def _ratio(
    made: np.ndarray, steps: np.ndarray, other_made: np.ndarray, other_steps: np.ndarray, axis: int
) -> np.ndarray:
    """Tokens per step of one rule over those of another, all answers together."""
    return made.sum(axis) / steps.sum(axis) / (other_made.sum(axis) / other_steps.sum(axis))
