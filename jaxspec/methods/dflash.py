"""DFlash (2026): a block of masks behind the newest token is filled in one pass, from hidden states of the base.

    text read by the base    t0 t1 t2 ... tp |            taps of the base's layers -> fuse -> norm: the context, which
                              c0 c1 c2 ... cp |            every layer turns into keys and values of its own, once
    block                                     | a m m m    the anchor a, the token after tp, and masks m

A block's rows see the whole context and each other; the context never changes. The drafter's own are a matrix that
fuses the taps, a few decoder layers, two norms and perhaps one vector, the mask; embedding and vocabulary projection
are the base's. All distances cost one pass over few rows, and candidates at a distance do not depend on those before.

DSpark (2026), which follows it, lets the anchor's row predict the next token too, so that no row is idle, and brings
back some dependence: a low-rank term per pair of neighbours (a Markov term) is added to the logits. DFlash 2 (2026)
mixes neighbouring rows of a block around attention and MLP (`block_convolution`), and ranks the best tokens of a row
anew by the token before (`block_heads`, which also has DSpark's).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import DraftContext, Offer, PyTree
from jaxspec.decoding.method import Batch, Facts, ReadChunk, check_choices, check_least
from jaxspec.errors import UserError
from jaxspec.methods.block_heads import BlockHeads
from jaxspec.methods.context_layer import DraftLayer, check_plain, checked_width, copied_layer
from jaxspec.methods.heads import beside, init_beside
from jaxspec.model.base import Base
from jaxspec.model.blocks import product
from jaxspec.model.cache import Cache, commit, empty_cache
from jaxspec.model.decoder import for_products
from jaxspec.model.dtypes import wide
from jaxspec.model.layers import RMSNorm
from jaxspec.model.quantized import dense
from jaxspec.model.rope import rope_angles
from jaxspec.model.rows import read_layers

_LONGEST = 16  # rows of a block in the paper


@dataclasses.dataclass(frozen=True)
class DFlash(BlockHeads):
    """Settings; the paper's are `layers=5`, `head_norms`, `start="random"`, a `mask_token`, and what it lacks is off.

    `BlockHeads` has the settings of what stands behind the rows.

    Attributes:
      block: rows of a block, the anchor and the masks behind it.
      layers: decoder layers of the drafter.
      tapped: hidden states before which layers of the base it reads; empty: as many as `taps_count`, spread as the
        paper spreads them.
      taps_count: how many.
      sample_from_anchor: row i predicts the token at anchor + i + 1 (DSpark), so that there are as many distances as
        rows; else the one at its own place (DFlash), and the anchor's row predicts nothing.
      from_newest: the rows of a block start from the newest token's deepest tapped state; the embedding of the anchor
        or the mask is read beside it, by a matrix that is zero at first. Off in the paper, whose rows are embeddings.
      even: tapped states are brought to one size before they are fused. Off in the paper.
      mask_token: the mask is the base's embedding of this token, which no text has; -1: a vector of its own, which
        learns.
      shapes: of its layers, their rotations, epsilon and norms of heads among them; None: as the base's layers. Of a
        base the same, its width is always the base's, and how many layers it has is said by `layers`.
      head_norms: without `shapes`: queries and keys are normalised per head, as in Qwen3, also where the base's are
        not.
      start: the layers start as copies of the base's last ones, or at random.
      convolution: taps of the convolutions over a block's rows, 2 in DFlash 2; 0 leaves them out. At first they pass
        on every row as it is.
      convolution_group: channels that share the part of their weights which depends on the row.
    """

    name: ClassVar[str] = "dflash"
    adjustable: ClassVar[tuple[str, ...]] = ()

    block: int = 8
    layers: int = 3
    tapped: tuple[int, ...] = ()
    taps_count: int = 3
    sample_from_anchor: bool = True
    from_newest: bool = True
    even: bool = True
    mask_token: int = -1
    shapes: ModelConfig | None = None
    head_norms: bool = False
    start: Literal["base", "random"] = "base"
    convolution: int = 0
    convolution_group: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.shapes, Mapping):  # of adapter.json
            object.__setattr__(self, "shapes", ModelConfig.from_json(dict(self.shapes)))
        least = 1 if self.sample_from_anchor else 2
        if not least <= self.block <= _LONGEST:
            raise UserError(f"{self.name}: block must be {least} to {_LONGEST}, got {self.block}")
        check_least(self, layers=1, taps_count=1, mask_token=-1, convolution=0, convolution_group=1)
        if self.convolution > self.block:
            raise UserError(
                f"{self.name}: convolution must be 0 to {self.block}, the rows of a block, got {self.convolution}"
            )
        if len(set(self.tapped)) < len(self.tapped):
            raise UserError(f"{self.name}: tapped names a layer twice, got {', '.join(map(str, self.tapped))}")
        check_choices(self)

    def facts(self, config: ModelConfig) -> Facts:
        """A pass over one block makes a draft."""
        return Facts(
            distances=self.distances,
            taps=self.taps(config.num_layers),
            own_layers=self.layers,
            reads_late=True,
            adapter="trained",
            learned_tokens=self.vocabulary,
        )

    @property
    def distances(self) -> int:
        """M: one per row that predicts."""
        return self.block - (not self.sample_from_anchor)

    def taps(self, layers: int) -> tuple[int, ...]:
        """The layers behind round(1 + i (L - 4) / (n - 1)), as the paper has it, unless `tapped` says otherwise."""
        if self.tapped:
            return self.tapped
        last = max(layers - 4, 0)
        shares = [i / (self.taps_count - 1) for i in range(self.taps_count)] if self.taps_count > 1 else [1.0]
        spread = {1 + round(1 + last * share) for share in shares}
        return tuple(sorted(min(layer, layers) for layer in spread))

    def layer_shapes(self, config: ModelConfig) -> ModelConfig:
        """The shapes of its layers on a base of these shapes. Raises UserError for a width that is not the base's."""
        if self.shapes is not None:
            return checked_width(self.name, self.shapes, config)
        return dataclasses.replace(config.plain_layers(), head_norms=config.head_norms or self.head_norms)

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The fusing matrix and its norm, the layers, the mask [D], the last norm and the heads.

        With a start from the base the context is at first the deepest tapped state, normed as the base's layer does it.
        """
        c, own = base.decoder.config, self.layer_shapes(base.decoder.config)
        taps = self.taps(c.num_layers)
        self._check_base(c)
        for_fuse, for_layers, for_mask, for_heads = jax.random.split(key, 4)
        trainable = {
            "fuse": {
                "kernel": c.hidden_size**-0.5 * jax.random.normal(for_fuse, (len(taps) * c.hidden_size, c.hidden_size))
            },
            "fuse_norm": {"scale": jnp.ones(c.hidden_size)},
            "norm": {"scale": base.params["norm"]["scale"]},
        }
        if self.mask_token < 0:
            words = base.embed(jax.random.randint(for_mask, (1, 1024), 0, c.vocab_size))
            trainable["mask"] = jnp.mean(words[0], axis=0)
        for i in range(self.layers):
            trainable[f"layer{i + 1}"] = self._layer(base).init(
                jax.random.fold_in(for_layers, i),
                jnp.zeros((1, 1, c.hidden_size)),
                jnp.zeros((1, 1, own.rotary_size // 2)),
                jnp.ones((1, 1, 1, 1), bool),
            )["params"]
        if self.start == "base":
            check_plain(self.name, c, self.shapes)
            first = c.num_layers - self.layers
            layers = [dense(base.params[f"layers_{first + i}"]) for i in range(self.layers)]
            for i, params in enumerate(layers):
                trainable[f"layer{i + 1}"] |= copied_layer(c, params)  # what the base lacks stays
            trainable["fuse"] = {"kernel": jnp.eye(len(taps) * c.hidden_size, c.hidden_size)}
            trainable["fuse_norm"] = layers[0]["attention_norm"]
        if self.from_newest:
            trainable["enter"] = {"kernel": init_beside(base, 1)}
        trainable |= self.init_heads(for_heads, base)
        return jax.tree.map(lambda x: x.astype(wide(x)), trainable)

    def _check_base(self, config: ModelConfig) -> None:
        """Raise UserError for settings that do not fit the layers, width or tokens of a base."""
        layers, taps = config.num_layers, self.taps(config.num_layers)
        if not 0 <= min(taps) <= max(taps) <= layers:
            tapped = ", ".join(map(str, taps))
            raise UserError(f"{self.name}: tapped must be 0 to {layers}, the layers of this base, got {tapped}")
        if self.start == "base" and self.layers > layers:
            raise UserError(f"{self.name}: {self.layers} layers cannot be copies of the {layers} that this base has")
        if self.convolution and config.hidden_size % self.convolution_group:
            raise UserError(
                f"{self.name}: convolution_group must divide the width {config.hidden_size} of this base, "
                f"got {self.convolution_group}"
            )
        if self.selector_rank and self.selector_width > config.vocab_size:
            raise UserError(
                f"{self.name}: selector_width must be 1 to {config.vocab_size}, the tokens of this base, "
                f"got {self.selector_width}"
            )
        if self.mask_token >= config.vocab_size:
            last = config.vocab_size - 1
            raise UserError(
                f"{self.name}: mask_token must be -1 to {last}, the tokens of this base, got {self.mask_token}"
            )

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """Kernels in the base's dtype, and the Markov term as products of the vocabulary projection, [r, V']."""
        return self.prepare_heads(for_products(trainable, base.dtype), base)

    # The drafter, the same in training and decoding

    def remember(self, trainable: PyTree, base: Base, taps: dict[int, jax.Array], positions: jax.Array) -> Cache:
        """Keys and values of text in every layer.

        Args:
          trainable: what `prepare` returned.
          base: the frozen decoder.
          taps: {layer: hidden states [B, T, D] before it}.
          positions: [B, T] int32.

        Returns:
          n x [B, K, T, Dh].
        """
        c = self.layer_shapes(base.decoder.config)
        # the deepest comes first
        states = [taps[layer] for layer in sorted(self.taps(base.decoder.config.num_layers), reverse=True)]
        if self.even:  # or those of some layers are larger by orders of magnitude
            states = [_unit(x, c.rms_norm_eps) for x in states]
        fused = product(jnp.concatenate(states, axis=-1), trainable["fuse"]["kernel"])
        context, angles = self._norm(trainable["fuse_norm"], base, fused), rope_angles(c, positions, long=base.long)
        layer = self._layer(base)
        each = [
            layer.apply({"params": trainable[f"layer{i + 1}"]}, context, angles, method="remember")
            for i in range(self.layers)
        ]
        keys, values = zip(*each, strict=True)
        return Cache(keys, values)

    def fill(
        self,
        trainable: PyTree,
        base: Base,
        anchors: jax.Array,
        positions: jax.Array,
        newest: jax.Array,
        memory: Cache,
        distances: int,
    ) -> jax.Array:
        """Run blocks that do not see each other.

        Args:
          trainable: what `prepare` returned.
          base: the frozen decoder.
          anchors: [B, G] int32, the tokens that the blocks begin with.
          positions: [B, G] int32, where they are; a block sees what is remembered of smaller ones.
          newest: [B, G, D], the deepest tapped states of the tokens before them.
          memory: of `remember`.
          distances: M', how far ahead to predict: a block is as long as that takes.

        Returns:
          Normalised states [B, G, M', D] of the rows that predict.
        """
        c, (B, G) = self.layer_shapes(base.decoder.config), anchors.shape
        rows = distances + (not self.sample_from_anchor)
        first = base.embed(anchors)[:, :, None]  # [B, G, 1, D]
        masks = jnp.broadcast_to(self._mask(trainable, base).astype(first.dtype), (B, G, rows - 1, first.shape[-1]))
        x = jnp.concatenate([first, masks], axis=2)
        if self.from_newest:
            states = jnp.broadcast_to(newest[:, :, None], x.shape)
            x = product(beside(states, x[..., None, :]), trainable["enter"]["kernel"])
        x = x.reshape(B, G * rows, -1)
        angles = rope_angles(c, (positions[..., None] + jnp.arange(rows)).reshape(B, -1), long=base.long)
        everyone = jnp.ones((B, G, rows, rows), bool)
        sees = jnp.repeat(jnp.arange(memory.capacity) < positions[..., None], rows, axis=1)  # [B, G * rows, S]
        layer = self._layer(base)
        for i, cached in enumerate(zip(memory.keys, memory.values, strict=True), 1):
            x = layer.apply({"params": trainable[f"layer{i}"]}, x, angles, everyone, cached, sees)
        return self._norm(trainable["norm"], base, x.reshape(B, G, rows, -1)[:, :, rows - distances :])

    def _mask(self, trainable: PyTree, base: Base) -> jax.Array:
        """[D], what the rows behind the anchor begin with."""
        return trainable["mask"] if self.mask_token < 0 else base.embed(jnp.array([[self.mask_token]]))[0, 0]

    def _deepest(self, base: Base) -> int:
        return max(self.taps(base.decoder.config.num_layers))

    def _layer(self, base: Base) -> DraftLayer:
        kind = nn.remat(DraftLayer, methods=["__call__"]) if base.decoder.remat else DraftLayer
        return kind(self.layer_shapes(base.decoder.config), self.convolution, self.convolution_group)

    def _norm(self, params: PyTree, base: Base, x: jax.Array) -> jax.Array:
        return RMSNorm(self.layer_shapes(base.decoder.config).rms_norm_eps).apply({"params": params}, x)

    # Training

    def text_blocks(self, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rows that predict, what was before them, and the base's last states, as `BlockHeads` has it."""
        B, T = batch.tokens.shape
        frozen, _, read = read_layers(base, batch.tokens, self.taps(base.decoder.config.num_layers))
        places = jnp.broadcast_to(jnp.arange(T), (B, T))
        memory = self.remember(trainable, base, read, places)
        ahead = jnp.maximum(batch.points, 0)[..., None] + np.arange(1, self.distances + 1)
        before = batch.tokens[jnp.arange(B)[:, None, None], jnp.minimum(ahead, T - 1)]
        newest = read[self._deepest(base)][jnp.arange(B)[:, None], ahead[..., 0] - 1]
        states = self.fill(trainable, base, before[..., 0], ahead[..., 0], newest, memory, self.distances)
        return states, before, frozen

    # Decoding

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """Keys and values of the drafter's layers, and the newest deepest tapped state [B, D]."""
        config = dataclasses.replace(self.layer_shapes(base.decoder.config), num_layers=self.layers)
        newest = jnp.zeros((batch, config.hidden_size), base.dtype)
        return {"memory": empty_cache(config, batch, capacity, base.dtype), "newest": newest}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Add the read tokens to the drafter's context."""
        positions = chunk.first[:, None] + jnp.arange(chunk.hidden.shape[1])
        new = self.remember(context.trainable, context.base, chunk.taps, positions)
        newest = chunk.last(chunk.taps[self._deepest(context.base)])
        return {
            "memory": commit(method_state["memory"], new, chunk.first),
            "newest": chunk.updated(newest, method_state["newest"]),
        }

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """The candidates of one block, as long as is asked for."""
        depth = len(context.tree.inner) if self.along_paths else min(context.depth, self.distances)
        anchors, positions = context.root[:, None], context.position[:, None]
        newest, memory = method_state["newest"][:, None], method_state["memory"]
        states = self.fill(context.trainable, context.base, anchors, positions, newest, memory, depth)
        return self.offer_behind(context, states[:, 0])


def _unit(x: jax.Array, epsilon: float) -> jax.Array:
    """States [..., D] of root mean square 1."""
    return RMSNorm(epsilon).apply({"params": {"scale": jnp.ones(x.shape[-1])}}, x)
