"""Log-probabilities of what was emitted: the base's own, before temperature and filters, whoever drafted it."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.arrays import best_of, write


@flax.struct.dataclass
class Scores:
    """Log-probabilities of tokens [B, X], and the best tokens at the same places.

    Attributes:
      chosen: [B, X] float32, of the tokens themselves.
      best: [B, X, K] float32, the highest ones, falling.
      tokens: [B, X, K] int32, whose they are.
    """

    chosen: jax.Array
    best: jax.Array
    tokens: jax.Array

    @classmethod
    def begin(cls, logits: jax.Array, tokens: jax.Array, width: int, count: int) -> Scores:
        """Of first tokens [B] by the base's logits there [B, V], with room for `width` tokens and K = `count` best."""
        first = score(logits[:, None], tokens[:, None], count)
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, width - 1), (0, 0))[: x.ndim]), first)

    def append(self, logits: jax.Array, path: jax.Array, tokens: jax.Array, at: jax.Array, wanted: jax.Array) -> Scores:
        """The scores with those of one step; unchanged where no row wants any.

        Args:
          logits: [B, N, V], the base's at the nodes.
          path: [B, P + 1] int32, the accepted nodes.
          tokens: [B, P + 1] int32, the token after each of them.
          at: [B] int32, where each row goes on.
          wanted: [B] bool.
        """

        def append() -> Scores:
            new = score(jnp.take_along_axis(logits, path[..., None], axis=1), tokens, self.best.shape[-1])
            return write(self, new, at)

        return lax.cond(jnp.any(wanted), append, lambda: self)


def score(logits: jax.Array, tokens: jax.Array, count: int) -> Scores:
    """Scores of tokens [B, X] by the base's logits [B, X, V] there, with the `count` best."""
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]
    return Scores(chosen, *best_of(log_p, count))
