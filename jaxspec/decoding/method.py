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
    """What a step verified and computed.

    Attributes:
      draft: what was verified.
      states: {layer: hidden states [B, R, D] before it}, of the rows there, for every layer that the step's `Rows` asks
        for; and under the number of layers those of all rows after the last one, before the final norm.
      logits: [B, N, V] float32, the base's at the nodes.
      accepted: the surviving path and the bonus token.
    """

    draft: Draft
    states: dict[int, jax.Array]
    logits: jax.Array
    accepted: Accepted


@flax.struct.dataclass
class ReadChunk:
    """Text that the base has just read: a prompt, or a chunk of one, or the accepted path of a step.

    Attributes:
      tokens: [B, T + 1] int32, the tokens read and the one after the last of them; what follows is garbage.
      hidden: [B, T, D], their hidden states before the final norm.
      first: [B] int32, position of the first of them.
      length: [B] int32, how many of the T were read; 0 where a prompt ended in an earlier chunk.
      taps: {layer: their hidden states [B, T, D] before it}, of the layers that any method of the drafter asks for
        (`Method.taps`).
      step: what else a step computed; None of a prompt.
    """

    tokens: jax.Array
    hidden: jax.Array
    first: jax.Array
    length: jax.Array
    taps: dict[int, jax.Array] = flax.struct.field(default_factory=dict)
    step: Step | None = None

    def last(self, states: jax.Array) -> jax.Array:
        """Of states [B, T, ...] that of the last token read, [B, ...]."""
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
class Method:
    """Settings and pure functions of one way to draft. This one drafts nothing."""

    name: ClassVar[str] = "autoregressive"
    trainable: ClassVar[bool] = False
    own_passes: ClassVar[bool] = False  # `offer` runs layers, and rests where no row wants a draft or none pays
    calibration: ClassVar[Mapping[str, Calibration]] = {}  # of methods without adapter: `greedy` and `sampled`
    chains: ClassVar[bool] = False  # a fixed draft of it is a chain, beside which no other candidates are followed
    built_with: ClassVar[str] = ""  # the program that makes its adapter, where it has one that is built and not trained
    kernels: ClassVar[tuple[str, ...]] = ("kernel",)  # leaves of the trainable pytree that `product` multiplies with
    adjustable: ClassVar[tuple[str, ...]] = ()  # settings that decoding may change where an adapter brings the others

    @classmethod
    def takes_adapter(cls) -> bool:
        """Whether there is anything to load besides settings."""
        return cls.trainable or bool(cls.built_with)

    @property
    def spec(self) -> str:
        """The name with the settings that are not the defaults."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ":".join([self.name, ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed)]).rstrip(":")

    @property
    def max_distance(self) -> int:
        """M, how far ahead the method predicts; trees are at most this deep."""
        return 0

    @property
    def learned_distance(self) -> int:
        """How far ahead it has learned to predict; deeper trees are allowed, with a warning."""
        return self.max_distance

    @property
    def default_depth(self) -> int:
        """Length of the chain that a method without training drafts, unless it is given another tree."""
        return self.max_distance

    @property
    def default_rows(self) -> int:
        """Rows of the budget that the method drafts within, unless it is given another tree; 0 for a fixed tree."""
        return 0

    @property
    def probe_distances(self) -> int:
        """Probes a node may carry; 0 for methods that draft after the pass."""
        return 0

    @property
    def probe_rows(self) -> int:
        """Rows of a step that one probe makes; 0 for methods without."""
        return 0

    @property
    def further_rows(self) -> int:
        """Rows that `rows` puts behind the nodes of every step, whatever they are, besides probes."""
        return 0

    @property
    def adds_rows(self) -> bool:
        """Whether a step has any rows but nodes for it; of the methods of a union one may."""
        return bool(self.probe_distances or self.further_rows)

    def probe_cost(self, layers: int) -> float:
        """Rows that a probe counts for in a tree's budget, on a base of so many layers."""
        return self.probe_rows

    def taps(self, layers: int) -> tuple[int, ...]:
        """Before which layers of a base of so many `observe` wants the hidden states of what was read.

        The number of layers asks for those after the last one. Nothing else is kept.
        """
        return ()

    @property
    def learned_tokens(self) -> int:
        """How many of the base's most frequent tokens it learns to draft; 0: all.

        In training these are the base's draft vocabulary, for `init`, `loss` and `predictions`.
        """
        return 0

    @property
    def replaces_base(self) -> bool:
        """Whether training ends in a base of its own, beside an adapter for that one."""
        return False

    @property
    def stages(self) -> tuple[Stage, ...]:
        """How training is divided."""
        return (Stage(),)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The trainable pytree, float32: a dict. Raises UserError for settings that do not fit the base.

        Of a method whose adapter is built, one with the shapes that its settings say; integers stay integers on disk.
        """
        return {}

    def finalize(self, trainable: PyTree, base: Base) -> tuple[Method, PyTree, Base]:
        """What decodes: a method, its pytree and the base they are for. Most leave the base as it is."""
        return self, trainable, base

    def as_draft_model(self, trainable: PyTree, base: Base) -> Base | None:
        """A smaller base that the pytree makes, together with what it shares with this one, and that drafts for it.

        Training leaves it where `load_model` finds it. Most methods have none.
        """
        return None

    def prepared(self, trainable: PyTree, base: Base) -> PyTree:
        """What decoding uses of the trainable pytree: everything done that need not be done in every step."""
        return trainable

    def abstract(self, config: ModelConfig) -> PyTree:
        """Shapes and dtypes of the trainable pytree, to check an adapter against."""

        def init(params: dict) -> PyTree:
            return self.init(jax.random.key(0), Base(params, Decoder(config)))

        return jax.eval_shape(init, abstract_params(config))

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Scalar loss and float32 metrics of one batch; gradients flow to `trainable` alone.

        Args:
          trainable: the pytree of `init`, in the base's dtype but for norms.
          base: the frozen decoder.
          batch: sequences with insertion points.
          stage: index into `stages`.
        """
        raise TypeError(f"{self.name} has nothing to train")

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] of the drafter at every insertion point, for evaluation; arguments as in `loss`."""
        raise TypeError(f"{self.name} predicts nothing ahead")

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """What the method remembers of `batch` texts of at most `capacity` tokens, before it has seen any of them."""
        return {}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """The state with what the base has just read: first the prompt, then the accepted path of every step."""
        return method_state

    def rows(
        self, trainable: PyTree, base: Base, draft: Draft, lengths: jax.Array, method_state: PyTree = None
    ) -> Rows:
        """The rows to verify, one group: the draft's nodes, then probes or `further_rows` for methods that have them.

        Only nodes are ever committed. What the others become, `observe` finds in the states of the step.
        """
        positions = lengths[:, None] + draft.tree.depth
        return Rows(base.embed(draft.tokens)[:, None], positions[:, None], draft.tree.ancestors[:, None])

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """What may come after the newest token."""
        raise TypeError(f"{self.name} offers nothing")


def check_choices(method: Method) -> None:
    """Raise UserError where a setting with a fixed set of values (a `Literal`) has another one."""
    for name, kind in get_type_hints(type(method)).items():
        if get_origin(kind) is Literal and getattr(method, name) not in get_args(kind):
            choices = ", ".join(map(str, get_args(kind)))
            raise UserError(f"{method.name}: {name} must be one of {choices}, got {getattr(method, name)!r}")


def check_least(method: Method, **least: float) -> None:
    """Raise UserError for a setting that is too small; `least` by its name."""
    check_at_least(method, least, method.name)
