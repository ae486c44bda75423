"""Which root-to-node path of a verified tree survives, and the bonus token after it. Pure functions."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.sampling import Sampler
from jaxspec.errors import UserError
from jaxspec.tree import Tree


@flax.struct.dataclass
class Accepted:
    """Outcome of verification, per batch row.

    Attributes:
      path: [B, P + 1] int32, accepted nodes from the root down; beyond `length` the last one repeats.
      length: [B] int32, candidates accepted, the root not counted.
      node: [B] int32, the last accepted node.
      bonus: [B] int32, the token the base itself puts after it.
    """

    path: jax.Array
    length: jax.Array
    node: jax.Array
    bonus: jax.Array


@dataclasses.dataclass(frozen=True)
class Match:
    """Lossless: a candidate survives if it is the token the base draws there with that position's noise.

    Greedy decoding is the case without noise ("exact matching", PPD 4.5.2, Algorithm 3).
    """

    def choose(self, logits: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
        """The base's own token [...] from logits [..., V] and noise that broadcasts to them."""
        return jnp.argmax(sampler.filtered(logits) + noise, axis=-1).astype(jnp.int32)

    def __call__(
        self, tree: Tree, tokens: jax.Array, valid: jax.Array, logits: jax.Array, noise: jax.Array, sampler: Sampler
    ) -> Accepted:
        """Verify a draft.

        Args:
          tree: arrays with a batch axis.
          tokens: [B, N] int32, the draft.
          valid: [B, N] bool, nodes that hold a candidate.
          logits: [B, N, V] float32, the base's logits at the nodes.
          noise: [B, P + 1, V], of the position that a node of each depth predicts; [1, 1, 1] when greedy.
          sampler: how tokens are drawn.
        """
        targets = self.choose(logits, _per_node(noise, tree), sampler)  # [B, N]
        right = tokens == jnp.take_along_axis(targets, tree.parent, axis=1)
        return _longest(tree, valid & right, targets)


@dataclasses.dataclass(frozen=True)
class Typical:
    """Lossy: a candidate survives if the base finds it plausible (Medusa 2.3.1; PPD 4.5.2).

    p(candidate) > min(epsilon, delta * exp(-entropy)); the base's own tokens are greedy; the longest surviving path
    wins. The defaults are those of Medusa's released code; PPD gives none.

    Attributes:
      epsilon: largest threshold, a probability.
      delta: factor of the entropy-dependent threshold.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and self.delta > 0):
            raise UserError(f"epsilon and delta must be positive, got {self.epsilon} and {self.delta}")

    def choose(self, logits: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
        """The base's own token [...] from logits [..., V]: greedy, whatever the temperature."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def __call__(
        self, tree: Tree, tokens: jax.Array, valid: jax.Array, logits: jax.Array, noise: jax.Array, sampler: Sampler
    ) -> Accepted:
        """Verify a draft; the arguments of `Match`."""
        log_p = jax.nn.log_softmax(sampler.filtered(logits))
        entropy = -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0), axis=-1)  # [B, N]
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        at_parent = jnp.take_along_axis(log_p, tree.parent[..., None], axis=1)  # [B, N, V]
        p = jnp.exp(jnp.take_along_axis(at_parent, tokens[..., None], axis=2))[..., 0]
        plausible = p > jnp.take_along_axis(threshold, tree.parent, axis=1)
        return _longest(tree, valid & plausible, self.choose(logits, noise, sampler))


Acceptance = Match | Typical


def _per_node(noise: jax.Array, tree: Tree) -> jax.Array:
    """Noise of the position each node predicts: noise [B, P + 1, V] per depth to [B, N, V]."""
    return noise if noise.shape[1] == 1 else jnp.take_along_axis(noise, tree.depth[..., None], axis=1)


def _longest(tree: Tree, survives: jax.Array, targets: jax.Array) -> Accepted:
    """The deepest node all of whose path survives, its path and its bonus.

    Args:
      tree: arrays with a batch axis.
      survives: [B, N] bool, whether a node may follow its parent; the root's value does not matter.
      targets: [B, N] int32, the base's token after each node.
    """
    survives = survives | (tree.depth == 0)
    whole = jnp.all(survives[:, None] | ~tree.ancestors, axis=-1) & tree.live
    node = jnp.argmax(jnp.where(whole, tree.depth, -1), axis=-1)  # [B]; the first of several
    pick = lambda x: jnp.take_along_axis(x, node.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]  # noqa: E731
    length, on_path = pick(tree.depth), pick(tree.ancestors)
    steps = jnp.minimum(jnp.arange(tree.max_depth + 1), length[:, None])  # [B, P + 1]
    path = jnp.argmax(on_path[:, None] & (tree.depth[:, None] == steps[..., None]), axis=-1)
    return Accepted(path.astype(jnp.int32), length, node.astype(jnp.int32), pick(targets))
