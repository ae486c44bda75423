"""Parallel Prompt Decoding (Chen, 2024): trained prompt tokens probe the next tokens in the verifying pass.

Section 4.1: M prompt tokens, trained embeddings, stand behind a token; the one at distance d sits d positions after
it and predicts the token d + 1 positions after it. Section 4.2: each prompt token is an ensemble of n embeddings at
the same position, whose logits are averaged. The base stays frozen; only these embeddings are trained, and what the
extensions of section 4.4 add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Stage, check_least
from jaxspec.errors import UserError
from jaxspec.methods.probes import ProbeMethod, init_prefix, mean_normed, prefix_cache, text_states
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.cache import Cache
from jaxspec.model.dtypes import wide
from jaxspec.model.quantized import dense


@dataclasses.dataclass(frozen=True)
class PPD(ProbeMethod):
    """Settings of Parallel Prompt Decoding, beyond those of every probe method.

    The defaults of `objective` and `direction` are those of section 4.3.2 and of the released code; equation 4.1
    prints the `reverse` direction, and Table 6.5 compares `hard` labels.

    Attributes:
      initial: ids of the text tokens that prompt tokens start from, all EPTs of one distance before those of the next,
        repeated or cut to M * n; empty: random ones. The released code starts from a phrase, whose ids
        `model.encode(phrase, chat=False)` gives.
      ensemble: n, ensemble prompt tokens (EPTs) per prompt token (4.2).
      mask: what an EPT sees of its own group (4.4.3): `ensemble`, EPTs of its own index at smaller distances;
        `decoder`, all EPTs at smaller distances; `encoder`, those and all at its own distance. In the released code
        `decoder` is `causal`, all EPTs at smaller distances and those before it at its own, and `encoder` is `alone`,
        all at its own distance and no others.
      aggregation: `average` of the EPTs' logits, or `learned` weights (4.4.4).
      decay: alpha of equation 4.1.
      prefix_tokens: trained keys and values per distance and layer that its EPTs see (4.4.1); 0: no prefix tuning.
      head: a vocabulary projection of the prompt tokens' own (4.4.2), which starts as the base's: `none`,
        `one_stage`, trained together with them, or `two_stage`, after they have been trained alone.
      multi_exit: k, the hidden states of the last k layers are averaged (4.4.5).
      exit_norm: each of them after the base's final norm; else, as in the released code, only the last one.
      entry: the layer from which on prompt tokens are computed (7.4.2).
    """

    name: ClassVar[str] = "ppd"
    kernels: ClassVar[tuple[str, ...]] = ("head",)

    initial: tuple[int, ...] = ()
    ensemble: int = 1
    mask: Literal["ensemble", "decoder", "encoder", "causal", "alone"] = "ensemble"
    aggregation: Literal["average", "learned"] = "average"
    decay: float = 0.8
    prefix_tokens: int = 0
    head: Literal["none", "one_stage", "two_stage"] = "none"
    multi_exit: int = 1
    exit_norm: bool = True
    entry: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.initial, tuple | list) or any(type(token) is not int for token in self.initial):
            raise UserError(f"ppd: initial must be token ids, as `model.encode` makes them, got {self.initial!r}")
        object.__setattr__(self, "initial", tuple(self.initial))  # a list, where the settings come from JSON
        check_least(self, ensemble=1, multi_exit=1, prefix_tokens=0)

    @property
    def probe_rows(self) -> int:
        """n: a prompt token is a row per EPT."""
        return self.ensemble

    @property
    def entries(self) -> tuple[int, ...]:
        """The entry layer is the same for all distances (7.4.2)."""
        return (self.entry,) * self.distances

    @property
    def exits(self) -> int:
        """k (4.4.5)."""
        return self.multi_exit

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A head of two stages waits for the prompt tokens, then both move with a smaller rate (4.4.2): a tenth, ours.

        Here each stage has half of the updates.
        """
        if self.head != "two_stage":
            return (Stage(),)
        alone = tuple(key for key, used in self._parts().items() if used and key != "head")
        return (Stage(alone), Stage(learning_rate=0.1))

    def _parts(self) -> dict[str, bool]:
        """Entries of the trainable pytree, and whether these settings have them."""
        return {
            "embeddings": True,
            "weights": self.aggregation == "learned",
            "prefix": self.prefix_tokens > 0,
            "head": self.head != "none",
        }

    # Sections 4.1, 4.2 and 4.4: prompt tokens, their ensembles and extensions

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """Prompt tokens [M, n, D] copied from text tokens (6.1.2), and the extensions' parts.

        Late ones copy the hidden states of such tokens at their layer. The parts are weights [M, n], a prefix of
        M * prefix_tokens keys and values, and a head [D, V].
        """
        self.check_layers(base.decoder.config.num_layers)
        M, n = self.distances, self.ensemble
        for_tokens, for_prefix = jax.random.split(key)
        tokens = self._text_tokens(for_tokens, base.vocab_size)
        make = {
            "embeddings": lambda: text_states(base, tokens, self.entry).reshape(M, n, -1),
            "weights": lambda: jnp.full((M, n), 1 / n),
            "prefix": lambda: init_prefix(for_prefix, base, M * self.prefix_tokens, self.entry),
            "head": lambda: dense(base.params["lm_head"]),
        }
        trainable = {part: make[part]() for part, used in self._parts().items() if used}
        return jax.tree.map(lambda x: x.astype(wide(x)), trainable)

    def _text_tokens(self, key: jax.Array, vocab_size: int) -> jax.Array:
        """Ids [M * n] of the text tokens to start from."""
        count = self.distances * self.ensemble
        if not self.initial:
            return jax.random.randint(key, (count,), 0, vocab_size)
        if outside := [token for token in self.initial if not 0 <= token < vocab_size]:
            raise UserError(f"ppd: initial must be token ids below {vocab_size}, this base's vocabulary, got {outside}")
        return jnp.asarray(np.resize(self.initial, count), jnp.int32)

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """The pytree; of a head of their own only the columns that may be drafted, in the base's dtype."""
        if "head" not in trainable:
            return trainable
        return trainable | {"head": base.draft_part(trainable["head"]).astype(base.dtype)}

    def enter(
        self, trainable: PyTree, entering: Sequence[int], distance: jax.Array, copy: jax.Array, owners: jax.Array
    ) -> jax.Array:
        """The embedding of every EPT."""
        return trainable["embeddings"][distance - 1, copy]

    def sees(self, distance: jax.Array, copy: jax.Array) -> jax.Array:
        """The mask among the EPTs of one group (4.4.3)."""
        earlier, beside = distance[None, :] < distance[:, None], distance[None, :] == distance[:, None]
        same = copy[None, :] == copy[:, None]
        return {
            "ensemble": (earlier | beside) & same,
            "decoder": earlier | (beside & same),
            "encoder": earlier | beside,
            "causal": earlier | (beside & (copy[None, :] <= copy[:, None])),
            "alone": beside,
        }[self.mask]

    def prefix(self, trainable: PyTree) -> tuple[Cache, np.ndarray] | None:
        """The prefix, of which every distance sees its own part (4.4.1, Figure 4.4)."""
        if not self.prefix_tokens:
            return None
        by_distance = np.repeat(np.eye(self.distances, dtype=bool), self.prefix_tokens, axis=1)
        return prefix_cache(trainable["prefix"], self.entry), by_distance

    def read(self, trainable: PyTree, base: Base, exits: Sequence[jax.Array], distance: jax.Array) -> jax.Array:
        """Logits averaged over EPTs and exits (4.2, 4.4.4, 4.4.5), through the base's head or one of their own."""
        learned = self.aggregation == "learned"
        weights = trainable["weights"][distance - 1] if learned else None
        hidden = mean_normed(base, exits, weights, self.exit_norm)
        if self.head == "none":
            return base.draft_logits(hidden)
        head = trainable["head"].astype(hidden.dtype)
        return base.finished(product(hidden, head, preferred_element_type=wide(hidden)))
