"""Hidden Transfer (Wu et al., 2024): a token's hidden state, mapped to those of the tokens that will follow it.

Section 3.3: in layer t_i the linear map W_i turns the hidden state of the token at position j into a pseudo hidden
state of the token at j + i, which goes on through the remaining layers at that position and predicts, through the
base's own vocabulary projection, the token after it. Below its layer a pseudo state does not exist and costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Stage
from jaxspec.errors import UserError
from jaxspec.methods.probes import ProbeMethod
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.decoder import for_products


@dataclasses.dataclass(frozen=True)
class HiddenTransfer(ProbeMethod):
    """Settings of Hidden Transfer, beyond those of every probe method.

    `distances` is k, the number of transfer steps. Section 3.3 distils at every position of a text (`train.positions`)
    and lets pseudo states see `real` ones in training; the default here, `pseudo`, is what decoding looks like. Its
    loss, "KL-divergence" of the pseudo state's distribution and the base's, leaves the direction open: the `kl_div` of
    PyTorch takes them in that order too, and is KL(base || pseudo). That is `forward`, the default as for all methods;
    with `reverse`, top-1 accuracy came to .142 instead of .202 (docs/ablations.md, how the maps are trained).

    Attributes:
      layers: t_1 .. t_k, before which layers the maps apply (4.1: 25, 30 and 35 of 40).
      training: one map after the other, the earlier ones frozen (`separate`, 3.3), or all at once (`joint`).
      train_visibility: what a pseudo state sees in training at the positions between its owner and itself: the
        smaller steps' `pseudo` states, as in decoding, or the `real` ones of the text, as in the paper. Accuracies are
        always those of decoding.
      masked: smaller steps' pseudo states are not seen at all, in training neither, whatever `train_visibility`
        (Figure 7).
    """

    name: ClassVar[str] = "hidden_transfer"

    layers: tuple[int, ...] = (10, 14, 18)
    training: Literal["separate", "joint"] = "separate"
    train_visibility: Literal["pseudo", "real"] = "pseudo"
    masked: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # a list, where the settings come from JSON
        super().__post_init__()
        if len(self.layers) != self.distances or list(self.layers) != sorted(self.layers):
            raise UserError(
                f"hidden_transfer: layers must be {self.distances} layers (distances) in ascending order, got "
                f"{list(self.layers)}"
            )

    @property
    def entries(self) -> tuple[int, ...]:
        """t_1 .. t_k."""
        return self.layers

    # Section 3.3: linear maps and their training

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """W_1 .. W_k, each [D, D]: the identity, the pseudo state as a copy of the real one."""
        self.check_layers(base.decoder.config.num_layers)
        return {f"step{i}": jnp.eye(base.decoder.config.hidden_size) for i in range(1, self.distances + 1)}

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """The maps in the base's dtype."""
        return for_products(trainable, base.dtype)

    def enter(
        self, trainable: PyTree, entering: Sequence[int], distance: jax.Array, copy: jax.Array, owners: jax.Array
    ) -> jax.Array:
        """Pseudo hidden states W_i h of the steps i that begin at this layer."""
        pseudo = jnp.zeros_like(owners)
        for i in entering:
            mapped = product(owners, trainable[f"step{i}"].astype(owners.dtype))
            pseudo = jnp.where((distance == i)[..., None], mapped, pseudo)
        return pseudo

    def sees(self, distance: jax.Array, copy: jax.Array) -> jax.Array:
        """A pseudo state sees itself and those of smaller steps."""
        if self.masked:
            return distance[None, :] == distance[:, None]
        return super().sees(distance, copy)

    def training_sight(self, points: jax.Array, distance: jax.Array, copy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sight of decoding, or the text's real states in place of the smaller steps' pseudo states (3.3)."""
        if self.train_visibility == "pseudo" or self.masked:
            return super().training_sight(points, distance, copy)
        return points + distance, distance[None, :] == distance[:, None]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """k trainings, one per map (3.3)."""
        if self.training == "joint":
            return (Stage(),)
        return tuple(Stage((f"step{i}",)) for i in range(1, self.distances + 1))

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The divergence of the step in training, or of all of them."""
        steps = range(1, self.distances + 1) if self.training == "joint" else [stage + 1]
        return self.loss_at(trainable, base, batch, steps)
