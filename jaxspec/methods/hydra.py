"""Hydra (Ankner et al., 2024): sequentially dependent heads. Each also reads the tokens drafted before it.

Section 3: the head at distance d reads the last hidden state and the embeddings of the d tokens on the path from the
newest token down to the one whose successor it drafts. So a tree is drafted level by level, every node's children from
that node's own path. Hydra++ (section 3.1) adds a decoder layer between base and heads, deeper heads, and the
base's own distribution as the target.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.drafting.draft import Draft, Drafting, Drawn, PyTree, rank_candidates
from jaxspec.drafting.tree import Tree
from jaxspec.methods.heads import Features, HeadMethod, beside, init_beside, init_layer, run_layer
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.cache import Cache
from jaxspec.model.decoder import Context


@dataclasses.dataclass(frozen=True)
class Hydra(HeadMethod):
    """Settings of Hydra; Hydra++ is `prefix_attention`, `blocks=4`, `alignment=1` and `labels=0`.

    Attributes:
      prefix_attention: a decoder layer over all hidden states, whose output the heads read (Hydra++).
    """

    name: ClassVar[str] = "hydra"

    prefix_attention: bool = False

    @property
    def own_layers(self) -> int:
        """The prefix attention layer."""
        return int(self.prefix_attention)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The heads, whose first blocks read states and tokens, [(d + 1) D, D], and the prefix attention layer."""
        for_heads, for_layer = jax.random.split(key)
        trainable = self.init_heads(for_heads, base, self.blocks - 1)
        for d in range(1, self.heads + 1):
            straight = init_beside(base, d)
            trainable[f"first{d}"] = {"kernel": straight, "inner": {"kernel": jnp.zeros_like(straight)}}
        if self.prefix_attention:
            trainable["prefix_layer"] = init_layer(for_layer, base)
        return trainable

    def adapt(
        self, trainable: PyTree, base: Base, hidden: jax.Array, following: jax.Array, context: Context
    ) -> tuple[Features, Cache]:
        """Prefix attention: every hidden state looks at those before it."""
        if not self.prefix_attention:
            return super().adapt(trainable, base, hidden, following, context)
        hidden, (keys, values) = run_layer(trainable["prefix_layer"], base, hidden, context, 0)
        return (hidden,), Cache((keys,), (values,))

    def head(self, trainable: PyTree, base: Base, hidden: jax.Array, path: jax.Array) -> jax.Array:
        """Logits [..., V'] of the head at distance d, from normalised states [..., D] and its d tokens [..., d].

        The first block reads their concatenation, R x + SiLU(L x); further ones are like Medusa's.
        """
        d = path.shape[-1]
        x, first = beside(hidden, base.embed(path)), trainable[f"first{d}"]
        x = product(x, first["kernel"]) + jax.nn.silu(product(x, first["inner"]["kernel"]))
        x = self.residual(trainable, x[..., None, :], first=d - 1)
        return self.project(trainable, base, x, first=d - 1)[..., 0, :]

    def predict(
        self, trainable: PyTree, base: Base, features: Features, count: int, path: jax.Array | None = None
    ) -> jax.Array:
        """All heads along one path that is known: training."""
        hidden = base.normed(features[0])
        return jnp.stack([self.head(trainable, base, hidden, path[..., :d]) for d in range(1, count + 1)], axis=-2)

    def draft(self, drafting: Drafting, features: Features, root: jax.Array, position: jax.Array) -> Draft:
        """Fill the tree level by level: the candidates below a node come from the head that reads the node's path."""
        tree, trainable, base = drafting.tree, drafting.trainable, drafting.base
        hidden, rows = base.normed(features[0]), jnp.arange(len(root))[:, None]
        tokens = jnp.where(tree.depth == 0, root[:, None], 0)  # [B, N]
        places, log_q = jnp.zeros_like(tokens), []
        has_children = _has_children(tree)
        for level, width in enumerate(tree.inner):
            parents = _nodes(has_children & (tree.depth == level), width)  # [B, W]
            path = [parents]
            for _ in range(level):
                path.insert(0, tree.parent[rows, path[0]])
            path = tokens[rows[..., None], jnp.stack(path, axis=-1)]  # [B, W, level + 1]
            at = jnp.broadcast_to(hidden[:, None], (*parents.shape, hidden.shape[-1]))
            logits = self.head(trainable, base, at, path)  # [B, W, V']
            candidates = rank_candidates(drafting, logits, position[:, None] + level + 1)
            place = jnp.argmax(parents[:, None] == tree.parent[..., None], axis=-1)  # [B, N], of each node's parent
            below = tree.depth == level + 1
            tokens = jnp.where(below, candidates.tokens[rows, place, tree.rank], tokens)
            places = jnp.where(below, place + sum(tree.inner[:level]), places)
            log_q.append(candidates.log_q)
        drawn = Drawn(jnp.concatenate(log_q, axis=1), places) if drafting.sampler.independent else None
        return Draft(tokens, tree.live, drawn)


def _nodes(chosen: jax.Array, count: int) -> jax.Array:
    """Indices [B, count] of the chosen nodes [B, N]; the root where there are fewer."""
    return jax.vmap(lambda row: jnp.nonzero(row, size=count, fill_value=0)[0])(chosen)


def _has_children(tree: Tree) -> jax.Array:
    """[B, N] bool."""
    is_child = tree.live & (tree.depth > 0)
    return jnp.any((tree.parent[:, None] == jnp.arange(tree.num_nodes)[:, None]) & is_child[:, None], axis=-1)
