"""The contract of a method: what it drafts, which rows it verifies, and how it learns.

A method is a frozen dataclass of static settings with pure functions. Everything that changes from step to step
is in its `method_state`, a pytree every leaf of which has a batch axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args, get_origin, get_type_hints

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import Accepted, Draft, DraftContext, Offer, PyTree
from jaxspec.errors import UserError, check_at_least
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder, abstract_params
from jaxspec.model.rows import Rows

Calibration = Sequence[Sequence[float]]  # [M][2], see `calibrated`


@flax.struct.dataclass
class Step:
    """The draft that a step verified, and what it computed.

    Attributes:
      draft: what was verified.
      states: {layer: hidden states [B, R, D] before it}, of the rows there, for every layer that the step's `Rows` asks
        for; and under the number of layers those of all rows after the last one, before the final norm.
      logits: [B, N, V] float32, the base's at the nodes.
      accepted: the surviving path and the bonus token.
      added: bool scalar, whether the rows that a method adds were among them; if not, their states are zeros.
    """

    draft: Draft
    states: dict[int, jax.Array]
    logits: jax.Array
    accepted: Accepted
    added: jax.Array | bool = True


@flax.struct.dataclass
class ReadChunk:
    """Text that the base has just read: a chunk of a prompt, or the accepted path of a step.

    Attributes:
      tokens: [B, T + 1] int32, the tokens read and the one after the last of them; what follows is garbage.
      hidden: [B, T, D], their hidden states before the final norm.
      first: [B] int32, position of the first of them, which differs between rows.
      length: [B] int32, how many of the T were read; 0 in rows that have nothing to observe: their prompt has ended, or
        the token after their last chunk is not known yet.
      taps: {layer: their hidden states [B, T, D] before it}, of the layers that any method of the drafter asks for
        (`Facts.taps`).
      step: what else a step computed; None of a prompt, and of tokens that have waited (`Facts.reads_late`).
    """

    tokens: jax.Array
    hidden: jax.Array
    first: jax.Array
    length: jax.Array
    taps: dict[int, jax.Array] = flax.struct.field(default_factory=dict)
    step: Step | None = None

    def last(self, states: jax.Array) -> jax.Array:
        """The state [B, ...] of the last token read, of states [B, T, ...]."""
        return states[jnp.arange(len(states)), jnp.maximum(self.length - 1, 0)]

    def updated(self, new: PyTree, old: PyTree) -> PyTree:
        """New arrays [B, ...] of rows that have read something, the old ones of others."""

        def read(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(jnp.expand_dims(self.length > 0, range(1, new.ndim)), new, old)

        return jax.tree.map(read, new, old)


@flax.struct.dataclass
class Batch:
    """Training sequences: prompts with answers, the base's own ones or given ones.

    Attributes:
      tokens: [B, T] int32.
      lengths: [B] int32, tokens that are no padding.
      starts: [B] int32, index of the first answer token.
      points: [B, G] int32, insertion points: indices of tokens that own a group of probes; -1 for none.
      seeds: [B] uint32, of what is random in a loss, as dropout is: the same in the same step of a run; None where
        nothing is, in evaluation.
    """

    tokens: jax.Array
    lengths: jax.Array
    starts: jax.Array
    points: jax.Array
    seeds: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Stage:
    """An equal part of a training, with an optimizer and a schedule of its own.

    Attributes:
      trains: entries of the trainable pytree that move; None: all.
      learning_rate: factor of the configured one.
    """

    trains: tuple[str, ...] | None = None
    learning_rate: float = 1.0


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a method on a base that the step, the loaders and the trainer need.

    Attributes:
      distances: M, how far ahead the method predicts; trees are at most this deep. 0: it drafts nothing.
      learned_distances: how far ahead it has learned to predict; deeper trees draw a warning. 0: `distances`.
      default_candidates: number of candidates in a draft that is given no tree: in a chain, or chosen per step if the
        method adds `further_rows`; 0: `distances`. Trained adapters bring trees of their own.
      chain_only: a fixed draft must be a chain: no other candidates of a level are followed.
      probe_rows: rows of a step that one probe makes; a node may carry a probe for each distance. 0: no probes.
      probe_cost: rows that a probe counts for in a tree's budget; less where probes run through fewer layers.
      further_rows: rows that `Method.rows` puts behind the nodes of every step besides probes.
      taps: before which layers `Method.observe` needs hidden states; the number of layers stands for those after the
        last one.
      own_layers: how many layers `Method.offer` runs, one after the other. 0: none.
      reads_late: whether `Method.observe` runs layers, and only for the sake of the next draft. While no draft is due,
        tokens of several steps may wait and be read at once. `observe` must need neither `ReadChunk.step` nor what a
        `DraftContext` says of the newest token, which may be one of a later step.
      adapter: where the adapter comes from: `trained`; `base`, trained together with a base of its own; `module`, part
        of the base's own files; the name of the command that builds it; empty for methods that take none.
      follows_prediction: whether it drafts from a text that the user expects (`Method.expect`).
      learned_tokens: how many of the base's most frequent tokens it learns to draft; 0: all. In training these are the
        base's draft vocabulary.
      stages: how training is divided.
    """

    distances: int = 0
    learned_distances: int = 0
    default_candidates: int = 0
    chain_only: bool = False
    probe_rows: int = 0
    probe_cost: float = 0.0
    further_rows: int = 0
    taps: tuple[int, ...] = ()
    own_layers: int = 0
    reads_late: bool = False
    adapter: str = ""
    follows_prediction: bool = False
    learned_tokens: int = 0
    stages: tuple[Stage, ...] = (Stage(),)

    @property
    def trained(self) -> bool:
        """Whether training makes the adapter."""
        return self.adapter in ("trained", "base")

    @property
    def learned(self) -> bool:
        """Whether the adapter has learned, here or with the base."""
        return self.trained or self.adapter == "module"

    @property
    def takes_time(self) -> bool:
        """Whether `Method.offer` multiplies with weights: it is skipped where no row wants a draft or none pays."""
        return self.learned or self.own_layers > 0

    @property
    def replaces_base(self) -> bool:
        """Whether training ends in a base of its own, beside an adapter for it."""
        return self.adapter == "base"

    @property
    def probes(self) -> int:
        """Probes that a node may carry, one for each distance; 0 for methods that draft after the pass."""
        return self.distances if self.probe_rows else 0

    @property
    def adds_rows(self) -> bool:
        """Whether a step has rows besides nodes; in a union one method may add some."""
        return bool(self.probe_rows or self.further_rows)


