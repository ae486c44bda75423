"""The host-side part of a drafter: sources, the shape that makes a draft of their offers, and the base."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from jaxspec.config import ModelConfig
from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.method import Finalized, Method
from jaxspec.decoding.shape import Best, StaticTree
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.budget import Budget, default_rows, parse_budget
from jaxspec.drafters.costs import Samples
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError
from jaxspec.trees import TreePlan, from_paths, parse_tree
from jaxspec.trees.arrays import Path
from jaxspec.weights.model import Model
from jaxspec.weights.params import tuned_fingerprint

# By JAX's name of the platform. A GPU reads the weights for as many rows in the time that it takes for one.
FREE_ROWS = {"gpu": 32}
_UNION_ROWS = 8  # of the fixed budget of a union


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """Ready to decode. Made by `load_drafter`, `make_drafter` or `autoregressive`.

    The host-side part: files, weights, a user's words; `DeviceDrafter` is a pytree in the jitted loop.

    Attributes:
      sources: methods with their adapters; at most one of them adds rows.
      model: the base they decode on: the one that they were loaded for, or a method's tuned version of it.
      shape: fixed draft trees, of one source alone, or a budget of rows; by default a tree without candidates.
      note: how the shape was chosen, in words; empty where it was asked for.
      samples: seconds of steps, measured where `shape` only guesses what they cost: by the number of texts decoded
        together and `kind_of` steps, then by slots of the cache.
      idle: `Pace.idle` after the last texts, by the number of texts decoded together and `kind_of` steps.
    """

    sources: tuple[Source, ...]
    model: Model
    shape: TreePlan | Budget = from_paths([])
    note: str = ""
    samples: dict[tuple[int, int], dict[int, Samples]] = dataclasses.field(default_factory=dict, init=False)
    idle: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        """`medusa`, or `medusa+prompt_lookup`."""
        return "+".join(source.method.name for source in self.sources)

    @property
    def digest(self) -> str:
        """A name of the sources' weights and of the base, for choices that hold for these alone."""
        digests = sorted(filter(None, (source.digest for source in self.sources)))
        alone = len(self.sources) == 1 and self.sources[0].adapter is not None
        return digests[0] if alone else "+".join([self.model.fingerprint, *digests])

    @property
    def source(self) -> Source:
        """The one source. Raises UserError for a union."""
        if len(self.sources) > 1:
            raise UserError(f"{self.name}: this takes one method, not {len(self.sources)}")
        return self.sources[0]

    @property
    def plan(self) -> TreePlan:
        """The fixed trees. Raises UserError where a draft is chosen per step."""
        if isinstance(self.shape, Budget):
            raise UserError(f"{self.name}: this takes fixed trees, not {self.shape.spec}")
        return self.shape

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return any(source.facts.distances for source in self.sources)

    @property
    def follows_prediction(self) -> bool:
        """Whether it drafts from a text that the user expects."""
        return any(source.facts.follows_prediction for source in self.sources)

    @property
    def num_nodes(self) -> int:
        """N, nodes of a step, padding included."""
        return max(self.shape.nodes(self.sources)) if isinstance(self.shape, Budget) else self.shape.num_nodes

    @property
    def num_rows(self) -> int:
        """R, rows of a step, padding included."""
        if isinstance(self.shape, Budget):
            return self.shape.rows
        facts = self.source.facts
        return self.shape.num_nodes + self.shape.num_probes * facts.probe_rows + facts.further_rows

    @property
    def least_rows(self) -> int:
        """Rows of its smallest step, which get the best layout of kernels: a loaded machine mostly takes it."""
        sizes = self.shape.sizes if isinstance(self.shape, Budget) else ()
        return sizes[0].rows if sizes else self.num_rows

    @functools.cached_property
    def on_device(self) -> DeviceDrafter:
        """The device-side part."""
        sources = tuple(source.on_device(self.model) for source in self.sources if source.facts.distances)
        return DeviceDrafter(sources, self.device_shape, FREE_ROWS.get(jax.default_backend(), 0))

    @property
    def device_shape(self) -> StaticTree | Best:
        """The device-side part of the shape."""
        if isinstance(self.shape, Budget):
            return self.shape.on_device(self.sources)
        return StaticTree(self.shape.arrays(self.source.facts.probes))

    def check_accepted_by(self, acceptance: Acceptance) -> None:
        """Raise UserError for drafts that an acceptance rule cannot judge."""
        if not acceptance.chains or not self.drafts:
            return
        if isinstance(self.shape, Budget):
            what = "drafts chosen in every step, which are not drawn"
        elif not self.source.facts.takes_time:
            what = f"{self.name}, which looks its candidates up and draws none"
        elif any(any(path) for state in self.shape.states for path in state.paths):
            what = "a tree"
        else:
            return
        raise UserError(f"block verification judges a chain that one method draws, not {what}: give it --tree chain:N")

    def with_tree(
        self, tree: str | TreePlan | Sequence[Path] | None, draft_vocabulary: int | None = None, note: str = ""
    ) -> Drafter:
        """The same sources on the same base with another shape.

        Args:
          tree: a specification like `sparse:16` or `best:8`, a plan, or a list of paths; None for a source's own tree,
            and for a union `best:8`.
          draft_vocabulary: draft only so many of the base's most frequent tokens; 0 drafts all; None for the adapters'
            own.
          note: how the tree was chosen.

        Raises:
          UserError: a tree or a draft vocabulary that does not fit.
        """
        if not self.drafts:
            if tree is not None or draft_vocabulary is not None:
                asked = f"tree, got {str(tree)!r}" if tree is not None else f"draft vocabulary, got {draft_vocabulary}"
                raise UserError(f"{self.name} drafts nothing and has no {asked}")
            return dataclasses.replace(self, note=note)
        trained = [source.trained for source in self.sources]
        sources = tuple(
            source.with_vocabulary(None if any(trained) and not own else draft_vocabulary)
            for source, own in zip(self.sources, trained, strict=True)
        )
        shape, learned = _shape(sources, tree), sources[0].facts.learned_distances or sources[0].facts.distances
        if tree is not None and isinstance(shape, TreePlan) and shape.depth > learned:
            note = join_notes(note, f"warning: a tree of {shape.depth} levels, and {self.name} has learned {learned}")
        return dataclasses.replace(self, sources=sources, shape=shape, note=note)


