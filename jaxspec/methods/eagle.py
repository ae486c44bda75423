"""EAGLE-3 (Li et al., 2025): one decoder layer that drafts in the base's place, from what the base was thinking.

The row at position t reads the base's hidden states at t, of a low, a middle and a high layer, beside the embedding of
the token at t + 1, and its output gives the token at t + 2 and stands for the base's states at t + 1, so that the same
layer drafts as far as it is asked to:

    position         ...  p - 2   p - 1       p      p + 1
    state of          base  base   base      own      own      (fused by `fc`; own: the output of the row before)
    embedding of            p - 1   root      a        b       (the token that follows: known, or drafted)
    drafts                           a        b        c

Rows on the base's states stay in a cache of the drafter's own. Those on its own states see that cache and the rows
of their own path, and are dropped with the step. Training does the same along the text (training-time test): unroll k
runs on the states that unroll k - 1 made. Where drafts are chosen per step, the most probable nodes of each level
expand (EAGLE-2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Offer, PyTree
from jaxspec.decoding.levels import Parents, offer_levels
from jaxspec.decoding.method import Batch, Facts, Method, ReadChunk, check_choices, check_decay, check_least
from jaxspec.errors import UserError
from jaxspec.methods.context_layer import check_plain
from jaxspec.methods.heads import beside, init_beside, root_mean_square
from jaxspec.methods.losses import targets
from jaxspec.model.attention import MASKED, normalised
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.decoder import finished, for_products
from jaxspec.model.dtypes import wide
from jaxspec.model.layers import Attention, Layer, Linear
from jaxspec.model.quantized import dense
from jaxspec.model.rope import rope_angles
from jaxspec.model.rows import read_layers
from jaxspec.parallel.sharding import divided

KeyValue = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Eagle(Method):
    """Settings of EAGLE-3.

    Attributes:
      depth: M, how far ahead it drafts.
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
      confidence: where drafts are chosen per step, paths less probable than this are not followed, and a level without
        others takes no time; 0 in EAGLE-3, which drafts all levels in every step.
    """

    name: ClassVar[str] = "eagle"
    kernels: ClassVar[tuple[str, ...]] = ("kernel", "lm_head")
    adjustable: ClassVar[tuple[str, ...]] = ("confidence",)

    depth: int = 4
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
    confidence: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.shapes, Mapping):  # of adapter.json
            object.__setattr__(self, "shapes", ModelConfig.from_json(dict(self.shapes)))
        if self.norm_before_fc and self.fc_norm:
            raise UserError("eagle: norm_before_fc and fc_norm exclude each other")
        check_least(self, depth=1, unroll=1, vocabulary=0, features=0, top_k=0)
        if list(self.reads) != sorted(set(self.reads)):
            raise UserError(f"eagle: reads must be different and in ascending order, got {list(self.reads)}")
        if not 0 <= self.confidence < 1:
            raise UserError(f"eagle: confidence must be at least 0 and below 1, got {self.confidence}")
        check_decay(self.name, self.decay)
        check_choices(self)

    def facts(self, config: ModelConfig) -> Facts:
        """It learns the unrolled steps, and drafts as far as it is asked to."""
        return Facts(
            distances=self.depth,
            learned_distances=min(self.depth, self.unroll),
            taps=self.taps(config.num_layers),
            own_layers=self.depth,
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
        if self.shapes.hidden_size != config.hidden_size:
            raise UserError(f"eagle: its width must be the base's {config.hidden_size}, got {self.shapes.hidden_size}")
        return self.shapes

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
            check_plain(self.name, base.decoder.config)
            if self.shapes not in (None, base.decoder.config):
                raise UserError("eagle: a layer of other shapes than the base's cannot start as one; use start random")
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

    def _fused(self, trainable: PyTree, base: Base, states: dict[int, jax.Array]) -> jax.Array:
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

    def _entered(self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array) -> jax.Array:
        """States [B, R, D] as rows begin, which with `direct` knows the tokens after them [B, R]."""
        if not self.direct:
            return state
        embedding = self._embedded(trainable, base, following)
        return product(beside(state, embedding[..., None, :]), trainable["direct"]["kernel"])

    def _qkv(
        self, trainable: PyTree, base: Base, state: jax.Array, following: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, R, H, Dh], keys and values [B, R, K, Dh] of rows: states [B, R, D] beside the tokens after."""
        c, layer = self.layer_shapes(base.decoder.config), trainable["layer"]
        embedding = self._embedded(trainable, base, following)
        embedding = normalised(embedding, trainable["embedding_norm"]["scale"], c.rms_norm_eps)
        x = jnp.concatenate([embedding, normalised(state, layer["attention_norm"]["scale"], c.rms_norm_eps)], axis=-1)
        attention, angles = {"params": layer["attention"]}, rope_angles(c, positions, long=base.long)
        return Attention(c).apply(attention, divided(x, "batch"), angles, method="queries_keys_values")

    def _after(self, trainable: PyTree, base: Base, state: jax.Array, attended: jax.Array) -> jax.Array:
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

    def _logits(self, trainable: PyTree, base: Base, state: jax.Array) -> jax.Array:
        """Float32 logits [..., V'] of what follows, from rows' outputs [..., D]."""
        x = self._normed(trainable, base, state)
        if not self.own_head:
            return base.draft_logits(x)
        logits = product(x, trainable["lm_head"], preferred_element_type=wide(x))
        return base.finished(logits) if self.shapes is None else finished(self.shapes, logits)

    # Training

    def _unrolled(
        self, trainable: PyTree, base: Base, batch: Batch, count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Outputs [B, G, count, D] of unrolls at every insertion point; and the base's final states, [B, T, D]."""
        B, T = batch.tokens.shape
        frozen, _, states = read_layers(base, batch.tokens, self.taps(base.decoder.config.num_layers))
        rows, points = jnp.arange(B)[:, None], jnp.maximum(batch.points, 0)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        following = jnp.roll(batch.tokens, -1, axis=1)
        fused = self._entered(trainable, base, self._fused(trainable, base, states), following)
        q, k, v = self._qkv(trainable, base, fused, following, positions)
        cached, visible = (k.swapaxes(1, 2), v.swapaxes(1, 2)), jnp.arange(T) <= points[..., None]
        after = jax.checkpoint(self._after) if base.decoder.remat else self._after
        state = after(trainable, base, fused[rows, points], _attend(q[rows, points], cached, visible, []))
        outputs, path = [state], []
        for unroll in range(1, count):
            following = batch.tokens[rows, jnp.minimum(points + 1 + unroll, T - 1)]
            state = self._entered(trainable, base, state, following)
            q, *row_kv = self._qkv(trainable, base, state, following, points + unroll)
            path.append(tuple(row_kv))
            state = after(trainable, base, state, _attend(q, cached, visible, path))
            outputs.append(state)
        return jnp.stack(outputs, axis=2), frozen

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, M, V] along the text; -inf for tokens that it does not learn to draft."""
        states, _ = self._unrolled(trainable, base, batch, self.depth)
        return base.draft_whole(self._logits(trainable, base, states), -jnp.inf)

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy with the base's distribution over V', where its best token is one of these (3.1)."""
        states, frozen = self._unrolled(trainable, base, batch, self.unroll)
        distances = jnp.arange(1, self.unroll + 1)
        rows = jnp.arange(len(states))[:, None, None]
        at = (rows, jnp.minimum(batch.points[..., None] + distances, batch.tokens.shape[1] - 2))
        has_target = targets(batch, range(1, self.unroll + 1))
        weights = has_target * self.decay ** (distances - 1) / jnp.maximum(jnp.sum(has_target, axis=(0, 1)), 1)

        student = self._logits(trainable, base, states)  # [B, G, U, V']
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

    # Decoding

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The cache of rows on the base's states, and the output [B, D] of the newest of them."""
        config = dataclasses.replace(self.layer_shapes(base.decoder.config), num_layers=1)
        cache = empty_cache(config, batch, capacity, base.dtype)
        return {"cache": cache, "state": jnp.zeros((batch, config.hidden_size), base.dtype)}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Keys and values of all rows that were read; the rest of the layer for the last one alone."""
        trainable, base, (B, T) = context.trainable, context.base, chunk.hidden.shape[:2]
        taps = self.taps(base.decoder.config.num_layers)
        following = chunk.tokens[:, 1:]
        fused = self._fused(trainable, base, {layer: chunk.taps[layer] for layer in taps})
        fused = self._entered(trainable, base, fused, following)
        q, k, v = self._qkv(trainable, base, fused, following, chunk.first[:, None] + jnp.arange(T))
        cache = commit(method_state["cache"], Cache((k.swapaxes(1, 2),), (v.swapaxes(1, 2),)), chunk.first)
        rows, last = jnp.arange(B)[:, None], jnp.maximum(chunk.length - 1, 0)[:, None]
        visible = jnp.arange(cache.capacity) <= (chunk.first[:, None] + last)[..., None]  # [B, 1, S]
        attended = _attend(q[rows, last], (cache.keys[0], cache.values[0]), visible, [])
        state = self._after(trainable, base, fused[rows, last], attended)[:, 0]
        return {"cache": cache, "state": chunk.updated(state, method_state["state"])}

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """Level by level: every node that expands is a row on the output of its parent's."""
        trainable, base, cache = context.trainable, context.base, method_state["cache"]
        visible = jnp.arange(cache.capacity) < context.position[:, None, None]
        rows = jnp.arange(len(context.root))[:, None]

        def expand(parents: Parents, levels: Sequence[Any]) -> tuple[jax.Array, Any]:
            """`levels` holds, of the nodes that expanded at each, outputs [B, W, D], keys and values [B, W, K, Dh]."""
            if parents.level == 0:
                state, row_kv = method_state["state"][:, None], None
            else:
                above, place = levels[-1][0], parents.ancestors
                position = context.position[:, None] - 1 + parents.level
                state = self._entered(trainable, base, above[rows, place[..., -1]], parents.tokens)
                q, *row_kv = self._qkv(trainable, base, state, parents.tokens, position)
                path = [tuple(x[rows, place[..., i]] for x in levels[i][1]) for i in range(1, parents.level)]
                attended = _attend(q, (cache.keys[0], cache.values[0]), visible, [*path, tuple(row_kv)])
                state = self._after(trainable, base, state, attended)
            return self._logits(trainable, base, state), (state, row_kv)

        return offer_levels(context, expand, best=not context.fixed, confidence=self.confidence)


