"""Penalties: tokens that a text has already become less probable, at each node of a draft by the path to it.

root ── a ── a        what was emitted, the root included, is counted in the state; a node adds the tokens on its path:
     └─ b             of the lower a both, of b itself alone. So every node is judged as if its path had been emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.tree import Tree


@flax.struct.dataclass
class Seen:
    """The tokens that texts have.

    Attributes:
      prompt: [B, V] bool, whether the prompt has a token.
      counts: [B, V] int32, how often the answer has it.
    """

    prompt: jax.Array
    counts: jax.Array

    @classmethod
    def begin(cls, prompt: jax.Array) -> Seen:
        """Of prompts [B, V] without an answer."""
        return cls(prompt, jnp.zeros(prompt.shape, jnp.int32))

    def after(self, tokens: jax.Array, emitted: jax.Array) -> Seen:
        """With further tokens [B, X] of the answers, as far as they were emitted, [B, X] bool."""
        rows = jnp.arange(len(tokens))[:, None]
        return self.replace(counts=self.counts.at[rows, tokens].add(emitted.astype(jnp.int32)))

    def at_nodes(self, tree: Tree, tokens: jax.Array) -> jax.Array:
        """[B, N, V] int32, how often an answer has each token once the nodes [B, N] on a path are emitted, too."""
        on_path = tree.ancestors & (tree.depth > 0)[:, None]  # [B, N, N]; the root is counted already
        rows, nodes = jnp.arange(len(tokens))[:, None, None], jnp.arange(tokens.shape[1])[:, None]
        counts = jnp.broadcast_to(self.counts[:, None], (*tokens.shape, self.counts.shape[-1]))
        return counts.at[rows, nodes, tokens[:, None]].add(on_path.astype(jnp.int32))


@flax.struct.dataclass
class Penalties:
    """The settings of rows, traced: arrays [B], or [1] for all rows.

    Attributes:
      repetition: float32, divides positive logits of tokens that prompt or answer have, and multiplies negative ones.
      presence: float32, subtracted from logits of tokens that the answer has.
      frequency: float32, subtracted as many times as the answer has them.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig]) -> Penalties:
        """Those of rows, as host arrays."""
        each = [(c.repetition_penalty, c.presence_penalty, c.frequency_penalty) for c in configs]
        return cls(*np.array(each, np.float32).T)

    def __call__(self, logits: jax.Array, seen: Seen, counts: jax.Array) -> jax.Array:
        """Logits [B, N, V] less the penalties for tokens in the prompt, and `counts` [B, N, V] times in the answer."""
        repetition, presence, frequency = (x[:, None, None] for x in (self.repetition, self.presence, self.frequency))
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen.prompt[:, None] | (counts > 0), divided, logits)
        return logits - frequency * counts - presence * (counts > 0)


def tokens_of(texts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """[B, V] bool, the tokens that texts have."""
    has = np.zeros((len(texts), vocab_size), bool)
    for row, text in zip(has, texts, strict=True):
        row[np.asarray(text, np.int32)] = True
    return has
