"""Probes, rows that predict ahead without being tokens: shared by methods that draft inside the verifying pass.

A probe at distance d of an owner at position p sits at position p + d and predicts the token at p + d + 1. It sees
what its owner sees, the owner, and probes of the same owner. No token sees a probe, so the base's own output stays
what it was. What a probe is made of, from which layer on it exists and how its logits are read is the papers' part:

    enter     what joins the rows                    embeddings (PPD, BiTA), mapped hidden states (Hidden Transfer)
    entries   from which layer on, per distance      0 everywhere, or later
    sees      which probes of its group a probe sees
    prefix    keys and values that only probes see   (BiTA's prompts, PPD's prefix tuning)
    read      hidden states to logits

Training and decoding run the same rows: a group of probes behind an insertion point of a known text, or behind every
node of the draft tree. The papers' probes join the prompt's own pass already; here the first step drafts nothing and
carries probes behind its one token, which leaves the prompt's pass the same for all methods and costs a text about a
third of a token.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import Draft, DraftContext, Offer, PyTree, offer_ranked
from jaxspec.decoding.method import Batch, Facts, Method, ReadChunk, Stage, check_choices, check_decay, check_least
from jaxspec.decoding.tree import Tree
from jaxspec.errors import UserError
from jaxspec.methods.losses import future_loss
from jaxspec.model.attention import causal_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache
from jaxspec.model.rows import Join, Rows, read_layers, run_rows


@dataclasses.dataclass(frozen=True)
class ProbeRows:
    """Places and owners of the probe rows of a pass.

    Attributes:
      first: rows before them that are no probes.
      ends: the first `ends[d - 1]` of them hold all those at distances up to d.
      distance: [..., X] int32, of each.
      copy: [..., X] int32, which of the n rows of its probe each is.
      owners: (layer, rows there) to the hidden states of every probe row's owner, [..., X, D].
    """

    first: int
    ends: Sequence[int]
    distance: jax.Array
    copy: jax.Array
    owners: Callable[[int, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class ProbeMethod(Method, abc.ABC):
    """Settings that all probe methods have.

    Attributes:
      distances: M, how far ahead probes predict.
      objective: `distillation` against the base's own distribution, or `hard` labels.
      direction: of the divergence: `forward`, KL(base || probe), or `reverse`.
      decay: the weight of distance d in the loss is decay ** (d - 1).
    """

    adjustable: ClassVar[tuple[str, ...]] = ()

    distances: int = 3
    objective: Literal["distillation", "hard"] = "distillation"
    direction: Literal["forward", "reverse"] = "forward"
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_least(self, distances=1)
        check_decay(self.name, self.decay)
        check_choices(self)

    def facts(self, config: ModelConfig) -> Facts:
        """A probe per distance; its rows count for the share of the layers that they run through, the mean of all."""
        share = 1 - float(np.mean(self.entries)) / config.num_layers
        rows = self.probe_rows
        return Facts(self.distances, probe_rows=rows, probe_cost=rows * share, adapter="trained", stages=self.stages)

    # What a paper says

    @property
    def probe_rows(self) -> int:
        """n, rows of a probe."""
        return 1

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Parts of a training."""
        return (Stage(),)

    @property
    def entries(self) -> tuple[int, ...]:
        """[M], the layer from which on the probes of each distance are computed; not decreasing."""
        return (0,) * self.distances

    @property
    def exits(self) -> int:
        """Number of the last layers whose hidden states `read` takes."""
        return 1

    def exit_layers(self, base: Base) -> tuple[int, ...]:
        """The layers of `exits`, as taps."""
        layers = base.decoder.config.num_layers
        return tuple(range(layers - self.exits + 1, layers + 1))

    @abc.abstractmethod
    def enter(
        self, trainable: PyTree, entering: Sequence[int], distance: jax.Array, copy: jax.Array, owners: jax.Array
    ) -> jax.Array:
        """The hidden states that join the rows at a layer: [..., X, D].

        Args:
          trainable: what `prepare` returned.
          entering: the distances that join here; the values of rows of other distances do not matter.
          distance: [..., X] int32, of each probe row.
          copy: [..., X] int32, which of the n rows of its probe it is.
          owners: [..., X, D], hidden states of the owners before this layer.
        """

    def sees(self, distance: jax.Array, copy: jax.Array) -> jax.Array:
        """The mask among rows of one group: [X, X] from the rows' distances [X] and copies [X]."""
        return distance[None, :] <= distance[:, None]

    def prefix(self, trainable: PyTree) -> tuple[Cache, np.ndarray] | None:
        """Keys and values that only probes see, and which distances see which of them: [M, P] bool."""
        return None

    def read(self, trainable: PyTree, base: Base, exits: Sequence[jax.Array], distance: jax.Array) -> jax.Array:
        """Logits [..., V] from the hidden states [..., n, D] of probes at the distances [...]."""
        return base.draft_logits(mean_normed(base, exits))

    def check_layers(self, layers: int) -> None:
        """Raise UserError where probes would join beyond so many layers, those of the base."""
        if self.exits > layers:
            raise UserError(f"{self.name}: {self.exits} exits need as many layers, this base has {layers}")
        highest = layers - self.exits
        if not 0 <= min(self.entries) <= max(self.entries) <= highest:
            joined = ", ".join(map(str, sorted({*self.entries})))
            raise UserError(f"{self.name}: probes can join at layers 0 to {highest} of this base, got {joined}")

    # Rows, the same in training and decoding

    def _joins(self, trainable: PyTree, probes: ProbeRows) -> tuple[Join, ...]:
        """Probe rows behind the others, from their layers on."""
        layers = sorted({*self.entries[: len(probes.ends)]})
        return tuple(Join(layer, functools.partial(self._extend, trainable, probes, layer)) for layer in layers)

    def _extend(self, trainable: PyTree, probes: ProbeRows, layer: int, x: jax.Array) -> jax.Array:
        """The rows there before a layer, [..., r, D], with the probes that join there."""
        entering = [d for d, entry in enumerate(self.entries[: len(probes.ends)], 1) if entry == layer]
        end, first = probes.ends[entering[-1] - 1], probes.first
        distance, copy = probes.distance[..., :end], probes.copy[..., :end]
        owners = probes.owners(layer, x)[..., :end, :]
        new = self.enter(trainable, entering, distance, copy, owners).astype(x.dtype)
        # In a stack of trees a place may be another distance's: it waits here, seen by nobody.
        waiting = jnp.zeros_like(new).at[..., : x.shape[-2] - first, :].set(x[..., first:, :])
        enters = jnp.isin(distance, np.array(entering))[..., None]
        return jnp.concatenate([x[..., :first, :], jnp.where(enters, new, waiting)], axis=-2)

    def _prefix(self, trainable: PyTree, first: int, distance: jax.Array) -> dict[str, Any]:
        """The fields of `Rows` that say which of them see the prefix: none of the `first`, and probes by distance."""
        prefix = self.prefix(trainable)
        if prefix is None:
            return {}
        sees = jnp.asarray(prefix[1])[distance - 1]  # [..., X, P]
        unseen = jnp.zeros((*sees.shape[:-2], first, sees.shape[-1]), bool)
        return {"prefix": prefix[0], "sees_prefix": jnp.concatenate([unseen, sees], axis=-2)}

    # Training

    def training_sight(self, points: jax.Array, distance: jax.Array, copy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sight of probe rows in training: how many tokens of the text, [B, G, 1 or X], and which rows, [X, X].

        Args:
          points: [B, G, 1] int32, positions of the owners.
          distance: [X] int32, of each row of a group.
          copy: [X] int32.
        """
        return self._sight(points, distance, copy)

    def _sight(self, points: jax.Array, distance: jax.Array, copy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sight of decoding, as `training_sight` returns it: all tokens up to the owner, and their group."""
        return points + 1, self.sees(distance, copy)

    def probe(
        self, trainable: PyTree, base: Base, batch: Batch, distances: int, training: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run the text once, then the probes of all insertion points against its keys and values.

        Args:
          trainable: what `prepare` returned.
          base: the frozen decoder.
          batch: texts with insertion points.
          distances: M', how many of the distances to run.
          training: probes see what `training_sight` says, and not what they will see in decoding.

        Returns:
          Final hidden states of the text [B, T, D], and the probes' [B, G, M', n, D] after each exit.
        """
        (B, G), n = batch.points.shape, self.probe_rows
        frozen, cache, read = read_layers(base, batch.tokens, self.entries[:distances])
        distance = jnp.repeat(jnp.arange(1, distances + 1), n)  # [X]
        copy, at = jnp.tile(jnp.arange(n), distances), batch.points[..., None]
        visible, sees = (self.training_sight if training else self._sight)(at, distance, copy)

        def owners(layer: int, x: jax.Array) -> jax.Array:
            states = read[layer][jnp.arange(B)[:, None], batch.points]
            return jnp.broadcast_to(states[:, :, None], (B, G, len(distance), states.shape[-1]))

        everywhere = [jnp.broadcast_to(a, (B, G, len(distance))) for a in (distance, copy)]
        probes = ProbeRows(0, n * np.arange(1, distances + 1), *everywhere, owners)
        rows = Rows(
            x=jnp.zeros((B, G, 0, frozen.shape[-1]), frozen.dtype),
            positions=at + distance,
            mask=jnp.broadcast_to(sees, (B, G, *sees.shape)),
            joins=self._joins(trainable, probes),
            taps=self.exit_layers(base),
            **self._prefix(trainable, 0, jnp.broadcast_to(distance, (1, G, len(distance)))),
        )
        states, _ = run_rows(base, rows, cache, visible)
        return frozen, tuple(states[at].reshape(B, G, distances, n, -1) for at in self.exit_layers(base))

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] of the probes at every insertion point, which see what they will see in decoding."""
        trainable = self.prepare(trainable, base)
        exits = self.probe(trainable, base, batch, self.distances)[1]
        return self.read(trainable, base, exits, jnp.arange(1, self.distances + 1))

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean over all targets of what `objective` says, all distances together."""
        return self.loss_at(trainable, base, batch, range(1, self.distances + 1))

    def loss_at(
        self, trainable: PyTree, base: Base, batch: Batch, counted: Sequence[int]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of some distances, and the accuracy of each of them on the text."""
        trainable = self.prepare(trainable, base)
        text, exits = self.probe(trainable, base, batch, counted[-1], training=True)
        return self.loss_of(trainable, base, batch, text, exits, counted)

    def loss_of(
        self,
        trainable: PyTree,
        base: Base,
        batch: Batch,
        text: jax.Array,
        exits: Sequence[jax.Array],
        counted: Sequence[int],
        **settings: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and accuracies of what `probe` returned; further settings are those of `future_loss`."""
        exits = [x[:, :, np.array(counted) - 1] for x in exits]
        student = self.read(trainable, base, exits, np.array(counted))  # [B, G, counted, V]
        settings |= {"direction": self.direction, "decay": self.decay}
        settings |= {"alignment": 0.0, "labels": 1.0} if self.objective == "hard" else {}
        return future_loss(student, base, text, batch, counted, **settings)

    # Decoding

    def rows(self, context: DraftContext, draft: Draft, method_state: PyTree) -> Rows:
        """The nodes, then every node's probes."""
        nodes, tree, n = super().rows(context, draft, method_state), draft.tree, self.probe_rows
        trainable = context.trainable
        owner = jnp.repeat(tree.probe_owner, n, axis=1)  # [B, X], X = Q * n
        distance = jnp.repeat(tree.probe_distance, n, axis=1)
        copy = jnp.broadcast_to(np.tile(np.arange(n), tree.num_probes), owner.shape)
        positions = jnp.take_along_axis(nodes.positions[:, 0], owner, axis=1) + distance
        sees_nodes = jnp.take_along_axis(tree.ancestors, owner[..., None], axis=1)  # [B, X, N]
        live = jnp.repeat(tree.probe_live, n, axis=1)
        same_owner = (owner[:, :, None] == owner[:, None, :]) & live[:, None]
        sees_probes = same_owner & jax.vmap(self.sees)(distance, copy)
        unseen = jnp.zeros((*tree.depth.shape, owner.shape[1]), bool)

        def owners(layer: int, x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, owner[:, None, :, None], axis=2)

        ends = [n * end for end in tree.probe_ends]
        probes = ProbeRows(tree.num_nodes, ends, distance[:, None], copy[:, None], owners)
        return Rows(
            x=nodes.x,
            positions=jnp.concatenate([nodes.positions, positions[:, None]], axis=2),
            mask=jnp.block([[tree.ancestors, unseen], [sees_nodes, sees_probes]])[:, None],
            joins=self._joins(trainable, probes),
            taps=self.exit_layers(context.base),
            **self._prefix(trainable, tree.num_nodes, distance[:, None]),
        )

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The newest token's probes: their hidden states, distances, and which of them there are."""
        distance = jnp.ones((batch, self.distances), jnp.int32)
        states = jnp.zeros((*distance.shape, self.probe_rows * base.decoder.config.hidden_size), base.dtype)
        exits = (states,) * self.exits
        return {"exits": exits, "distance": distance, "known": jnp.zeros(distance.shape, bool)}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """The probes of the last accepted node; a prompt has none."""
        if (step := chunk.step) is None:
            return method_state
        probes = self.behind(context.base, step.draft.tree, step.states, step.accepted.node)
        return probes | {"known": probes["known"] & step.added}

    def behind(self, base: Base, tree: Tree, states: Mapping[int, jax.Array], node: jax.Array) -> PyTree:
        """The method state of the probes behind one node of every batch row.

        Args:
          base: the decoder that ran them.
          tree: whose nodes and probes they were.
          states: {layer: hidden states [B, R, D]} of the rows.
          node: [B] int32.
        """
        B, n = len(node), self.probe_rows
        probes = tree.probes_behind(node, self.distances)
        rows = tree.num_nodes + jnp.maximum(probes, 0)[..., None] * n + np.arange(n)  # [B, M, n]
        exits = (states[at][jnp.arange(B)[:, None, None], rows] for at in self.exit_layers(base))
        return {
            "exits": tuple(x.reshape(B, self.distances, -1) for x in exits),
            "distance": jnp.take_along_axis(tree.probe_distance, jnp.maximum(probes, 0), axis=1),
            "known": probes >= 0,
        }

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """Candidates from those probes."""
        depth = min(context.depth, self.distances)
        near = jax.tree.map(lambda x: x[:, :depth], method_state)
        exits = [x.reshape(*x.shape[:2], self.probe_rows, -1) for x in near["exits"]]
        logits = self.read(context.trainable, context.base, exits, near["distance"])  # [B, M', V']
        return offer_ranked(context, logits, near["known"])


def mean_normed(
    base: Base, exits: Sequence[jax.Array], weights: jax.Array | None = None, every: bool = True
) -> jax.Array:
    """Normalised hidden states [..., D], averaged over exits and over the n rows of a probe: exits of [..., n, D].

    The projection is linear: averaging these averages the logits. Every exit, or the last one alone, is normalised
    before it is averaged, and the rows may have weights that broadcast to [..., n].
    """
    last = len(exits) - 1
    normed = sum(base.normed(x) if every or i == last else x for i, x in enumerate(exits)) / len(exits)
    if weights is None:
        return jnp.mean(normed, axis=-2)
    return jnp.sum(normed * weights[..., None].astype(normed.dtype), axis=-2)


def text_states(base: Base, tokens: jax.Array, layer: int) -> jax.Array:
    """Hidden states [X, D] of a text before a layer, from which rows that join there may start.

    Args:
      base: the frozen decoder.
      tokens: [X] int32; the last one stands before the first as well, since a text's first state is unlike all others.
      layer: 0 gives the embeddings.
    """
    if layer == 0:
        return base.embed(tokens)
    text = jnp.roll(jnp.append(tokens, tokens[-1]), 1)[None]
    x, _ = base.rows(base.embed(text), causal_context(1, text.size), layers=(0, layer))
    return x[0, 1:]


def init_prefix(key: jax.Array, base: Base, count: int, first: int = 0) -> PyTree:
    """`count` keys and values for every key/value head of the layers from `first` on: two arrays [L', K, P, Dh]."""
    c = base.decoder.config
    shape = (c.num_layers - first, c.num_kv_heads, count, c.head_dim)
    keys, values = (0.02 * jax.random.normal(part, shape) for part in jax.random.split(key))
    return {"keys": keys, "values": values}


def prefix_cache(prefix: PyTree, first: int = 0) -> Cache:
    """The arrays of `init_prefix` layer by layer; nothing below the layer `first`."""
    return Cache(*((None,) * first + tuple(prefix[part]) for part in ("keys", "values")))
