"""A search for the parts of a base's layers that drafting can do without: a replay of the base's answers.

Whatever is left out, drafting behind a place of an answer reads the base's own keys and values up to there. So the base
reads the answers once, and for every choice the remaining parts read short pieces of them, all at once, each as if it
had been drafted: that tells how much of a draft would be accepted there. The time of a pass is taken as that of reading
its weights, as on a machine that waits for its memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.attention import Context, causal_context
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache
from jaxspec.model.decoder import Skip, abstract_params
from jaxspec.weights.params import parameter_count

Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its answer
_PLACES = 12  # of every answer that are drafted from
_THRESHOLDS = np.arange(0, 1, 0.1)
_RANDOM = 0.4  # share of the trials that is spent at random


@dataclasses.dataclass(frozen=True)
class Found:
    """The value of a choice of layers to skip.

    Attributes:
      skip: what it leaves out.
      threshold: how probable a token must be for drafting to go on behind it: the best of ten for this choice.
      tokens: per step.
      drafted: tokens drafted per step.
      cost: of a drafting pass, as a share of the base's.
    """

    skip: Skip
    threshold: float
    tokens: float
    drafted: float
    cost: float

    @property
    def value(self) -> float:
        """Tokens in the time of a pass of the base, which autoregressive decoding makes one of."""
        return self.tokens / (1 + self.cost * self.drafted)


def search_layers(
    base: Base, texts: Sequence[Text], length: int, trials: int, progress: Callable[[int, str], None]
) -> Found:
    """The most valuable choice of so many: some at random, then the best of them with parts exchanged one by one.

    The first and the last layer stay whole.

    Args:
      base: the frozen decoder.
      texts: prompts with its own greedy answers.
      length: tokens to draft at most.
      trials: how many choices to try.
      progress: called with the number tried, and a note on the best.
    """
    replay, rng = LayerReplay(base, texts, length), np.random.default_rng(0)
    free = np.zeros((2, base.decoder.config.num_layers), bool)
    free[:, 1:-1] = True
    tried: dict[bytes, Found] = {}
    best = None
    for number in range(trials):
        if best is None or number < _RANDOM * trials or not free.any():
            choice = free & (rng.random(free.shape) < rng.uniform(0.1, 0.7))
        else:
            choice = _exchanged(best.skip, free, rng)
        if choice.tobytes() not in tried:
            found = tried[choice.tobytes()] = replay(as_skip(choice))
            best = found if best is None or found.value > best.value else best
        note = f"best {best.value:.3f}: {best.tokens:.2f} tokens per step, a drafting pass costs {best.cost:.2f}"
        progress(number + 1, note)
    return best


def _exchanged(skip: Skip, free: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A choice with one part more or one less, or with one for another: [2, L] bool, like the `free` parts."""
    choice = np.zeros_like(free)
    choice[0, list(skip.attention)] = choice[1, list(skip.mlp)] = True
    kept, left_out = (np.argwhere(free & (choice == x)) for x in (False, True))
    both = len(kept) and len(left_out) and rng.random() < 0.5
    for side in (kept, left_out) if both else (np.argwhere(free),):
        place = tuple(rng.choice(side))
        choice[place] = ~choice[place]
    return choice


def as_skip(choice: np.ndarray) -> Skip:
    """[2, L] bool as layers."""
    return Skip(*(tuple(np.flatnonzero(part).tolist()) for part in choice))


class LayerReplay:
    """Says of a choice how far its drafts along given answers would be accepted.

    Args:
      base: the frozen decoder.
      texts: prompts with answers of two tokens at least.
      length: M, tokens to draft at most.
    """

    def __init__(self, base: Base, texts: Sequence[Text], length: int):
        longest = max(len(prompt) + len(answer) for prompt, answer in texts)
        tokens = np.zeros((len(texts), longest), np.int32)
        following = np.full((len(texts), longest + length), -1, np.int32)  # the token after each, -1 for none
        places = np.zeros((len(texts), _PLACES), np.int32)
        for row, (prompt, answer) in enumerate(texts):
            whole = [*prompt, *answer]
            tokens[row, : len(whole)], following[row, : len(whole) - 1] = whole, whole[1:]
            places[row] = np.linspace(len(prompt), max(len(prompt), len(whole) - 1 - length), _PLACES).round()
        self._base, self._cost = base, _costs(base)
        at = places[..., None] + np.arange(length)  # [B, G, M]
        rows, (B, G, M) = np.arange(len(texts))[:, None, None], at.shape
        self._following = following[rows, at]
        pieces = tokens[rows, np.minimum(at, longest - 1)].reshape(B, -1)
        self._x, cache = _read(base, jnp.asarray(tokens), jnp.asarray(pieces))
        mask = jnp.broadcast_to(jnp.tri(M, dtype=bool), (B, G, M, M))
        visible = jnp.asarray(np.repeat(places, M, axis=1))
        self._context = Context(jnp.asarray(at.reshape(B, -1)), mask, cache, visible)

    def __call__(self, skip: Skip) -> Found:
        """The value of a choice, with the threshold that is best for it."""
        x = self._x
        for layer in range(self._base.decoder.config.num_layers):
            for attention in (True, False):
                if layer not in (skip.attention if attention else skip.mlp):
                    x = _half(self._base, x, self._context, layer, attention)
        said, chances = jax.device_get(_said(self._base, x))
        shape = self._following.shape
        right = np.cumprod(said.reshape(shape) == self._following, axis=-1)
        cost = self._cost(skip)
        found = []
        for threshold in _THRESHOLDS:
            sure = np.cumprod(chances.reshape(shape)[..., :-1] >= threshold, axis=-1)
            drafted = 1 + sure.sum(axis=-1)  # [B, G]
            accepted = np.minimum(right.sum(axis=-1), drafted)
            found.append(Found(skip, float(threshold), 1 + float(accepted.mean()), float(drafted.mean()), cost))
        return max(found, key=lambda one: one.value)


def _costs(base: Base) -> Callable[[Skip], float]:
    """The share of the weights that a pass reads which leaves something out."""
    config = base.decoder.config
    params = abstract_params(config)
    attention = [parameter_count(params[f"layers_{i}"]["attention"]) for i in range(config.num_layers)]
    mlp = [parameter_count(params[f"layers_{i}"]["mlp"]) for i in range(config.num_layers)]
    whole = sum(attention) + sum(mlp) + params["lm_head"].size

    def cost(skip: Skip) -> float:
        left_out = sum(attention[i] for i in skip.attention) + sum(mlp[i] for i in skip.mlp)
        return 1 - left_out / whole

    return cost


@jax.jit
def _read(base: Base, tokens: jax.Array, pieces: jax.Array) -> tuple[jax.Array, Cache]:
    """Embeddings of the pieces [B, G * M], and the keys and values of the texts [B, T]."""
    return base.embed(pieces), base.rows(base.embed(tokens), causal_context(*tokens.shape))[1]


@functools.partial(jax.jit, static_argnames=("layer", "attention"))
def _half(base: Base, x: jax.Array, context: Context, layer: int, attention: bool) -> jax.Array:
    """Rows [B, R, D] after the attention of a layer alone, or after its MLP alone."""
    skip = Skip(mlp=(layer,)) if attention else Skip(attention=(layer,))
    return base.rows(x, context, (layer, layer + 1), skip)[0]


@jax.jit
def _said(base: Base, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most probable token behind each row [B, R], and its chance, row by row to spare memory."""

    def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = base.logits(x)
        return jnp.argmax(logits, axis=-1), jnp.exp(jnp.max(jax.nn.log_softmax(logits), axis=-1))

    return jax.lax.map(one, x)
