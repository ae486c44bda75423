"""A drafter: methods with their adapters, what makes a draft of their offers, and the base they decode on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.adapter import Adapter
from jaxspec.drafting.draft import Draft, Drafting, Offer, PyTree, calibrated
from jaxspec.drafting.method import Calibration, Method, Seen
from jaxspec.drafting.shape import Best, StaticTree
from jaxspec.drafting.tree import Path, TreePlan, chain, from_paths, parse_tree
from jaxspec.drafting.tree.plan import plan_from_json
from jaxspec.errors import UserError
from jaxspec.model.base import Base, DraftVocabulary
from jaxspec.model.blocks import in_blocks
from jaxspec.model.rows import Rows
from jaxspec.weights.load import Model
from jaxspec.weights.params import params_fingerprint

MOST_ROWS = 4096  # of a budget


@flax.struct.dataclass
class DeviceSource:
    """What of a source goes into the jitted loop.

    Attributes:
      trainable: the adapter's pytree, `prepared`; empty for methods without one.
      calibration: [2, M, 2] float32, what makes scores chances, in greedy decoding and in sampling; see `calibrated`.
      method: the static settings.
      draft_vocabulary: the tokens that may be drafted; None: all.
    """

    trainable: PyTree
    calibration: jax.Array
    method: Method = flax.struct.field(pytree_node=False)
    draft_vocabulary: DraftVocabulary | None = None


@flax.struct.dataclass
class DeviceDrafter:
    """What of a drafter goes into the jitted loop.

    Attributes:
      sources: what offers candidates; none in autoregressive decoding.
      shape: what makes a draft of them.
    """

    sources: tuple[DeviceSource, ...]
    shape: StaticTree | Best

    def rows(self, base: Base, draft: Draft, lengths: jax.Array) -> Rows:
        """The rows of a step: the nodes, and the probes of the source that has them."""
        for source in self.sources:
            if source.method.probe_distances:
                return source.method.rows(source.trainable, base, draft, lengths)
        return Method().rows({}, base, draft, lengths)

    def observe(self, draftings: Sequence[Drafting], seen: Seen, states: Sequence[PyTree]) -> list[PyTree]:
        """What every source remembers once it has seen what the base has read."""
        each = zip(self.sources, draftings, states, strict=True)
        return [source.method.observe(drafting, seen, state) for source, drafting, state in each]

    def offer(self, draftings: Sequence[Drafting], states: Sequence[PyTree]) -> list[Offer]:
        """What every source says may come."""
        offers = []
        for source, drafting, state in zip(self.sources, draftings, states, strict=True):
            calibration = source.calibration[int(drafting.sampler.sampling)]
            offers.append(calibrated(source.method.offer(drafting, state), calibration))
        return offers


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A method as one of those that feed a draft.

    Attributes:
      method: its settings.
      trainable: its pytree, as trained, in the host's memory where it was read from disk.
      adapter: what it was made from; None for a method that takes none.
      draft_vocabulary: V', how many of the base's most frequent tokens it may draft; 0: all.
      calibration: `greedy` or `sampled`, in place of the adapter's and the method's own.
    """

    method: Method
    trainable: PyTree
    adapter: Adapter | None = None
    draft_vocabulary: int = 0
    calibration: Mapping[str, Calibration] = dataclasses.field(default_factory=dict)

    @property
    def tree(self) -> TreePlan:
        """The source's own tree: its adapter's, or a chain. Raises UserError for an adapter that holds none."""
        if not self.method.trainable:
            return chain(self.method.usual_depth)
        if "tree" not in self.adapter.info:
            raise UserError("the adapter holds no tree; train.py writes it")
        return plan_from_json(self.adapter.info["tree"], "the adapter's tree")

    @property
    def accuracy(self) -> list[list[float]] | None:
        """[M][K], the adapter's measured accuracies, if it has any."""
        return self.adapter.info.get("accuracy") if self.adapter else None

    def with_vocabulary(self, count: int | None) -> Source:
        """The source with another draft vocabulary; None for the adapter's own. Raises UserError for one too large."""
        if not self.method.trainable:
            if count is not None:
                raise UserError(f"{self.method.name} is not trained and has no draft vocabulary, got {count}")
            return self
        count = self.adapter.info.get("draft_vocabulary", 0) if count is None else count
        frequent = self.adapter.frequent_tokens
        check_drafts(count, 0 if frequent is None else len(frequent))
        return dataclasses.replace(self, draft_vocabulary=count)

    def on_device(self, model: Model) -> DeviceSource:
        """What the jitted loop takes, for the base that it decodes on."""
        base, method = model.base, self.method
        if self.draft_vocabulary:
            base = base.drafting(jnp.asarray(self.adapter.frequent_tokens[: self.draft_vocabulary]))
        trainable = method.prepared(jax.tree.map(jnp.asarray, self.trainable), base)
        source = DeviceSource(trainable, jnp.asarray(self.calibrations()), method, base.draft_vocabulary)
        # A prompt's drafts are made from about as many rows as there are distances, however many nodes the tree has.
        return in_blocks(source, model.block_for(method.max_distance), (*method.kernels, "columns"))

    def calibrations(self) -> np.ndarray:
        """[2, M, 2] float32, of greedy decoding and of sampling, which takes the former where it was not measured."""
        count = self.method.max_distance
        measured = (self.adapter and self.adapter.info.get("calibration")) or self._methods_own(count)
        try:
            known = {**measured, **self.calibration}
            greedy = known.get("greedy", [[1.0, 0.0]] * count)
            table = np.asarray([greedy, known.get("sampled", greedy)], np.float32)
        except (AttributeError, TypeError, ValueError):  # not an object, rows of unequal length, or no numbers
            table = np.empty(0)
        if table.shape != (2, count, 2) or not np.isfinite(table).all():
            raise UserError(f"{self.method.name}: calibration must be two numbers for {count} distances")
        return table

    def _methods_own(self, count: int) -> dict[str, Calibration]:
        """The method's calibration for `count` distances; beyond those measured, that of the last one."""
        known = self.method.calibration.items()
        return {name: [*table[:count], *[table[-1]] * (count - len(table))] for name, table in known}


