"""SPACE, smart parallel auto-correct decoding (Yi et al., 2024): the base learns to guess ahead behind mask tokens.

Section 3.1, semi-autoregressive fine-tuning, is `SPACE.loss`: k copies of one mask token stand behind a cut of the
text; the i-th sits i positions after the last token and predicts the token i + 1 positions after it. Unlike the other
methods this one trains the base itself, on the text as much as on the masks: wholly, or by corrections of low rank
(LoRA, beyond the paper). Its output is that of its own, fine-tuned base.

Section 3.2, auto-correct decoding, is what all probe methods share, here over `chain:5`; beyond the paper candidates
may form any draft tree:

    equation 5               `ProbeMethod.rows`: the candidates are its nodes, and every node carries a group of k masks
    equation 6               the mask there, and `ProbeMethod.sees`: earlier masks of the group, tokens before it
    equation 7               the positions there: owner + i, which is one less than the rows that the i-th mask sees
    Algorithm 1, lines 8-19  `Rejection` in decoding/acceptance.py; `Match` keeps the text of the seed as well
    lines 23-24              `ProbeMethod.offer`, and `rank` in decoding/draft.py, whose log_q is P_c

Where the paper is in error:

    equation 3               counts y_m in both sums; here the text has it, and mask i learns y_{m+i}
    equation 6               i - j < k lets a group of k >= 3 see the end of the last one; the text and Figure 3 do not
    Algorithm 1, line 18     draws from all of Q after a rejection, which changes the distribution: `Rejection.residual`

Two choices differ. The paper draws m from 0 to N - k; `insertion_points` admits 2 to N - 1, because prefill emits the
first token, so that masks never stand behind the prompt alone, and because a mask beyond the end just has no target.
And the mask is no special token: its embedding is a trainable beside the vocabulary, which stays as it is, so that the
mask can never be emitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Batch, Facts, Finalized
from jaxspec.errors import UserError
from jaxspec.methods.losses import answer_entropy, targets
from jaxspec.methods.probes import ProbeMethod
from jaxspec.model.base import Base
from jaxspec.model.blocks import Corrected, merged
from jaxspec.model.dtypes import wide
from jaxspec.model.quantized import is_quantized

_TARGETS = ("qkv", "o", "gate", "up", "down")
_PAIR = ("gate", "up")  # the base may hold them as one, `gate_up`


@dataclasses.dataclass(frozen=True)
class SPACE(ProbeMethod):
    """Settings of SPACE, beyond those of every probe method.

    Attributes:
      distances: k, the number of mask tokens (4.1: 5).
      objective: of the masks: `hard` labels (equation 3), or `distillation` against the base's own distribution.
      weighting: with `sums` every token weighs the same, in equation 1 and in equation 3, before the cut and behind a
        mask: equation 3 is a mean over the cuts of a text, and the sum over texts is divided by the number of answer
        tokens. `tokens` makes each equation a mean of its own, over answer tokens and over tokens before cuts
        and masks, so that these weigh more. `terms` also parts equation 3 into a mean for either sum, so that the few
        masks weigh as much as all tokens before the cuts.
      p_ar: weight of the autoregressive loss (equation 4; 4.1: 0.5); 1 is ordinary fine-tuning.
      tuning: of the base: `full`, `lora`, or `none`: the mask alone learns. What a full fine-tuning ends in is a base
        of its own and, for it, an adapter with `none`.
      rank: r of the corrections.
      alpha: a correction counts alpha / rank.
      targets: which matrices have one: qkv (query, key and value together), o, gate (where the base has one), up, down.
    """

    name: ClassVar[str] = "space"

    distances: int = 5
    objective: Literal["distillation", "hard"] = "hard"
    weighting: Literal["sums", "tokens", "terms"] = "terms"
    p_ar: float = 0.5
    tuning: Literal["full", "lora", "none"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = _TARGETS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p_ar <= 1:
            raise UserError(f"space: p-ar is a share between 0 and 1, got {self.p_ar}")
        if self.rank < 1 or not self.alpha > 0:
            raise UserError(f"space: rank must be at least 1 and alpha positive, got {self.rank} and {self.alpha}")
        if not self.targets or not set(self.targets) <= set(_TARGETS):
            raise UserError(f"space: targets must be some of {', '.join(_TARGETS)}, got {', '.join(self.targets)}")

    # Section 3.1: semi-autoregressive fine-tuning

    def init(self, key: jax.Array, base: Base) -> PyTree:
        """The mask's embedding [D], N(0, 0.02), and what tunes the base: all its parameters, or corrections of zero."""
        for_mask, for_lora = jax.random.split(key)
        trainable = {"mask": 0.02 * jax.random.normal(for_mask, (base.decoder.config.hidden_size,))}
        if self.tuning == "full":
            if any(map(is_quantized, jax.tree.leaves(base.params, is_leaf=is_quantized))):
                raise UserError("space: a base with weights in few bits cannot be tuned in full; give tuning lora")
            trainable["base"] = jax.tree.map(lambda x: jnp.array(x, wide(x)), base.params)
        if self.tuning == "lora":
            trainable["lora"] = self._corrections(for_lora, base)
        return trainable

    def _corrections(self, key: jax.Array, base: Base) -> PyTree:
        """`down` [in, r], random, and `up` [r, out], zero, for every target of every layer.

        Raises UserError for a base that has none of the targets.
        """
        corrections = {}
        for place, (rows, columns) in sorted(_matrices(base.params).items()):
            if place[-1] in self.targets:
                key, used = jax.random.split(key)
                corrections[*place, "down"] = jax.random.normal(used, (rows, self.rank)) * rows**-0.5
                corrections[*place, "up"] = jnp.zeros((self.rank, columns))
        if not corrections:
            raise UserError(f"space: this base has none of the targets {', '.join(self.targets)}")
        return flax.traverse_util.unflatten_dict(corrections)

    def tuned_base(self, trainable: PyTree, base: Base) -> Base:
        """The base being tuned, in the frozen one's dtype."""
        if self.tuning == "full":
            return base.replace(params=jax.tree.map(lambda x, old: x.astype(old.dtype), trainable["base"], base.params))
        if self.tuning == "none":
            return base
        params = flax.traverse_util.flatten_dict(base.params)
        corrections = flax.traverse_util.flatten_dict(trainable["lora"])
        if any("gate_up" in path for path in params):
            corrections = _of_pairs(corrections)
        for place in sorted({path[:-1] for path in corrections}):
            down, up = corrections[*place, "down"], corrections[*place, "up"] * (self.alpha / self.rank)
            params[*place, "kernel"] = Corrected(params[*place, "kernel"], down, up)
        return base.replace(params=flax.traverse_util.unflatten_dict(params))

    def enter(
        self, trainable: PyTree, entering: Sequence[int], distance: jax.Array, copy: jax.Array, owners: jax.Array
    ) -> jax.Array:
        """The one mask, everywhere."""
        return jnp.broadcast_to(trainable["mask"], (*distance.shape, trainable["mask"].size))

    def loss(
        self, trainable: PyTree, base: Base, batch: Batch, stage: int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Equation 4 over a batch, its tokens weighted as `weighting` says.

        The paper tosses a coin for every text, and cuts it in one place; here one pass over a text serves both losses
        and every insertion point as a cut. `m` of equation 3 is the token behind the cut: the last token before the
        masks predicts it, and the masks those that follow.
        """
        base, distances = self.tuned_base(trainable, base), range(1, self.distances + 1)
        is_cut, cuts = batch.points[..., None] >= 0, batch.points.shape[1]  # [B, G, 1]; G
        counts = cuts / jnp.maximum(jnp.sum(is_cut, axis=1, keepdims=True), 1) if self.weighting == "sums" else 1.0
        text, exits = self.probe(trainable, base, batch, self.distances, training=True)
        masked, metrics = self.loss_of(trainable, base, batch, text, exits, distances, counts=counts)
        entropy, answer = answer_entropy(base, text, batch)  # [B, T - 1], of the tokens from the second on
        up_to_m = is_cut & (jnp.arange(1, batch.tokens.shape[1]) <= batch.points[..., None] + 1)  # [B, G, T - 1]
        before = answer * jnp.sum(up_to_m * counts, axis=1)  # how often equation 3 counts a token
        autoregressive = _mean(entropy, answer)
        if self.weighting == "terms":
            semi = _mean(entropy, before) + masked
        else:
            masks = jnp.sum(targets(batch, distances) * counts)
            total = cuts * jnp.sum(answer) if self.weighting == "sums" else jnp.sum(before) + masks
            semi = (jnp.sum(entropy * before) + masked * masks) / jnp.maximum(total, 1)
        return self.p_ar * autoregressive + (1 - self.p_ar) * semi, metrics | {"autoregressive": autoregressive}

    def predictions(self, trainable: PyTree, base: Base, batch: Batch) -> jax.Array:
        """Logits [B, G, k, V] of the masks, behind the tuned base's own text."""
        return super().predictions(trainable, self.tuned_base(trainable, base), batch)

    # What training ends in

    def facts(self, config: ModelConfig) -> Facts:
        """A full fine-tuning ends in a base of its own."""
        return dataclasses.replace(super().facts(config), adapter="base" if self.tuning == "full" else "trained")

    def finalize(self, trainable: PyTree, base: Base) -> Finalized:
        """The mask alone, for the base that was tuned with it; beside quantized kernels its corrections stay."""
        if self.tuning == "none":
            return super().finalize(trainable, base)
        tuned = base.replace(params=merged(self.tuned_base(trainable, base).params))
        return Finalized(dataclasses.replace(self, tuning="none"), {"mask": trainable["mask"]}, tuned)


def _matrices(params: PyTree) -> dict[tuple[str, ...], tuple[int, int]]:
    """The matrices of a base that may be corrected by place, [in, out]; of a pair each has a place of its own."""
    shapes = {}
    for (*place, name), leaf in flax.traverse_util.flatten_dict(params).items():
        if name == "kernel":
            names = _PAIR if place[-1] == "gate_up" else place[-1:]
            shapes |= {(*place[:-1], each): leaf.shape[-2:] for each in names}
    return shapes


def _of_pairs(corrections: dict[tuple[str, ...], jax.Array]) -> dict[tuple[str, ...], jax.Array]:
    """Corrections by path of a base that holds gate and up as a pair; one that is no target gets zeros."""
    paired = {path: x for path, x in corrections.items() if path[-2] not in _PAIR}
    for *layer, _, factor in corrections.keys() - paired.keys():
        two = [corrections.get((*layer, name, factor)) for name in _PAIR]
        like = next(x for x in two if x is not None)
        paired[*layer, "gate_up", factor] = jnp.stack([jnp.zeros_like(like) if x is None else x for x in two])
    return paired


def _mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1)
