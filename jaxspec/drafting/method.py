"""The contract of a method: what it drafts, which rows it verifies, and how it learns.

A method is a frozen dataclass of static settings with pure functions. Everything that changes from step to step
is in its `method_state`, a pytree every leaf of which has a batch axis.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.acceptance import Accepted, Draft, Drawn
from jaxspec.drafting.sampling import Sampler
from jaxspec.drafting.tree import Tree
from jaxspec.errors import UserError
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder, abstract_params
from jaxspec.model.rows import Rows

PyTree = Any


@flax.struct.dataclass
class Candidates:
    """Tokens that may come, at some places.

    Attributes:
      tokens: [B, X, K] int32, the best first, or those drawn first.
      log_q: [B, X, V], what they were drawn from, where the sampler is independent; else None.
    """

    tokens: jax.Array
    log_q: jax.Array | None


@flax.struct.dataclass
class Prompt:
    """What a method sees of the prompts, after prefill.

    Attributes:
      tokens: [B, T] int32, padded on the right.
      hidden: [B, T, D], hidden states of all positions, before the final norm.
      lengths: [B] int32.
      capacity: S of the base's cache: tokens that a cache of the method's own must hold (static).
      chunk: positions to run at once, a divisor of T (static).
    """

    tokens: jax.Array
    hidden: jax.Array
    lengths: jax.Array
    capacity: int = flax.struct.field(pytree_node=False)
    chunk: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Verified:
    """What a method sees after verification.

    Attributes:
      exits: hidden states of all rows of the step, [B, R, D] after each of the last layers that its `Rows` asked for,
        before the final norm.
      accepted: the surviving path and the bonus token.
      tokens: [B, P + 1] int32, the token after each node of the path: accepted candidates, then the bonus; what
        follows is garbage.
      position: [B] int32, position of the new root, the bonus token.
    """

    exits: tuple[jax.Array, ...]
    accepted: Accepted
    tokens: jax.Array
    position: jax.Array


@flax.struct.dataclass
class Batch:
    """Training sequences: prompts with answers, the base's own ones or given ones.

    Attributes:
      tokens: [B, T] int32.
      lengths: [B] int32, tokens that are no padding.
      starts: [B] int32, index of the first answer token.
      points: [B, G] int32, insertion points: indices of tokens that own a group of probes; -1 for none.
    """

    tokens: jax.Array
    lengths: jax.Array
    starts: jax.Array
    points: jax.Array


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
    kernels: ClassVar[tuple[str, ...]] = ("kernel",)  # leaves of the trainable pytree that `product` multiplies with

    @property
    def max_distance(self) -> int:
        """M, how far ahead the method predicts; trees are at most this deep."""
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
    def tunes_base(self) -> bool:
        """Whether this method decodes on a base that it has trained itself."""
        return False

    @property
    def replaces_base(self) -> bool:
        """Whether training ends in a base of its own instead of an adapter of the one it began with."""
        return False

    @property
    def stages(self) -> tuple[Stage, ...]:
        """How training is divided."""
        return (Stage(),)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The trainable pytree, float32: a dict. Raises UserError for settings that do not fit the base."""
        return {}

    def fit_base(self, trainable: PyTree, base: Base) -> Base:
        """The base as this method has tuned it, which `loss` and `predictions` are given: for most, the frozen one."""
        return base

    def settled(self, trainable: PyTree, base: Base) -> tuple[Method, PyTree, PyTree]:
        """What decodes where `tunes_base`: a method and its pytree, and the parameters of the base they are for."""
        raise TypeError(f"{self.name} leaves the base as it is")

    def prepared(self, trainable: PyTree, base: Base) -> PyTree:
        """What decoding uses of the trainable pytree: everything done that need not be done in every step."""
        return trainable

    def abstract(self, config: ModelConfig) -> PyTree:
        """Shapes and dtypes of the trainable pytree, to check an adapter against."""
        init = lambda params: self.init(jax.random.key(0), Base(params, Decoder(config)))  # noqa: E731
        return jax.eval_shape(init, abstract_params(config))

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Scalar loss and float32 metrics of one batch; gradients flow to `trainable` alone.

        Args:
          trainable: the pytree of `init`.
          base: the decoder, from `fit_base`.
          batch: sequences with insertion points.
          stage: index into `stages`.
        """
        raise TypeError(f"{self.name} has nothing to train")

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] that the drafter gives at every insertion point, for evaluation."""
        raise TypeError(f"{self.name} predicts nothing ahead")

    def start(
        self,
        trainable: PyTree,
        base: Base,
        tree: Tree,
        prompt: Prompt,
        root: jax.Array,
        sampler: Sampler,
        seeds: jax.Array,
    ) -> tuple[Draft, PyTree]:
        """First draft and method state, after prefill.

        Args:
          trainable: the adapter's pytree.
          base: the frozen decoder.
          tree: arrays with a batch axis.
          prompt: tokens and hidden states of the prompts.
          root: [B] int32, the first token emitted.
          sampler: as in `propose`.
          seeds: [B] uint32.
        """
        return no_draft(base, tree, root, sampler), {}

    def rows(self, trainable: PyTree, base: Base, tree: Tree, draft: Draft, lengths: jax.Array) -> Rows:
        """The rows to verify, one group: the draft's nodes, and for methods that probe, their probes after them."""
        positions = lengths[:, None] + tree.depth
        return Rows(base.embed(draft.tokens)[:, None], positions[:, None], tree.ancestors[:, None])

    def propose(
        self,
        trainable: PyTree,
        base: Base,
        tree: Tree,
        next_tree: Tree,
        verified: Verified,
        sampler: Sampler,
        seeds: jax.Array,
        method_state: PyTree,
    ) -> tuple[Draft, PyTree]:
        """The next draft, from what the step computed.

        Args:
          trainable: the adapter's pytree.
          base: the frozen decoder.
          tree: the tree just verified, arrays with a batch axis.
          next_tree: the tree to fill, of the same padded size.
          verified: hidden states and the accepted path.
          sampler: ranks candidates with the noise of the positions they are for.
          seeds: [B] uint32.
          method_state: what the method remembers.
        """
        return no_draft(base, next_tree, verified.accepted.bonus, sampler), method_state


