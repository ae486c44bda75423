"""Heads: small networks on the base's last hidden state, shared by methods that draft after the pass.

The step has emitted the token at p + 1 from the hidden state at p, the last accepted one. The head at distance d reads
that state and predicts the token at p + d + 1. What stands between the base and the vocabulary is the papers' part:

    adapt     decoder layers of the method's own, with a cache of their own     (Hydra++, Amphista)
    predict   adapted states to logits, one head per distance
    along     likewise, where the tokens between are known, which heads may read    (Hydra)

Hidden states are those before the base's final norm, which also stands before the heads: a head that has learned
nothing gives the base's own next-token distribution. Training runs the base once over a text and the heads behind
every position that was chosen, the positions that the probes of other methods are measured at; decoding feeds the
accepted path through the method's own layers and commits what they remember of it, as the base's cache does. These
layers see all older positions, also where the base has a sliding window.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Offer, PyTree, offer_ranked
from jaxspec.decoding.method import Batch, Facts, Method, ReadChunk, check_choices, check_decay, check_least
from jaxspec.methods.losses import check_weights, future_loss
from jaxspec.model.attention import Context, causal_context, continued_context, masks_of, of_layer
from jaxspec.model.base import Base
from jaxspec.model.blocks import own_products, product
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.decoder import for_products
from jaxspec.model.dtypes import wide
from jaxspec.model.layers import Layer
from jaxspec.model.rope import rope_angles

Features = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class HeadMethod(Method, abc.ABC):
    """Settings that all methods with heads have.

    Attributes:
      heads: K, one per distance.
      blocks: residual blocks of each head.
      lm_head: the heads' vocabulary projections: `full`, a copy of the base's that learns; `tied`, the base's own; or
        `low_rank`, the base's own plus a product of two thin matrices that learns.
      rank: of that product.
      alignment: weight in the loss of the divergence from the base's own distribution.
      labels: weight of the cross-entropy of the text.
      decay: the weight of distance d in the loss is decay ** (d - 1).
    """

    adjustable: ClassVar[tuple[str, ...]] = ()

    heads: int = 4
    blocks: int = 1
    lm_head: Literal["full", "tied", "low_rank"] = "tied"
    rank: int = 16
    alignment: float = 0.0
    labels: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_least(self, heads=1, blocks=1, rank=1)
        check_decay(self.name, self.decay)
        check_weights(self.name, self.alignment, self.labels)
        check_choices(self)

    def facts(self, config: ModelConfig) -> Facts:
        """A head per distance."""
        return Facts(self.heads, reads_late=self.own_layers > 0, adapter="trained")

    # What a paper says

    @property
    def own_layers(self) -> int:
        """L', decoder layers that `adapt` runs."""
        return 0

    def adapt(
        self, trainable: PyTree, base: Base, hidden: jax.Array, following: jax.Array, context: Context
    ) -> tuple[Features, Cache]:
        """Between the base and the heads.

        Args:
          trainable: the pytree.
          base: the frozen decoder.
          hidden: [B, R, D], hidden states before the final norm.
          following: [B, R] int32, the token after each.
          context: where the rows stand.

        Returns:
          What the heads read, arrays [B, R, D], and the keys and values of the method's own layers.
        """
        return (hidden,), Cache((), ())

    def predict(self, trainable: PyTree, base: Base, features: Features, count: int) -> jax.Array:
        """Logits [..., M', V'] of the first `count` heads, from the features [..., D] of `adapt`.

        Heads that read the tokens between have `along` and `offer` of their own instead.
        """
        raise NotImplementedError(f"{self.name}: define predict, or along and offer")

    def along(
        self, trainable: PyTree, base: Base, features: Features, path: jax.Array, seeds: jax.Array | None = None
    ) -> jax.Array:
        """Logits [..., K, V'] of all heads where the tokens between are known.

        Args:
          trainable: the pytree.
          base: the frozen decoder.
          features: of `adapt`, arrays [..., D].
          path: [..., K] int32, the tokens at distances 0 to K - 1.
          seeds: [B] uint32, of what an update does at random; None: nothing.
        """
        return self.predict(trainable, base, features, self.heads)

    # Parts that heads are made of

    def init_heads(self, key: jax.Array, base: Base, blocks: int) -> PyTree:
        """Residual blocks of zeros, [K, blocks, D, D], and what `lm_head` says, which starts as the base's."""
        D, V = base.decoder.config.hidden_size, base.vocab_size
        parts = {}
        if blocks:
            parts = {"blocks": jnp.zeros((self.heads, blocks, D, D)), "bias": jnp.zeros((self.heads, blocks, D))}
        if self.lm_head == "full":
            parts["lm_head"] = jnp.tile(base.params["lm_head"].astype(wide(base.params["lm_head"])), (self.heads, 1, 1))
        if self.lm_head == "low_rank":
            parts["down"] = 0.02 * jax.random.normal(key, (self.heads, D, self.rank))
            parts["up"] = jnp.zeros((self.heads, self.rank, V))
        return parts

    def residual(
        self,
        trainable: PyTree,
        x: jax.Array,
        first: int = 0,
        before: Callable[[jax.Array, int], jax.Array] = lambda x, block: x,
    ) -> jax.Array:
        """x + SiLU(W x + b), block after block, `before` first. [..., M', D] of the heads from `first` on."""
        heads = slice(first, first + x.shape[-2])
        for block in range(trainable["blocks"].shape[1] if "blocks" in trainable else 0):
            x = before(x, block)
            inner = own_products(x, trainable["blocks"][heads, block])
            x = x + jax.nn.silu(inner + trainable["bias"][heads, block])
        return x

    def project(self, trainable: PyTree, base: Base, x: jax.Array, first: int = 0) -> jax.Array:
        """States [..., M', D] of the heads from `first` on to float32 logits [..., M', V']."""
        heads = slice(first, first + x.shape[-2])
        if self.lm_head == "full":
            logits = _projected(x, trainable["lm_head"][heads])
            return base.finished(logits + trainable["lm_head_bias"][heads] if "lm_head_bias" in trainable else logits)
        logits = base.draft_logits(x)
        if self.lm_head == "low_rank":
            thin = own_products(x, trainable["down"][heads])
            logits += _projected(thin, trainable["up"][heads])
        return logits

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """Kernels in the base's dtype, of the projections only the columns that may be drafted."""
        of_tokens = ("lm_head", "lm_head_bias", "up")
        smaller = {name: base.draft_part(trainable[name]) for name in of_tokens if name in trainable}
        return for_products(trainable | smaller, base.dtype)

    # Training

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, K, V] of the heads at every chosen position."""
        return self._predictions(trainable, base, batch)[0]

    def _predictions(
        self, trainable: PyTree, base: Base, batch: Batch, seeds: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Predictions, and the base's final hidden states of the texts, [B, T, D]."""
        B, T = batch.tokens.shape
        context, following = causal_context(B, T), jnp.roll(batch.tokens, -1, axis=1)
        frozen, _ = base.rows(base.embed(batch.tokens), context)
        features, _ = self.adapt(trainable, base, frozen, following, context)
        rows, points = jnp.arange(B)[:, None], jnp.maximum(batch.points, 0)
        ahead = jnp.minimum(points[..., None] + 1 + jnp.arange(self.heads), T - 1)
        chosen = tuple(x[rows, points] for x in features)
        path = batch.tokens[rows[..., None], ahead]
        return self.along(trainable, base, chosen, path, seeds), frozen

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean over all targets of all heads, weighted as `alignment` and `labels` say."""
        student, frozen = self._predictions(trainable, base, batch, batch.seeds)
        distances = range(1, self.heads + 1)
        return future_loss(student, base, frozen, batch, distances, self.alignment, self.labels, decay=self.decay)

    # Decoding

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The cache of the method's own layers, and what the heads read, arrays [B, D], of the newest state."""
        config = dataclasses.replace(base.decoder.config, num_layers=self.own_layers)
        newest = jnp.zeros((batch, config.hidden_size), base.dtype)
        count = max(self.own_layers, 1)
        return {"cache": empty_cache(config, batch, capacity, base.dtype), "features": (newest,) * count}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """The tokens that were read through the method's own layers."""
        cache = method_state["cache"]
        read = continued_context(cache, chunk.first, chunk.hidden.shape[1])
        features, rows = self.adapt(context.trainable, context.base, chunk.hidden, chunk.tokens[:, 1:], read)
        newest = jax.tree.map(chunk.last, features)
        return {
            "cache": commit(cache, rows, chunk.first),
            "features": chunk.updated(newest, method_state["features"]),
        }

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """The candidates of all heads at once."""
        depth = min(context.depth, self.heads)
        logits = self.predict(context.trainable, context.base, method_state["features"], depth)
        return offer_ranked(context, logits, jnp.ones(logits.shape[:2], bool))


