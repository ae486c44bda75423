"""BiTA, bi-directional tuning for lossless acceleration (Lin et al., 2024): mask tokens that see trained prompts.

Section 3.1: M mask tokens, trained embeddings, stand behind a token; the i-th sits i positions after it and predicts
the token i + 1 positions after it, so that the token and its masks predict consecutive tokens. Prompt tokens, seen by
the masks alone (Figure 3), make the frozen base guess ahead: in every layer as keys and values of their own (deep),
or as embeddings in front of the text (shallow, Table 3). Section 3.2: the trees that are verified are the builders
`straightforward`, `cartesian` and `efficient` of `jaxspec.trees`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.draft import PyTree
from jaxspec.errors import UserError
from jaxspec.methods.probes import ProbeMethod, init_prefix, prefix_cache, text_states
from jaxspec.model.attention import causal_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache


@dataclasses.dataclass(frozen=True)
class BiTA(ProbeMethod):
    """Settings of BiTA, beyond those of every probe method.

    `distances` is M, the number of mask tokens: 3 up to 13 billion parameters, 4 beyond (4.1).

    Attributes:
      objective: `hard` labels (equation 1), or `distillation` against the base's own distribution.
      prompting: `deep` prompts, `shallow` ones or `none` (Table 3). Deep ones have no position; shallow ones take
        0 to P - 1 in a pass of their own, so that the text keeps its positions. Neither has dropout.
      prompts: P, prompt tokens (4.1: 16).
      initial: what masks are before training: `normal`, N(0, 0.02) (4.1), from which some never learn in short
        trainings of a small base, or `text`, hidden states of random text tokens at their layer, as in PPD.
      entry: the layer from which on mask tokens are computed (an idea of PPD 7.4.2); deep prompts start there too.
    """

    name: ClassVar[str] = "bita"

    objective: Literal["distillation", "hard"] = "hard"
    prompting: Literal["deep", "shallow", "none"] = "deep"
    prompts: int = 16
    initial: Literal["normal", "text"] = "normal"
    entry: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts < 1:
            raise UserError(f"bita: prompts must be at least 1, got {self.prompts}; without any: prompting none")

    @property
    def entries(self) -> tuple[int, ...]:
        """All masks join at one layer."""
        return (self.entry,) * self.distances

    # Section 3.1: mask and prompt tokens

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """Masks [M, D], and prompts: [P, D] (shallow) or keys and values of every layer, N(0, 0.02) (4.1)."""
        self.check_layers(base.decoder.config.num_layers)
        for_masks, for_prompts = jax.random.split(key)
        M, width = self.distances, base.decoder.config.hidden_size
        if self.initial == "text":
            tokens = jax.random.randint(for_masks, (M,), 0, base.vocab_size)
            masks = text_states(base, tokens, self.entry).astype(jnp.float32)
        else:
            masks = 0.02 * jax.random.normal(for_masks, (M, width))
        trainable = {"masks": masks}
        if self.prompting == "shallow":
            trainable["prompts"] = 0.02 * jax.random.normal(for_prompts, (self.prompts, width))
        if self.prompting == "deep":
            trainable["prompts"] = init_prefix(for_prompts, base, self.prompts, self.entry)
        return trainable

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """Shallow prompts run through the base once; what they leave in each layer is then a prefix like deep ones."""
        if self.prompting != "shallow":
            return trainable
        x = trainable["prompts"][None].astype(base.dtype)
        _, kv = base.rows(x, causal_context(1, self.prompts))
        keys, values = (jnp.concatenate(part[self.entry :]) for part in (kv.keys, kv.values))  # [L', K, P, Dh]
        return trainable | {"prompts": {"keys": keys, "values": values}}

    def enter(
        self, trainable: PyTree, entering: Sequence[int], distance: jax.Array, copy: jax.Array, owners: jax.Array
    ) -> jax.Array:
        """The embedding of every mask."""
        return trainable["masks"][distance - 1]

    def prefix(self, trainable: PyTree) -> tuple[Cache, np.ndarray] | None:
        """Every mask sees every prompt (Figure 3)."""
        if self.prompting == "none":
            return None
        return prefix_cache(trainable["prompts"], self.entry), np.ones((self.distances, self.prompts), bool)