@dataclasses.dataclass(frozen=True)
class Budget:
    """The best nodes of all offers, chosen in every step: `best:ROWS`, or `best:ROWS@MS,ROWS@MS` of several sizes.

    Attributes:
      rows: of the largest step, the root and probes included.
      sizes: rows and milliseconds of every size a step may have, the smallest first; empty where there is but one.
    """

    rows: int
    sizes: tuple[tuple[int, float], ...] = ()

    @property
    def spec(self) -> str:
        """As a user writes it."""
        sizes = ",".join(f"{rows}@{cost:g}" for rows, cost in self.sizes)
        return f"best:{sizes or self.rows}"

    def divided(self, sources: Sequence[Source]) -> tuple[int, int, int]:
        """Nodes, how many of them carry probes, and how many each. Raises UserError for too few rows."""
        probing = [source.method for source in sources if source.method.probe_distances]
        distances, rows = (probing[0].probe_distances, probing[0].probe_rows) if probing else (0, 0)
        owners = max(1, self.rows // 2 // (distances * rows)) if probing else 0  # half of the rows, but one node's
        nodes = self.rows - owners * distances * rows
        if nodes < 2:
            least = 2 + distances * rows
            raise UserError(f"tree {self.spec}: a draft needs {least} rows, the root, a candidate and its probes")
        if self.sizes and self.sizes[0][0] <= self.rows - nodes:
            least = 1 + self.rows - nodes
            raise UserError(f"tree {self.spec}: the smallest size needs {least} rows, the root and all probes")
        return nodes, owners, distances

    def on_device(self, sources: Sequence[Source]) -> Best:
        """What the jitted loop takes."""
        nodes, owners, distances = self.divided(sources)
        depth = min(nodes - 1, max(source.method.max_distance for source in sources))
        trees = tuple(source.tree.arrays(0) for source in sources)
        sizes = tuple(rows - (self.rows - nodes) for rows, _ in self.sizes)
        costs = jnp.asarray([cost for _, cost in self.sizes], jnp.float32) if sizes else None
        return Best(trees, nodes, owners, distances, depth, sizes, costs)


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """Ready to decode. Made by `load_drafter`, `make_drafter` or `autoregressive`.

    Attributes:
      sources: methods with their adapters; at most one of them has probes.
      model: the base they decode on: the one that they were loaded for, or what a method has tuned that to.
      shape: fixed draft trees, of one source alone, or a budget of rows.
      note: how the shape was chosen, in words; empty where it was asked for.
    """

    sources: tuple[Source, ...]
    model: Model
    shape: TreePlan | Budget
    note: str = ""

    @property
    def name(self) -> str:
        """`medusa`, or `medusa+prompt_lookup`."""
        return "+".join(source.method.name for source in self.sources)

    @property
    def digest(self) -> str:
        """Names what drafts, and on which base, for choices that hold of it alone."""
        adapters = sorted(source.adapter.digest for source in self.sources if source.adapter)
        return adapters[0] if len(self.sources) == len(adapters) == 1 else "+".join([self.model.fingerprint, *adapters])

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
        return any(source.method.max_distance for source in self.sources)

    @property
    def num_nodes(self) -> int:
        """N, nodes of a step, padding included."""
        return self.shape.divided(self.sources)[0] if isinstance(self.shape, Budget) else self.shape.num_nodes

    @property
    def num_rows(self) -> int:
        """R, rows of a step, padding included."""
        if isinstance(self.shape, Budget):
            return self.shape.rows
        method = self.source.method
        probes = self.shape.num_probes if method.probe_distances else 0
        return self.shape.num_nodes + probes * method.probe_rows

    @property
    def least_rows(self) -> int:
        """Rows of its smallest step. Kernels lie as is best for these: a loaded machine mostly takes the smallest."""
        sizes = self.shape.sizes if isinstance(self.shape, Budget) else ()
        return sizes[0][0] if sizes else self.num_rows

    @functools.cached_property
    def on_device(self) -> DeviceDrafter:
        """What the jitted loop takes."""
        sources = tuple(source.on_device(self.model) for source in self.sources if source.method.max_distance)
        if isinstance(self.shape, Budget):
            return DeviceDrafter(sources, self.shape.on_device(self.sources))
        return DeviceDrafter(sources, StaticTree(self.shape.arrays(self.source.method.probe_distances)))

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
        trained = [source.method.trainable for source in self.sources]
        sources = tuple(
            source.with_vocabulary(None if any(trained) and not own else draft_vocabulary)
            for source, own in zip(self.sources, trained, strict=True)
        )
        drafter = dataclasses.replace(self, sources=sources, note=note)
        if budget := parse_budget(tree, sources):
            budget.divided(sources)  # refuses one that is too small
            return dataclasses.replace(drafter, shape=budget)
        if len(sources) > 1:
            raise UserError(f"{self.name}: a union takes a tree of best:ROWS, got {str(tree)!r}")
        [source] = sources
        plan, tokens = _plan(source, tree), source.draft_vocabulary or self.model.config.vocab_size
        if plan.max_rank >= tokens:
            raise UserError(f"tree: rank {plan.max_rank} is outside the vocabulary of {tokens}")
        return dataclasses.replace(drafter, shape=plan)


def autoregressive(model: Model) -> Drafter:
    """The drafter that drafts nothing."""
    return Drafter((Source(Method(), {}),), model, from_paths([]))


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
    source = Source(method, trainable, adapter)
    return Drafter((source,), model, from_paths([])).with_tree(tree, draft_vocabulary)


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


def _plan(source: Source, tree: str | TreePlan | Sequence[Path] | None) -> TreePlan:
    """The fixed trees of a source to decode with; None is its own."""
    method = source.method
    if isinstance(tree, str):
        plan = method_plan(method, tree, source.accuracy)
    elif tree is not None:
        plan = tree if isinstance(tree, TreePlan) else from_paths(tree)
    else:
        plan = source.tree
    if not 1 <= plan.depth <= method.max_distance:
        raise UserError(f"a tree of {method.name} is 1 to {method.max_distance} candidates deep, not {plan.depth}")
    if len(plan.states) > 1 and not method.probe_distances:
        raise UserError(f"{method.name} has no probes: it takes one tree, not {len(plan.states)} that depend on them")
    return plan


def parse_budget(tree: object, sources: Sequence[Source]) -> Budget | None:
    """The budget of rows that `best:ROWS` asks for; a union has one of its own. Raises UserError for no such number."""
    least = max(2 + source.method.probe_distances * source.method.probe_rows for source in sources)
    if tree is None and len(sources) > 1:
        return Budget(max(8, least))
    if not isinstance(tree, str) or not tree.startswith("best:"):
        return None
    parts = tree.removeprefix("best:").split(",")
    found = [re.fullmatch(r"(\d+)(?:@(\d+(?:\.\d+)?))?", part) for part in parts]
    rows = [int(match[1]) if match else 0 for match in found]
    if not 2 <= rows[-1] <= MOST_ROWS or not all(found):
        raise UserError(f"tree {tree!r}: write best:ROWS with 2 to {MOST_ROWS} rows, or best:ROWS@MS,ROWS@MS")
    if len(parts) == 1:
        return Budget(rows[0])
    costs = [float(match[2] or 0) for match in found]
    if min(costs) <= 0:
        raise UserError(f"tree {tree!r}: of several sizes each needs its milliseconds, as in best:1@21,4@23.5")
    if not rows[0] or any(more <= less for less, more in itertools.pairwise(rows)):
        raise UserError(f"tree {tree!r}: sizes must be given in order, from 1 row on")
    return Budget(rows[-1], tuple(zip(rows, costs, strict=True)))
