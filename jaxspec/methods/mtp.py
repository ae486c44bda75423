"""The next-token module that a base brings (MiMo, Xiaomi, 2025): a further layer, trained with the base.

A row joins the base's last hidden state with the embedding of the token that follows, each behind a norm of its own,
and passes through a layer of the base's shape. A norm and the base's projection predict the token after it. The module
learned to look one token further; beyond, it runs on its own outputs (`RecurrentLayer`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Facts
from jaxspec.methods.recurrent import RecurrentLayer
from jaxspec.model.attention import normalised
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.decoder import for_products
from jaxspec.model.layers import Attention, Layer, Linear
from jaxspec.model.rope import rope_angles
from jaxspec.parallel.sharding import divided


@dataclasses.dataclass(frozen=True)
class Mtp(RecurrentLayer):
    """Settings of a base's own next-token module.

    Attributes:
      after_norm: it reads the base's states after the final norm. Files do not say; software that serves MiMo has
        both, vLLM, to which the authors contributed, the states before it.
    """

    name: ClassVar[str] = "mtp"

    depth: int = 3
    after_norm: bool = False

    def facts(self, config: ModelConfig) -> Facts:
        """It reads the last hidden states, and learned one distance."""
        return Facts(
            distances=self.depth,
            learned_distances=1,
            taps=self.taps(config.num_layers),
            own_layers=self.depth,
            reads_late=True,
            adapter="module",
        )

    def taps(self, layers: int) -> tuple[int, ...]:
        """After the last layer."""
        return (layers,)

    def layer_shapes(self, config: ModelConfig) -> ModelConfig:
        """The base's."""
        return config

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The joining projection [2 D, D], of state and embedding, the layer, and the norms around them."""
        c, (of_input, of_layer) = base.decoder.config, jax.random.split(key)
        D, angles = c.hidden_size, jnp.zeros((1, 1, c.rotary_size // 2))
        layer = Layer(c).init(of_layer, jnp.zeros((1, 1, D)), angles, jnp.ones((1, 1, 1, 1), bool))["params"]
        norms = {name: {"scale": jnp.ones(D)} for name in ("hidden_norm", "token_norm", "norm")}
        return norms | {"input": {"kernel": 0.02 * jax.random.normal(of_input, (2 * D, D))}, "layer": layer}

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """Kernels in the base's dtype."""
        return for_products(trainable, base.dtype)

    def fused(self, trainable: PyTree, base: Base, states: dict[int, jax.Array]) -> jax.Array:
        """The last hidden states."""
        [state] = states.values()
        return base.normed(state) if self.after_norm else state

    def entered(self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array) -> jax.Array:
        """State beside embedding, in this order (DeepSeek's modules have the reverse)."""
        epsilon = base.decoder.config.rms_norm_eps
        state = normalised(state, trainable["hidden_norm"]["scale"], epsilon)
        embedding = normalised(base.embed(following), trainable["token_norm"]["scale"], epsilon)
        return product(jnp.concatenate([state, embedding], axis=-1), trainable["input"]["kernel"])

    def queries_keys_values(
        self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As in a layer of the base."""
        c, layer = base.decoder.config, trainable["layer"]
        x = normalised(state, layer["attention_norm"]["scale"], c.rms_norm_eps)
        attention, angles = {"params": layer["attention"]}, rope_angles(c, positions, long=base.long)
        return Attention(c).apply(attention, divided(x, "batch"), angles, method="queries_keys_values")

    def after(self, trainable: PyTree, base: Base, state: jax.Array, attended: jax.Array) -> jax.Array:
        """The rest of the layer and the norm after it, which the base's projection and the next row read."""
        c, layer = base.decoder.config, trainable["layer"]
        attended = Linear(c.hidden_size, c.o_bias).apply({"params": layer["attention"]["o"]}, attended)
        state = divided(state + attended, "batch")
        state = divided(Layer(c).apply({"params": layer}, state, method="feed"), "batch")
        return normalised(state, trainable["norm"]["scale"], c.rms_norm_eps)

    def logits(self, trainable: PyTree, base: Base, output: jax.Array) -> jax.Array:
        """By the base's projection."""
        return base.draft_logits(output)
