"""EAGLE-3 (Li et al., 2025): one decoder layer that drafts in the base's place, from what the base was thinking.

A `RecurrentLayer` says which rows there are. A row's state is made of the base's hidden states before a low, a middle
and a high layer (`fc`), and attention reads it beside the embedding of the token that follows. Training does what
decoding does along the text (training-time test): unroll k runs on the states that unroll k - 1 made. Where drafts are
chosen per step, the most probable nodes of each level expand (EAGLE-2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Facts, check_choices, check_decay, check_least
from jaxspec.errors import UserError
from jaxspec.methods.context_layer import check_plain, checked_width
from jaxspec.methods.heads import beside, init_beside, root_mean_square
from jaxspec.methods.losses import targets
from jaxspec.methods.recurrent import RecurrentLayer
from jaxspec.model.attention import normalised
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.decoder import finished, for_products
from jaxspec.model.dtypes import wide
from jaxspec.model.layers import Attention, Layer, Linear
from jaxspec.model.quantized import dense
from jaxspec.model.rope import rope_angles
from jaxspec.parallel.sharding import divided


@dataclasses.dataclass(frozen=True)
class Eagle(RecurrentLayer):
    """Settings of EAGLE-3.

    Attributes:
      unroll: steps on its own states that it learns along the text, the first one on the base's.
      reads: before which layers of the base it reads hidden states, in ascending order; the number of layers reads
        after the last one; empty: before the third, the middle and the third last, as the paper's code does.
      direct: a matrix makes a row's state of its state and the embedding beside it, and starts as the state alone: by
        attention alone it learns slowly whose embedding counts. Off in the paper.
      even: lower states are brought to the size of the highest ones. Off in the paper.
      vocabulary: V', learn to draft only so many of the base's most frequent tokens; 0: all.
      own_head: a vocabulary projection of its own that learns, for these tokens; else the base's.
      own_embedding: embeddings of its own that learn, and start as the base's; else the base's.
      shapes: of its layer, its rotations and epsilon among them; None: as the base's layers. Of a base the same, its
        width is always the base's.
      norm_before_residual: what attention adds to is the normalised state (the package speculators).
      norm_before_fc: one norm over all of the base's states side by side, before they are fused.
      fc_norm: a norm over each of the base's states before they are fused (EAGLE 3.1).
      norm_output: a row's output stands for the base's state after the norm, not before it (EAGLE 3.1).
      start: the layer and the norms before it and after it start as the base's last ones (`base`), or at `random`.
      decay: unroll k counts decay ** k in the loss.
      features: weight in the loss of the distance from the base's last hidden states, as the final norm leaves them
        (EAGLE-1); 0 in EAGLE-3.
      top_k: the base's so many likeliest tokens count once more in the loss (HASS, whose K is 10); 0 in EAGLE-3.
    """

    name: ClassVar[str] = "eagle"
    kernels: ClassVar[tuple[str, ...]] = ("kernel", "lm_head")

    unroll: int = 4
    reads: tuple[int, ...] = ()
    direct: bool = False
    even: bool = False
    vocabulary: int = 0
    own_head: bool = False
    own_embedding: bool = False
    shapes: ModelConfig | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    start: Literal["base", "random"] = "base"
    decay: float = 0.8
    features: float = 0.0
    top_k: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.shapes, Mapping):  # of adapter.json
            object.__setattr__(self, "shapes", ModelConfig.from_json(dict(self.shapes)))
        if self.norm_before_fc and self.fc_norm:
            raise UserError("eagle: norm_before_fc and fc_norm exclude each other")
        check_least(self, unroll=1, vocabulary=0, features=0, top_k=0)
        if list(self.reads) != sorted(set(self.reads)):
            raise UserError(f"eagle: reads must be different and in ascending order, got {list(self.reads)}")
        check_decay(self.name, self.decay)
        check_choices(self)

    def facts(self, config: ModelConfig) -> Facts:
        """It learns the unrolled steps, and drafts as far as it is asked to."""
        return Facts(
            distances=self.depth,
            learned_distances=min(self.depth, self.unroll),
            taps=self.taps(config.num_layers),
            own_layers=self.depth,
            reads_late=True,
            adapter="trained",
            learned_tokens=self.vocabulary,
        )

    def taps(self, layers: int) -> tuple[int, ...]:
        """Low, middle and high, or those that were asked for."""
        return self.reads or tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))

    # The layer

    def layer_shapes(self, config: ModelConfig) -> ModelConfig:
        """The shapes of its layer on a base of these shapes. Raises UserError for a width that is not the base's."""
        if self.shapes is None:
            return config.plain_layers()
        return checked_width(self.name, self.shapes, config)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """Fusion [n D, D], the layer, whose attention reads [.., 2 D], the norm after it and perhaps a projection.

        From the base, fusion passes on the highest state, and embeddings do nothing yet.
        """
        depth = base.decoder.config.num_layers
        c, taps = self.layer_shapes(base.decoder.config), self.taps(depth)
        if not 0 <= taps[0] <= taps[-1] <= depth:
            raise UserError(f"eagle: reads must be 0 to {depth} on this base, got {list(taps)}")
        D, keys = c.hidden_size, jax.random.split(key, 4)
        if self.start == "base":
            check_plain(self.name, base.decoder.config, self.shapes)
            layer = jax.tree.map(lambda x: x.astype(wide(x)), dense(base.params[f"layers_{depth - 1}"]))
            fc, scale = jnp.eye(len(taps) * D, D), base.params["norm"]["scale"]
            norm = scale.astype(wide(scale))
            of_embedding = jnp.zeros_like(layer["attention"]["qkv"]["kernel"])
        else:
            x, angles = jnp.zeros((1, 1, D)), jnp.zeros((1, 1, c.rotary_size // 2))
            layer = Layer(c).init(keys[0], x, angles, jnp.ones((1, 1, 1, 1), bool))["params"]
            fc, norm = 0.02 * jax.random.normal(keys[1], (len(taps) * D, D)), jnp.ones(D)
            of_embedding = 0.02 * jax.random.normal(keys[2], layer["attention"]["qkv"]["kernel"].shape)
        qkv = layer["attention"]["qkv"]
        kernel = jnp.concatenate([of_embedding, qkv["kernel"]])
        trainable = {
            "fc": {"kernel": fc},
            "embedding_norm": {"scale": jnp.ones(D)},
            "layer": layer | {"attention": layer["attention"] | {"qkv": qkv | {"kernel": kernel}}},
            "norm": {"scale": norm},
        }
        if self.norm_before_fc:
            trainable["input_norm"] = {"scale": jnp.ones(len(taps) * D)}
        if self.fc_norm:
            trainable["fc_norm"] = {"scale": jnp.ones((len(taps), D))}
        if self.direct:
            trainable["direct"] = {"kernel": init_beside(base, 1)}
        if self.own_embedding:
            embedding = base.embed(jnp.arange(base.vocab_size)[None])[0]
            trainable["embedding"] = embedding.astype(wide(embedding))
        if self.own_head:
            trainable["lm_head"] = self._first_head(keys[3], base)
        return trainable

    def _first_head(self, key: jax.Array, base: Base) -> jax.Array:
        """[D, V'], the base's columns where it is known which."""
        shape = (base.decoder.config.hidden_size, self.vocabulary or base.vocab_size)
        if self.start == "random" or (self.vocabulary and base.draft_vocabulary is None):
            return 0.02 * jax.random.normal(key, shape)
        columns = base.draft_vocabulary.columns if self.vocabulary else base.params["lm_head"]
        return columns.astype(wide(columns))

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """Kernels in the base's dtype, of its own projection only the columns that may be drafted."""
        if self.own_head and self.vocabulary and base.num_drafts > self.vocabulary:
            raise UserError(
                f"eagle: its own projection is for {self.vocabulary} tokens: draft-vocabulary must be 1 to "
                f"{self.vocabulary}, not {'0, all' if base.draft_vocabulary is None else base.num_drafts}"
            )
        if self.own_head:
            head = trainable["lm_head"]
            part = head[:, : base.num_drafts] if self.vocabulary else base.draft_part(head)
            trainable = trainable | {"lm_head": part}
        return for_products(trainable, base.dtype)

    def fused(self, trainable: PyTree, base: Base, states: dict[int, jax.Array]) -> jax.Array:
        """The base's states before each of `taps`, [B, R, D] each, as one [B, R, D], from the highest down."""
        x = jnp.stack([states[layer] for layer in sorted(states, reverse=True)], axis=-2)  # [B, R, n, D]
        if self.even:
            size = root_mean_square(x)
            x = (x * (size[..., :1, :] / jnp.maximum(size, 1e-6))).astype(x.dtype)
        epsilon = self.layer_shapes(base.decoder.config).rms_norm_eps
        if self.fc_norm:
            x = normalised(x, trainable["fc_norm"]["scale"], epsilon)
        x = x.reshape(*x.shape[:-2], -1)
        if self.norm_before_fc:
            x = normalised(x, trainable["input_norm"]["scale"], epsilon)
        return product(x, trainable["fc"]["kernel"])

    def _embedded(self, trainable: PyTree, base: Base, tokens: jax.Array) -> jax.Array:
        """Token ids [B, R] to embeddings [B, R, D]."""
        return trainable["embedding"][tokens] if self.own_embedding else base.embed(tokens)

    def entered(self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array) -> jax.Array:
        """States [B, R, D] as rows begin, which with `direct` knows the tokens after them [B, R]."""
        if not self.direct:
            return state
        embedding = self._embedded(trainable, base, following)
        return product(beside(state, embedding[..., None, :]), trainable["direct"]["kernel"])

    def queries_keys_values(
        self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, R, H, Dh], keys and values [B, R, K, Dh] of rows: states [B, R, D] beside the tokens after."""
        c, layer = self.layer_shapes(base.decoder.config), trainable["layer"]
        embedding = self._embedded(trainable, base, following)
        embedding = normalised(embedding, trainable["embedding_norm"]["scale"], c.rms_norm_eps)
        x = jnp.concatenate([embedding, normalised(state, layer["attention_norm"]["scale"], c.rms_norm_eps)], axis=-1)
        attention, angles = {"params": layer["attention"]}, rope_angles(c, positions, long=base.long)
        return Attention(c).apply(attention, divided(x, "batch"), angles, method="queries_keys_values")

    def after(self, trainable: PyTree, base: Base, state: jax.Array, attended: jax.Array) -> jax.Array:
        """The rest of the layer: states [B, R, D] with what they attended to, [B, R, H * Dh]."""
        c, layer = self.layer_shapes(base.decoder.config), trainable["layer"]
        if self.norm_before_residual:
            state = normalised(state, layer["attention_norm"]["scale"], c.rms_norm_eps)
        attended = Linear(c.hidden_size, c.o_bias).apply({"params": layer["attention"]["o"]}, attended)
        state = divided(state + attended, "batch")
        state = divided(Layer(c).apply({"params": layer}, state, method="feed"), "batch")
        return self._norm(trainable, base, state) if self.norm_output else state

    def _norm(self, trainable: PyTree, base: Base, state: jax.Array) -> jax.Array:
        return normalised(state, trainable["norm"]["scale"], self.layer_shapes(base.decoder.config).rms_norm_eps)

    def _normed(self, trainable: PyTree, base: Base, state: jax.Array) -> jax.Array:
        """Rows' outputs [..., D] after the norm, which with `norm_output` they have behind them."""
        return state if self.norm_output else self._norm(trainable, base, state)

    def logits(self, trainable: PyTree, base: Base, state: jax.Array) -> jax.Array:
        """Float32 logits [..., V'] of what follows, from rows' outputs [..., D]."""
        x = self._normed(trainable, base, state)
        if not self.own_head:
            return base.draft_logits(x)
        logits = product(x, trainable["lm_head"], preferred_element_type=wide(x))
        return base.finished(logits) if self.shapes is None else finished(self.shapes, logits)

    # Training

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy with the base's distribution over V', where its best token is one of these (3.1)."""
        states, frozen = self.unrolled(trainable, base, batch, self.unroll)
        distances = jnp.arange(1, self.unroll + 1)
        rows = jnp.arange(len(states))[:, None, None]
        at = (rows, jnp.minimum(batch.points[..., None] + distances, batch.tokens.shape[1] - 2))
        has_target = targets(batch, range(1, self.unroll + 1))
        weights = has_target * self.decay ** (distances - 1) / jnp.maximum(jnp.sum(has_target, axis=(0, 1)), 1)

        student = self.logits(trainable, base, states)  # [B, G, U, V']
        base_logits = base.logits(frozen)  # [B, T, V]
        teacher = base.draft_part(base_logits)
        covered = jnp.max(teacher, axis=-1) >= jnp.max(base_logits, axis=-1)
        log_p = jax.nn.log_softmax(teacher)
        p = jax.lax.optimization_barrier(jnp.exp(log_p))  # or every prediction would compute it again
        entropy = -jnp.sum(p * log_p, axis=-1)
        total = jax.nn.logsumexp(student, axis=-1)
        each = total - jnp.sum(p[at] * student, axis=-1) - entropy[at]
        if self.top_k:
            likeliest, ids = jax.lax.top_k(p, min(self.top_k, p.shape[-1]))  # [B, T, k]
            chosen = jnp.take_along_axis(student, ids[at], axis=-1)
            each += jnp.sum(likeliest[at] * (total[..., None] - chosen), axis=-1)
        loss = jnp.sum(each * weights * covered[at])
        if self.features:
            import optax  # slow to import, and decoding has no use for it

            apart = optax.huber_loss(self._normed(trainable, base, states), base.normed(frozen)[at])
            loss += self.features * jnp.sum(jnp.mean(apart, axis=-1) * weights)
        labels = batch.tokens[rows, at[1] + 1]
        right = (base.draft_ids(jnp.argmax(student, axis=-1)) == labels) & has_target
        accuracy = jnp.sum(right, axis=(0, 1)) / jnp.maximum(jnp.sum(has_target, axis=(0, 1)), 1)
        return loss, {f"top1@{d}": accuracy[d - 1] for d in range(1, self.unroll + 1)}