def no_draft(base: Base, tree: Tree, root: jax.Array, sampler: Sampler) -> Draft:
    """The newest tokens [B] alone, without candidates."""
    is_root = jnp.broadcast_to(jnp.arange(tree.num_nodes) == 0, (len(root), tree.num_nodes))
    drawn = None
    if sampler.independent:
        drawn = Drawn(jnp.zeros((len(root), tree.max_depth, base.vocab_size)), jnp.zeros(is_root.shape, jnp.int32))
    return Draft(jnp.where(is_root, root[:, None], 0), is_root, drawn)


def rank_candidates(
    base: Base, logits: jax.Array, sampler: Sampler, seeds: jax.Array, positions: jax.Array, count: int
) -> Candidates:
    """The best tokens by a drafter's logits, ranked with the noise of the positions they are for.

    With an independent sampler that is drawing without replacement (Gumbel's top-k).

    Args:
      base: the frozen decoder, which knows what may be drafted.
      logits: [B, X, V'].
      sampler: as the base's own tokens are drawn, or independently.
      seeds: [B] uint32.
      positions: [B, X] int32, or [B, 1] where all are for the same.
      count: K.
    """
    scores = sampler.filtered(logits)
    log_q = base.draft_whole(jax.nn.log_softmax(scores), -jnp.inf) if sampler.independent else None
    if sampler.sampling:
        scores += sampler.noise(seeds, positions, base.draft_ids(jnp.arange(scores.shape[-1])))
    return Candidates(base.draft_ids(jax.lax.top_k(scores, count)[1]), log_q)


def draft_from_candidates(tree: Tree, root: jax.Array, candidates: Candidates, known: jax.Array) -> Draft:
    """Fill a tree from candidates per distance.

    Args:
      tree: arrays with a batch axis.
      root: [B] int32, the newest token.
      candidates: of M distances, by distance and rank.
      known: [B, M] bool, distances that have candidates this time.
    """
    place = jnp.maximum(tree.depth - 1, 0)
    index = (jnp.arange(root.shape[0])[:, None], place)
    is_root = tree.depth == 0
    tokens = jnp.where(is_root, root[:, None], candidates.tokens[(*index, tree.rank)])
    drawn = None if candidates.log_q is None else Drawn(candidates.log_q, place)
    return Draft(tokens, tree.live & (is_root | known[index]), drawn)


def check_choices(method: Method) -> None:
    """Raise UserError where a setting with a fixed set of values (a `Literal`) has another one."""
    for name, kind in get_type_hints(type(method)).items():
        if get_origin(kind) is Literal and getattr(method, name) not in get_args(kind):
            choices = ", ".join(map(str, get_args(kind)))
            raise UserError(f"{method.name}: {name} must be one of {choices}, got {getattr(method, name)!r}")
