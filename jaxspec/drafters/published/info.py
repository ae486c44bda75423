"""What an adapter of a published drafter notes about itself before anything was measured."""

from __future__ import annotations

from typing import Any

from jaxspec.decoding.method import Method
from jaxspec.drafters.drafter import method_plan
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.trees.plan import plan_to_json
from jaxspec.weights.load import Model

# By rank, how often the token that follows is among a drafter's best, where that was not measured: for a first tree.
_USUAL = (0.62, 0.11, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.005, 0.005)
_USUAL_DECAY = 0.93  # per distance


def first_info(folder: PublishedFolder, model: Model, method: Method, form: str) -> dict[str, Any]:
    """The base, the draft vocabulary, a tree, and the form with the dtype of the weights that were taken."""
    facts = method.facts(model.config)
    accuracy = [[share * _USUAL_DECAY**d for share in _USUAL] for d in range(facts.distances)]
    return {
        "base": model.name,
        "draft_vocabulary": facts.learned_tokens,
        "tree": plan_to_json(method_plan(method, model.config, "sparse:16", accuracy)),
        "published": {"form": form, "dtype": folder.dtype()},
    }