@dataclasses.dataclass(frozen=True)
class Finalized:
    """The method, pytree and base that decode once training is done.

    Attributes:
      method: settings of what decodes.
      trainable: its pytree.
      base: the decoder that it drafts for.
      draft_model: a smaller base that the pytree makes together with parameters of `base`, and that can be loaded as a
        model; None for most methods.
    """

    method: Method
    trainable: PyTree
    base: Base
    draft_model: Base | None = None


@dataclasses.dataclass(frozen=True)
class Method:
    """Settings and pure functions of one way to draft. This one drafts nothing.

    `trainable` is the pytree of `init`, in training in the base's dtype except for norms; in a `DraftContext` it is
    what `prepare` returned.
    """

    name: ClassVar[str] = "autoregressive"
    calibration: ClassVar[Mapping[str, Calibration]] = {"0": [[1.0, 0.0]]}  # by temperature, where no adapter has one
    kernels: ClassVar[tuple[str, ...]] = ("kernel",)  # leaves of the trainable pytree that `product` multiplies with
    adjustable: ClassVar[tuple[str, ...] | None] = None  # settings a user may give; None: all, there is no adapter

    def facts(self, config: ModelConfig) -> Facts:
        """The properties of the method on a base of these shapes."""
        return Facts()

    # Training

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The trainable pytree, a dict of float32 arrays. Raises UserError for settings that do not fit the base.

        For a method whose adapter is built, a pytree with the shapes that its settings say; integers stay integers.
        """
        return {}

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Scalar loss and float32 metrics of one batch; gradients flow to `trainable` alone.

        Args:
          trainable: the pytree that learns.
          base: the frozen decoder.
          batch: sequences with insertion points.
          stage: index into `Facts.stages`.
        """
        raise TypeError(f"{self.name} has nothing to train")

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] of the drafter at every insertion point, for evaluation; arguments as in `loss`."""
        raise TypeError(f"{self.name} predicts nothing ahead")

    def predictions_and_factors(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """`predictions`, and what the method adds to the log-probabilities that they say, [B, G, M, 1].

        Decoding offers the sum, where drafts are chosen per step. By default 0, [].
        """
        return self.predictions(trainable, base, batch), jnp.zeros(())

    def finalize(self, trainable: PyTree, base: Base) -> Finalized:
        """The result of training. Most methods leave settings, pytree and base as they are."""
        return Finalized(self, trainable, base)

    # Decoding

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """The pytree that decoding uses: everything done that need not be done in every step."""
        return trainable

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The method state of `batch` texts of at most `capacity` tokens before any of them is read.

        A leaf whose shape depends on the capacity has a slot for each position along that axis. Of a prompt's chunk
        `observe` writes there the slots of its tokens and of the one after it, so that readings can be kept in parts.
        """
        return {}

    def expect(self, method_state: PyTree, predicted: jax.Array) -> PyTree:
        """The method state of texts whose answers the user predicts, before any token of them is there.

        Called where `Facts.follows_prediction`.

        Args:
          method_state: of the prompts, or of the chunks before their last ones.
          predicted: [B, E] int32, the predicted texts, with -1 before and, at least once, behind each.
        """
        return method_state

    def rows(self, context: DraftContext, draft: Draft, method_state: PyTree) -> Rows:
        """The rows to verify, one group: the draft's nodes, then probes or `further_rows` for methods that have them.

        Only nodes are ever committed. What the others become, `observe` finds in the states of the step, unless its
        `added` says that the step left them out.
        """
        return node_rows(context.base, draft, context.position)

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """The method state after the base has read a chunk: of the prompt, then the accepted path of a step."""
        return method_state

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """Candidates for the tokens after the newest one."""
        raise TypeError(f"{self.name} offers nothing")