def _projected(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """States [..., M', D] times a kernel each, [M', D, V]: float32 logits [..., M', V].

    One by one: a batched product of 16 bits with a wider result is beyond XLA's CPU backend.
    """
    each = [product(x[..., m, :], kernel, preferred_element_type=wide(x)) for m, kernel in enumerate(kernels)]
    return jnp.stack(each, axis=-2)


def init_layer(key: jax.Array, base: Base) -> PyTree:
    """A decoder layer that does nothing yet: what it adds to its input is zero. Its shape is that of `plain_layers`."""
    c = base.decoder.config.plain_layers()
    x, angles = jnp.zeros((1, 1, c.hidden_size)), jnp.zeros((1, 1, c.rotary_size // 2))
    params = Layer(c).init(key, x, angles, jnp.ones((1, 1, 1, 1), bool))["params"]
    for part, last in (("attention", "o"), ("mlp", "down")):
        params[part][last] = jax.tree.map(jnp.zeros_like, params[part][last])
    return params


def run_layer(
    params: PyTree, base: Base, x: jax.Array, context: Context, number: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Run a decoder layer of the method's own: rows [B, R, D], with its `number` in the cache.

    Returns:
      The rows after it, and their keys and values [B, K, R, Dh].
    """
    c, (mask, seen) = base.decoder.config.plain_layers(), masks_of(context, None)
    layer = nn.remat(Layer) if base.decoder.remat else Layer
    args = (rope_angles(c, context.positions, long=base.long), mask, of_layer(context.cache, number), seen)
    return layer(c).apply({"params": params}, x, *args)


def beside(x: jax.Array, embeddings: jax.Array, even: bool = True) -> jax.Array:
    """The concatenation of states [..., D] and token embeddings [..., n, D]: [..., (1 + n) * D].

    A hidden state can be hundreds of times larger than an embedding, and a matrix that starts without the embeddings
    would take as much longer to learn from them: with `even` they are brought to the size of the state.
    """
    if even:
        scale = root_mean_square(x)[..., None, :] / jnp.maximum(root_mean_square(embeddings), 1e-6)
        embeddings = embeddings * scale
    return jnp.concatenate([x[..., None, :], embeddings.astype(x.dtype)], axis=-2).reshape(*x.shape[:-1], -1)


def root_mean_square(x: jax.Array) -> jax.Array:
    """Root mean square of states [..., D]: [..., 1]."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(wide(x))), axis=-1, keepdims=True))


def init_beside(base: Base, embeddings: int) -> jax.Array:
    """A kernel [(1 + n) * D, D] for what `beside` makes, which at first returns the state alone."""
    D = base.decoder.config.hidden_size
    return jnp.eye((1 + embeddings) * D, D)
