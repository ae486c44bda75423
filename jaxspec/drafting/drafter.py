"""A drafter: a method with its adapter, its draft tree and the base they decode on, ready to decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.drafting.adapter import Adapter
from jaxspec.drafting.draft import PyTree
from jaxspec.drafting.method import Method
from jaxspec.drafting.tree import Path, Tree, TreePlan, chain, from_paths, parse_tree
from jaxspec.drafting.tree.plan import plan_from_json
from jaxspec.errors import UserError
from jaxspec.model.base import DraftVocabulary
from jaxspec.model.blocks import in_blocks
from jaxspec.weights.load import Model
from jaxspec.weights.params import params_fingerprint


@flax.struct.dataclass
class DeviceDrafter:
    """What of a drafter goes into the jitted loop.

    Attributes:
      trainable: the adapter's pytree, `prepared`; empty for methods without one.
      tree: the draft trees, stacked: one per state (see `TreePlan`).
      method: the static settings.
      draft_vocabulary: the tokens that may be drafted; None: all.
    """

    trainable: PyTree
    tree: Tree
    method: Method = flax.struct.field(pytree_node=False)
    draft_vocabulary: DraftVocabulary | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A method ready to decode. Made by `load_drafter`, `make_drafter` or `autoregressive`.

    Attributes:
      method: its settings.
      trainable: its pytree, as trained, in the host's memory where it was read from disk.
      model: the base it decodes on: the one that it was loaded for, or what the method has tuned that to.
      plan: the draft trees.
      adapter: what it was made from; None for a method that is not trained.
      draft_vocabulary: V', how many of the base's most frequent tokens may be drafted; 0: all.
      note: how the tree was chosen, in words; empty where it was asked for.
    """

    method: Method
    trainable: PyTree
    model: Model
    plan: TreePlan
    adapter: Adapter | None = None
    draft_vocabulary: int = 0
    note: str = ""

    @property
    def num_rows(self) -> int:
        """R, rows of a step, padding included."""
        probes = self.plan.num_probes if self.method.probe_distances else 0
        return self.plan.num_nodes + probes * self.method.probe_rows

    @functools.cached_property
    def on_device(self) -> DeviceDrafter:
        """What the jitted loop takes."""
        base = self.model.base
        if self.draft_vocabulary:
            base = base.drafting(jnp.asarray(self.adapter.frequent_tokens[: self.draft_vocabulary]))
        trainable = self.method.prepared(jax.tree.map(jnp.asarray, self.trainable), base)
        tree = self.plan.arrays(self.method.probe_distances)
        drafter = DeviceDrafter(trainable, tree, self.method, base.draft_vocabulary)
        # A prompt's drafts are made from about as many rows as there are distances, however many nodes the tree has.
        block = self.model.block_for(self.method.max_distance)
        return in_blocks(drafter, block, (*self.method.kernels, "columns"))

    def with_tree(
        self, tree: str | TreePlan | Sequence[Path] | None, draft_vocabulary: int | None = None, note: str = ""
    ) -> Drafter:
        """The same method on the same base with another tree.

        Args:
          tree: a specification like `sparse:16`, a plan, or a list of paths; None for the adapter's own.
          draft_vocabulary: draft only so many of the base's most frequent tokens; 0 drafts all; None for the adapter's
            own.
          note: how the tree was chosen.

        Raises:
          UserError: a tree or a draft vocabulary that does not fit.
        """
        info = self.adapter.info if self.adapter else {}
        if self.adapter is None and draft_vocabulary is not None:
            raise UserError(f"{self.method.name} is not trained and has no draft vocabulary, got {draft_vocabulary}")
        if self.method.max_distance == 0:
            if tree is not None:
                raise UserError(f"{self.method.name} drafts nothing and has no tree, got {str(tree)!r}")
            return dataclasses.replace(self, note=note)
        count = info.get("draft_vocabulary", 0) if draft_vocabulary is None else draft_vocabulary
        frequent = self.adapter.frequent_tokens if self.adapter else None
        check_drafts(count, 0 if frequent is None else len(frequent))
        plan, tokens = _plan(self.method, info, tree), count or self.model.config.vocab_size
        if plan.max_rank >= tokens:
            raise UserError(f"tree: rank {plan.max_rank} is outside the vocabulary of {tokens}")
        return dataclasses.replace(self, plan=plan, draft_vocabulary=count, note=note)


def autoregressive(model: Model) -> Drafter:
    """The drafter that drafts nothing."""
    return untrained(Method(), model)


def untrained(method: Method, model: Model) -> Drafter:
    """A method that has nothing to train, with a chain of its candidates for a tree."""
    return Drafter(method, {}, model, chain(method.usual_depth) if method.max_distance else from_paths([]))


def make_drafter(
    adapter: Adapter,
    model: Model,
    tree: str | TreePlan | Sequence[Path] | None = None,
    draft_vocabulary: int | None = None,
) -> Drafter:
    """An adapter on its base; `tree` and `draft_vocabulary` as in `Drafter.with_tree`.

    Raises:
      UserError: a tree or a draft vocabulary that does not fit.
    """
    method, trainable, model = tuned(adapter.method, adapter.trainable, model)
    return Drafter(method, trainable, model, from_paths([]), adapter).with_tree(tree, draft_vocabulary)


def tuned(method: Method, trainable: PyTree, model: Model) -> tuple[Method, PyTree, Model]:
    """What decodes: a method, its pytree, and the base they are for, which a method may have tuned (`Method.tune`)."""
    method, trainable, base = method.tune(trainable, model.base)
    if base is not model.base:
        fingerprint = params_fingerprint(model.config, base.params)
        model = dataclasses.replace(model, params=base.params, fingerprint=fingerprint)
    return method, trainable, model


def method_plan(method: Method, spec: str, accuracy: Sequence[Sequence[float]] | None) -> TreePlan:
    """A draft tree for a method, from its specification (see `parse_tree`) and accuracies [M][K]."""
    return parse_tree(spec, method.name, method.max_distance, accuracy, method.probe_rows)


def check_drafts(count: int, most: int) -> None:
    """Raise UserError for a draft vocabulary of another size than 0, all tokens, to `most`."""
    if type(count) is not int:
        raise UserError(f"draft-vocabulary must be a whole number, got {count!r}")
    if count and not most:
        raise UserError(f"draft-vocabulary {count}: the adapter does not say which tokens are frequent")
    if not 0 <= count <= most:
        raise UserError(f"draft-vocabulary must be 0 (all tokens) or at most {most}, got {count}")


def _plan(method: Method, info: dict[str, Any], tree: str | TreePlan | Sequence[Path] | None) -> TreePlan:
    """The draft tree to decode with; None is the one that the adapter's `info` holds, or a chain without training."""
    if isinstance(tree, str):
        plan = method_plan(method, tree, info.get("accuracy"))
    elif tree is not None:
        plan = tree if isinstance(tree, TreePlan) else from_paths(tree)
    elif not method.trainable:
        plan = chain(method.usual_depth)
    elif "tree" in info:
        plan = plan_from_json(info["tree"], "the adapter's tree")
    else:
        raise UserError("the adapter holds no tree; train.py writes it")
    if not 1 <= plan.depth <= method.max_distance:
        raise UserError(f"a tree of {method.name} is 1 to {method.max_distance} candidates deep, not {plan.depth}")
    if len(plan.states) > 1 and not method.probe_distances:
        raise UserError(f"{method.name} has no probes: it takes one tree, not {len(plan.states)} that depend on them")
    return plan