def _attend(q: jax.Array, cached: KeyValue, visible: jax.Array, path: list[KeyValue]) -> jax.Array:
    """Grouped-query attention of rows to a cache and to keys of their own each.

    Args:
      q: [B, R, H, Dh], rotated.
      cached: keys and values [B, K, S, Dh].
      visible: [B, 1 or R, S] bool.
      path: P keys and values [B, R, K, Dh], one of each for every row, all of which it sees.

    Returns:
      [B, R, H * Dh].
    """
    B, R, H, Dh = q.shape
    K, S = cached[0].shape[1:3]
    dot = dict(preferred_element_type=wide(q))
    grouped = (q.reshape(B, R, K, H // K, Dh) * Dh**-0.5).swapaxes(1, 2)  # [B, K, R, H/K, Dh]
    folded = grouped.reshape(B, K, -1, Dh)
    scores = jnp.einsum("bkqd,bksd->bkqs", folded, cached[0].astype(q.dtype), **dot).reshape(B, K, R, -1, S)
    scores = [jnp.where(visible[:, None, :, None], scores, MASKED)]
    scores += [jnp.einsum("bkrgd,brkd->bkrg", grouped, k, **dot)[..., None] for k, _ in path]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1)).astype(q.dtype)
    old = weights[..., :S].reshape(B, K, -1, S)
    out = jnp.einsum("bkqs,bksd->bkqd", old, cached[1].astype(q.dtype), **dot).reshape(B, K, R, -1, Dh)
    for i, (_, v) in enumerate(path):
        out += weights[..., S + i, None] * v.swapaxes(1, 2)[..., None, :]
    return out.swapaxes(1, 2).reshape(B, R, -1).astype(q.dtype)
