"""The ways to decode that a benchmark compares: drafters, and other libraries."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxspec.bench.config import REFERENCE, BenchConfig, name_runs
from jaxspec.bench.peers import library, load_peers
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, Match
from jaxspec.drafters import METHODS, DrafterSpec, load_drafter, shaped, ships
from jaxspec.drafters.choices import Use
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import Generation, generate
from jaxspec.trees import TreePlan
from jaxspec.trees.plan import plan_to_json
from jaxspec.weights.model import Model

Prompts = Sequence[Sequence[int]]  # token ids


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
      model: the base that it decodes on.
      info: adapter, tree and draft vocabulary as plain values; `reference` where the base is one of its own: the way
        that decodes the same base autoregressively.
      answer: token ids of prompts, new tokens at most, sampling and seed to an answer for each.
      same_text: whether, at a temperature, its text must match that of its reference.
      drafter: the drafter; None for another library.
    """

    model: Model
    info: dict[str, Any]
    answer: Callable[[Prompts, int, SamplingConfig, int], list[Generation]]
    same_text: Callable[[float], bool]
    drafter: Drafter | None = None

    @property
    def reference(self) -> str:
        """The name of the way that it is compared with."""
        return self.info.get("reference", REFERENCE)

    @property
    def bytes(self) -> int:
        """Bytes of memory in addition to the base: adapter, trees, and a tuned base."""
        own = self.model.params if "reference" in self.info else {}
        return sum(leaf.nbytes for leaf in jax.tree.leaves((own, self.drafter and self.drafter.on_device)))


def load_ways(config: BenchConfig, model: Model) -> dict[str, Way]:
    """The ways to compare by name, autoregressive decoding first.

    Raises:
      UserError: a run that cannot be read or does not fit the base.
    """
    runs = config.runs or [name for name in METHODS if ships(name, model)]
    load = functools.cache(lambda spec: load_drafter(spec, model, tree="own"))  # other trees share weights
    ways: dict[str, Way] = {}
    for name, run in name_runs(runs).items():
        drafter = load(dataclasses.replace(run, tree=None, vocabulary=None))
        tree = run.accepted_by(ACCEPTANCES[config.accept]()).tree
        drafter = shaped(drafter, tree, run.vocabulary, Use(config.batch_size, config.temperature))
        info = _describe(drafter) if drafter.drafts else {}
        if drafter.model is not model:  # its text must match that of the base that the method has tuned
            info["reference"] = f"{REFERENCE}, base of {DrafterSpec(run.methods, adapter=run.adapter).text}"
            plain = _decoding(autoregressive(drafter.model), {"reference": info["reference"]}, config)
            if ways.setdefault(info["reference"], plain).model is not drafter.model:
                raise UserError(f"adapters of {drafter.name} need folders with different names")
        ways[name] = _decoding(drafter, info, config)
    peers = load_peers(model, config.assistant) if config.peers else {}
    # Of peers only greedy text must match: they draw with other noise.
    return ways | {name: Way(model, {"library": library()}, peer, operator.not_) for name, peer in peers.items()}


def _decoding(drafter: Drafter, info: dict[str, Any], config: BenchConfig) -> Way:
    # What drafts nothing has nothing to accept: its text is the base's own, whatever the rule.
    acceptance = ACCEPTANCES[config.accept]() if drafter.drafts else Match()

    def answer(prompts: Prompts, max_new_tokens: int, sampling: SamplingConfig, seed: int) -> list[Generation]:
        settings = {"sampling": sampling, "seed": seed, "acceptance": acceptance, "batch_size": len(prompts)}
        return generate(drafter, prompts, max_new_tokens, **settings)

    return Way(drafter.model, info, answer, acceptance.same_text, drafter)


def _describe(drafter: Drafter) -> dict[str, Any]:
    fixed = isinstance(drafter.shape, TreePlan)
    info = {"tree": plan_to_json(drafter.shape) if fixed else drafter.shape.spec, "rows": drafter.num_rows}
    if drafter.note:
        info["note"] = drafter.note
    if adapters := [source.adapter for source in drafter.sources if source.adapter]:
        info["adapter"] = "+".join(adapter.digest for adapter in adapters)
    trained = [source for source in drafter.sources if source.trained]
    if len({source.draft_vocabulary for source in trained}) == 1:
        info["draft_vocabulary"] = trained[0].draft_vocabulary
    if len(trained) == 1 and trained[0].accuracy:
        info["accuracy"] = trained[0].accuracy
    return info