def node_rows(base: Base, draft: Draft, position: jax.Array) -> Rows:
    """The nodes of a draft as rows, whose root stands at `position` [B]."""
    positions = position[:, None] + draft.tree.depth
    return Rows(base.embed(draft.tokens)[:, None], positions[:, None], draft.tree.ancestors[:, None])


def method_text(method: Method) -> str:
    """A method's name with the settings that are not the defaults: `lookahead:window=5`."""
    changed = [f for f in dataclasses.fields(method) if getattr(method, f.name) != f.default]
    return ":".join([method.name, ",".join(f"{f.name}={getattr(method, f.name)}" for f in changed)]).rstrip(":")


def abstract_trainable(method: Method, config: ModelConfig) -> PyTree:
    """Shapes and dtypes of a method's trainable pytree on a base of these shapes; raises what `Method.init` raises."""

    def init(params: dict) -> PyTree:
        return method.init(jax.random.key(0), Base(params, Decoder(config)))

    return jax.eval_shape(init, abstract_params(config))


def check_choices(method: Method) -> None:
    """Raise UserError where a setting with a fixed set of values (a `Literal`) has another one."""
    for name, kind in get_type_hints(type(method)).items():
        if get_origin(kind) is Literal and getattr(method, name) not in get_args(kind):
            choices = ", ".join(map(str, get_args(kind)))
            raise UserError(f"{method.name}: {name} must be one of {choices}, got {getattr(method, name)!r}")


def check_least(method: Method, **least: float) -> None:
    """Raise UserError for a setting that is too small, or of which an element is; `least` by its name."""
    check_at_least(method, least, method.name)


def check_decay(name: str, decay: float) -> None:
    """Raise UserError for a decay that is no share."""
    if not 0 < decay <= 1:
        raise UserError(f"{name}: decay must be above 0 and at most 1, got {decay}")