def join_notes(*notes: str) -> str:
    """One line of the notes that are not empty."""
    return "; ".join(filter(None, notes))


def autoregressive(model: Model) -> Drafter:
    """The drafter that drafts nothing."""
    return Drafter((Source(Method(), {}, model.config),), model)


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
    final, model = finalized(adapter.method, adapter.trainable, model)
    source = Source(final.method, final.trainable, model.config, adapter)
    return Drafter((source,), model).with_tree(tree, draft_vocabulary)


def finalized(method: Method, trainable: PyTree, model: Model) -> tuple[Finalized, Model]:
    """The result of `Method.finalize`, and its base as a model."""
    final = method.finalize(trainable, model.base)
    if final.base is not model.base:
        fingerprint = tuned_fingerprint(model.config, final.base.params, model.fingerprint)
        model = dataclasses.replace(model, params=final.base.params, fingerprint=fingerprint)
    return final, model


def method_plan(method: Method, config: ModelConfig, spec: str, accuracy: Sequence[Sequence[float]] | None) -> TreePlan:
    """The tree that a specification asks for of a method on a base of these shapes, with accuracies [M][K]."""
    facts = method.facts(config)
    return parse_tree(spec, method.name, facts.distances, accuracy, facts.probe_cost)


def _shape(sources: Sequence[Source], tree: str | TreePlan | Sequence[Path] | None) -> TreePlan | Budget:
    """The shape that is asked for of some sources; None for their own."""
    source, *others = sources
    method, facts = source.method, source.facts
    if tree is None and (others or facts.further_rows):
        return Budget(default_rows(sources, _UNION_ROWS))
    if isinstance(tree, str) and tree.startswith("best:"):
        return parse_budget(tree, sources)
    if others:
        names = "+".join(each.method.name for each in sources)
        raise UserError(f"{names}: a union takes a tree of auto, own or best:ROWS, got {str(tree)!r}")
    if isinstance(tree, str):
        plan = method_plan(method, source.config, tree, source.accuracy)
    elif tree is not None:
        plan = tree if isinstance(tree, TreePlan) else from_paths(tree)
    else:
        plan = source.tree
    if not 1 <= plan.depth <= facts.distances:
        raise UserError(f"a tree of {method.name} is 1 to {facts.distances} candidates deep, not {plan.depth}")
    if len(plan.states) > 1 and not facts.probes:
        raise UserError(f"{method.name} has no probes: it takes one tree, not {len(plan.states)} that depend on them")
    paths = [path for state in plan.states for path in state.paths]
    if facts.chain_only and len({path[:-1] for path in paths}) > plan.depth:
        raise UserError(f"{method.name}: it drafts a chain here: give the tree chain:N or best:N")
    tokens, highest = source.draft_vocabulary or source.config.vocab_size, max(path[-1] for path in paths)
    if highest >= tokens:
        raise UserError(f"tree: rank {highest} is outside the vocabulary of {tokens}")
    return plan
