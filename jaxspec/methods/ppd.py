"""Parallel Prompt Decoding (Chen, 2024): trained prompt tokens probe the next tokens in the verifying pass.

Section 4.1: M prompt tokens, trained embeddings, stand behind a token; the one at distance d sits d positions after
it and predicts the token d + 1 positions after it. Section 4.2: each prompt token is an ensemble of n embeddings at
the same position, whose logits are averaged. The base stays frozen; only these embeddings are trained.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.sampling import Sampler
from jaxspec.errors import UserError
from jaxspec.methods.base import (
    Batch,
    Draft,
    Method,
    PyTree,
    Rows,
    Verified,
    check_choices,
    divergence,
    draft_from_candidates,
)
from jaxspec.model.base import Base
from jaxspec.model.decoder import causal_mask
from jaxspec.tree import Tree


@dataclasses.dataclass(frozen=True)
class PPD(Method):
    """Settings of Parallel Prompt Decoding.

    Attributes:
      distances: M, prompt tokens per node (6.1.2: 3).
      ensemble: n, ensemble prompt tokens (EPTs) per prompt token (4.2).
      mask: what an EPT sees of its own group (4.4.3): `ensemble`, EPTs of its own index at smaller distances;
        `decoder`, all EPTs at smaller distances; `encoder`, those and all at its own distance.
      aggregation: `average` of the EPTs' logits, or `learned` weights (4.4.4).
      objective: `distillation` against the base's distribution (4.3.2) or `hard` labels (Table 6.5).
      direction: of the divergence: `forward`, KL(base || prompt token), or `reverse` as equation 4.1 prints it.
      decay: alpha of equation 4.1, the weight of distance d is decay ** (d - 1).
    """

    name: ClassVar[str] = "ppd"
    trainable: ClassVar[bool] = True

    distances: int = 3
    ensemble: int = 1
    mask: Literal["ensemble", "decoder", "encoder"] = "ensemble"
    aggregation: Literal["average", "learned"] = "average"
    objective: Literal["distillation", "hard"] = "distillation"
    direction: Literal["forward", "reverse"] = "forward"
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.distances < 1 or self.ensemble < 1:
            raise UserError(f"ppd: distances and ensemble must be at least 1, got {self.distances} and {self.ensemble}")
        check_choices(self)

    @property
    def max_distance(self) -> int:
        """M."""
        return self.distances

    @property
    def probe_distances(self) -> int:
        """M: every distance has its probe."""
        return self.distances

    @property
    def probe_rows(self) -> int:
        """n: a prompt token is a row per EPT."""
        return self.ensemble

    # Section 4.1 and 4.2: prompt tokens and their ensembles

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """Embeddings [M, n, D] copied from random text tokens (6.1.2), and weights [M, n] where learned."""
        tokens = jax.random.randint(key, (self.distances, self.ensemble), 0, base.vocab_size)
        trainable = {"embeddings": base.embed(tokens).astype(jnp.float32)}
        if self.aggregation == "learned":
            trainable["weights"] = jnp.full((self.distances, self.ensemble), 1 / self.ensemble)
        return trainable

    def _sees(self, distance: jax.Array, ept: jax.Array) -> jax.Array:
        """Which rows of one group see which: [X, X] from the rows' distances [X] and EPT indices [X] (4.4.3)."""
        earlier = distance[None, :] < distance[:, None]
        same = (distance[None, :] == distance[:, None]) & (ept[None, :] == ept[:, None])
        if self.mask == "ensemble":
            return (earlier & (ept[None, :] == ept[:, None])) | same
        return earlier | same if self.mask == "decoder" else distance[None, :] <= distance[:, None]

    def _aggregate(self, trainable: PyTree, base: Base, hidden: jax.Array) -> jax.Array:
        """Logits [..., M, V] from the EPTs' hidden states [..., M, n, D], for all distances or the first few.

        The projection is linear: averaging normalised hidden states averages the logits (4.2, 4.4.4).
        """
        hidden = base.normed(hidden)
        if self.aggregation == "learned":
            weights = trainable["weights"][: hidden.shape[-3], :, None].astype(hidden.dtype)
            return base.project(jnp.sum(hidden * weights, axis=-2))
        return base.project(jnp.mean(hidden, axis=-2))

    # Section 4.3: training

    def _probe(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Run the frozen sequence once, then the prompt tokens of all insertion points against its keys and values.

        Returns:
          Hidden states of the sequence [B, T, D], and of the EPTs [B, G, M, n, D].
        """
        (B, T), G, M, n = batch.tokens.shape, batch.points.shape[1], self.distances, self.ensemble
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        frozen, cache = base.rows(base.embed(batch.tokens), positions, causal_mask(B, T))
        distance, ept = np.repeat(np.arange(1, M + 1), n), np.tile(np.arange(n), M)
        at = (batch.points[..., None] + distance).reshape(B, -1)  # [B, G * M * n]
        visible = jnp.repeat(batch.points + 1, M * n, axis=1)
        mask = jnp.broadcast_to(self._sees(distance, ept), (B, G, M * n, M * n))
        x = jnp.broadcast_to(trainable["embeddings"], (B, G, M, n, frozen.shape[-1]))
        x = x.reshape(B, G * M * n, -1).astype(frozen.dtype)
        hidden, _ = base.rows(x, at, mask, cache, visible)
        return frozen, hidden.reshape(B, G, M, n, -1)

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] of the prompt tokens at every insertion point."""
        return self._aggregate(trainable, base, self._probe(trainable, base, batch)[1])

    def loss(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Equation 4.1: divergence from the base's own distribution, decaying with the distance."""
        frozen, hidden = self._probe(trainable, base, batch)
        student = self._aggregate(trainable, base, hidden)  # [B, G, M, V]
        source = batch.points[..., None] + np.arange(1, self.distances + 1)  # the row whose distribution is the target
        has_target = (batch.points[..., None] >= 0) & (source + 1 < batch.lengths[:, None, None])
        source = jnp.minimum(source, batch.tokens.shape[1] - 2)
        rows = jnp.arange(source.shape[0])[:, None, None]
        labels = batch.tokens[rows, source + 1]
        at_label = jnp.take_along_axis(student, labels[..., None], axis=-1)[..., 0]
        if self.objective == "hard":
            each = jax.nn.logsumexp(student, axis=-1) - at_label
        else:
            teacher = base.logits(frozen[rows, source])
            each = divergence(*((teacher, student) if self.direction == "forward" else (student, teacher)))
        weight = has_target * self.decay ** np.arange(self.distances)
        right = (at_label >= jnp.max(student, axis=-1)) & has_target
        accuracy = jnp.sum(right, axis=(0, 1)) / jnp.maximum(jnp.sum(has_target, axis=(0, 1)), 1)
        loss = jnp.sum(each * weight) / jnp.maximum(jnp.sum(has_target), 1)
        return loss, {f"top1@{d + 1}": accuracy[d] for d in range(self.distances)}

    # Section 4.5: inference

    def rows(self, trainable: PyTree, base: Base, tree: Tree, draft: Draft, lengths: jax.Array) -> Rows:
        """The nodes, then the EPTs of every node's prompt tokens."""
        nodes = super().rows(trainable, base, tree, draft, lengths)
        n = self.ensemble
        owner = jnp.repeat(tree.probe_owner, n, axis=1)  # [B, Q * n]
        distance = jnp.repeat(tree.probe_distance, n, axis=1)
        ept = jnp.broadcast_to(np.tile(np.arange(n), tree.num_probes), owner.shape)
        x = trainable["embeddings"][distance - 1, ept].astype(nodes.x.dtype)
        positions = jnp.take_along_axis(nodes.positions, owner, axis=1) + distance
        sees_nodes = jnp.take_along_axis(tree.ancestors, owner[..., None], axis=1)  # [B, Q * n, N]
        live = jnp.repeat(tree.probe_live, n, axis=1)
        same_owner = (owner[:, :, None] == owner[:, None, :]) & live[:, None]
        sees_probes = same_owner & jax.vmap(self._sees)(distance, ept)
        unseen = jnp.zeros((*tree.depth.shape, owner.shape[1]), bool)
        mask = jnp.block([[tree.ancestors, unseen], [sees_nodes, sees_probes]])
        return Rows(
            jnp.concatenate([nodes.x, x], axis=1), jnp.concatenate([nodes.positions, positions], axis=1), mask[:, None]
        )

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
        """Candidates from the prompt tokens of the last accepted node (4.5.1, 5.1)."""
        B, n = seeds.shape[0], self.ensemble
        node = verified.accepted.node
        depth = tree.max_depth  # distances beyond the tree's depth find no use
        probes = tree.probe_of[jnp.arange(B), node, :depth]  # [B, P]
        known = probes >= 0
        rows = tree.num_nodes + jnp.maximum(probes, 0)[..., None] * n + np.arange(n)  # [B, P, n]
        hidden = verified.hidden[jnp.arange(B)[:, None, None], rows]
        logits = self._aggregate(trainable, base, hidden)  # [B, P, V]
        positions = verified.position[:, None] + np.arange(1, depth + 1)
        scores = sampler.filtered(logits) + sampler.noise(seeds, positions, base.vocab_size)
        candidates = jax.lax.top_k(scores, tree.max_rank)[1]
        return draft_from_candidates(next_tree, verified.accepted.bonus, candidates, known), method_state
