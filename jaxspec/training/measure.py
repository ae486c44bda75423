"""How well an adapter drafts a base's own answers: what `jaxspec evaluate` and `jaxspec import` measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import autoregressive, finalized, method_plan
from jaxspec.drafters.source import learning, temperature_key
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate_many
from jaxspec.training.data import AnsweredPrompt
from jaxspec.training.evaluate import Accuracy, evaluate
from jaxspec.training.examples import select_prompts
from jaxspec.training.settings import DataConfig
from jaxspec.trees.plan import TreePlan, plan_from_json, plan_to_json, replayed
from jaxspec.weights.model import Model


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an adapter is worth on some answers.

    Attributes:
      accuracy: by distance and rank.
      plan: the draft tree.
      tokens_per_step: with that tree, by replay.
    """

    accuracy: Accuracy
    plan: TreePlan
    tokens_per_step: float

    def info(self) -> dict[str, Any]:
        """The same as further content of adapter.json."""
        return {
            "tree": plan_to_json(self.plan),
            "tokens_per_step": round(self.tokens_per_step, 3),
            "accuracy": self.accuracy.by_rank.tolist(),
            "accuracy_positions": self.accuracy.positions,
            "calibration": {temperature_key(0): self.accuracy.calibration},
        }


def own_answers(model: Model, data: DataConfig) -> list[AnsweredPrompt]:
    """Held-out prompts with the base's own answers, made now, or with given ones. Raises UserError for too few."""
    prompts = select_prompts(model, data)[: data.held_out]
    ids = [prompt.prompt_tokens for prompt in prompts]
    if prompts[0].answer_tokens is not None:
        given = zip(ids, prompts, strict=True)
        return [AnsweredPrompt(tokens, prompt.answer_tokens[: data.held_out_tokens]) for tokens, prompt in given]
    made = generate_many(autoregressive(model), ids, data.held_out_tokens, batch_size=data.batch_size)
    return [AnsweredPrompt(ids[at], tokens) for at, tokens in sorted(made)]


def measure(
    adapter: Adapter,
    model: Model,
    answers: Sequence[AnsweredPrompt],
    tree: str = "",
    progress: Callable[[int], None] = lambda done: None,
) -> Measured:
    """Measure an adapter on answers of its base.

    Args:
      adapter: of a trained method.
      model: its base.
      answers: to rank the adapter's candidates in.
      tree: of the replay, as `parse_tree` takes it; default the adapter's own.
      progress: called with the number of answers done.

    Raises:
      UserError: a method that learns nothing, answers that are too short, or a tree that does not fit.
    """
    if not adapter.method.facts(model.config).learned:
        raise UserError(f"{adapter.method.name} learns nothing whose accuracy could be measured; use jaxspec bench")
    final, own = finalized(adapter.method, adapter.trainable, model)
    base = learning(own.base, final.method, adapter.frequent_tokens)
    accuracy = evaluate(final.method, final.trainable, base, answers, progress)
    if not accuracy.positions:
        raise UserError("none of the answers is long enough to draft in; give other prompts")
    if tree:
        by_rank = np.maximum(accuracy.by_rank, 1e-6).tolist()  # a drafter that is never right has a tree too
        plan = method_plan(adapter.method, model.config, tree, by_rank)
    elif "tree" in adapter.info:
        plan = plan_from_json(adapter.info["tree"], "the adapter's tree")
    else:
        raise UserError("the adapter holds no tree; give one with --tree")
    return Measured(accuracy, plan, replayed(plan, accuracy.ranks))
