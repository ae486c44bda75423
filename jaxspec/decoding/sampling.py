"""Samplers draw the next token so that the text depends on the seed alone.

Every token v at absolute position t of a row with seed s has its own noise g[t, v] = gumbel(fold_in(key(s), t))[v].
Whoever draws the token at t, autoregressive decoding, a node of a tree or a drafter guessing ahead, takes
argmax(filtered log p + g[t]). So the same seed gives the same text whatever the method, the tree or the batch.

Rejection sampling alone needs drafts and chances that know nothing of g: they have streams of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.config import SamplingConfig
from jaxspec.decoding.penalties import Penalties
from jaxspec.errors import UserError

PyTree = Any
_DROPPED = -jnp.inf
_EXPONENT = np.uint32(0x3F800000)  # of float32 numbers from 1 to 2
_ROTATIONS = tuple(tuple(map(np.uint32, shifts)) for shifts in ((13, 15, 26, 6), (17, 29, 16, 24)))
_DRAFTS, _CHANCES = (np.uint32(2**32 - n) for n in (1, 2))  # streams; no position is as large


def threefry(key: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011), the hash of jax.random: fold a number into a key.

    jax.random has XLA's CPU backend run the rounds one after the other over all tokens; here they are one pass, and any
    tokens can be asked for.

    Args:
      key: two arrays of uint32 that broadcast with `number`.
      number: integers below 2 ** 32.

    Returns:
      A key; of a token, two words of random bits.
    """
    words = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = words[0], words[1] + jnp.asarray(number).astype(jnp.uint32)
    for block in range(5):
        for shift in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ (y << shift | y >> (32 - shift))
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def step_seeds(seeds: jax.Array, position: jax.Array) -> jax.Array:
    """Seeds [B] uint32 of drafts alone, other ones for every step: by the position [B] of its root."""
    return threefry(threefry((jnp.zeros((), jnp.uint32), seeds), _DRAFTS), position)[0]


def best(scores: jax.Array) -> jax.Array:
    """The token with the highest score, the first of several: [..., V] to [...] int32.

    XLA's CPU backend runs an argmax one element at a time, together with all the noise that leads to it (2.5 ms for a
    vocabulary of 49,152); scores, their maximum and where it stands it computes as vectors, one by one (0.2 ms).
    """
    return lax.platform_dependent(
        scores, cpu=_first_largest, default=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    )


def _first_largest(x: jax.Array) -> jax.Array:
    """The argmax as an operation each for the values, the largest and its place; of NaN the last place."""
    x = lax.optimization_barrier(x)
    largest = lax.optimization_barrier(jnp.max(x, axis=-1, keepdims=True))
    place = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == largest, place, place[-1]), axis=-1)


@flax.struct.dataclass
class Sampler:
    """Sampling settings as traced values, so that another temperature does not recompile.

    Attributes:
      temperature: float32 scalar.
      top_k: int32 scalar.
      top_p: float32 scalar.
      min_p: float32 scalar.
      active: which of (sampling at all, top-k, top-p, min-p) are switched on (static).
      independent: draw from the stream of drafts, and remember the distribution drawn from (static).
      penalties: of the base's logits, for tokens that a text has already; None where there are none.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    active: tuple[bool, bool, bool, bool] = flax.struct.field(pytree_node=False)
    independent: bool = flax.struct.field(pytree_node=False, default=False)
    penalties: Penalties | None = None

    @property
    def sampling(self) -> bool:
        """Whether tokens are drawn at all; else the most probable one is taken."""
        return self.active[0]

    def pick(self, sampled: PyTree, greedy: PyTree) -> PyTree:
        """The first value for tokens that are drawn, the second for greedy ones."""
        return sampled if self.sampling else greedy

    def filtered(self, logits: jax.Array) -> jax.Array:
        """Logits [..., V] over the temperature, with filtered tokens at minus infinity; unchanged when greedy."""
        sampling, *used = self.active
        if not sampling:
            return logits
        logits = logits / self.temperature
        for use, keep, setting in zip(used, _FILTERS, (self.top_k, self.top_p, self.min_p), strict=True):
            if use:
                logits = keep(logits, setting)
        return logits

    def distribution(self, logits: jax.Array) -> jax.Array:
        """The distribution [..., V] that a token is drawn from, by the base's logits."""
        return jax.nn.softmax(self.filtered(logits))

    def noise(self, seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
        """Gumbel noise of tokens at absolute positions.

        Args:
          seeds: [B] uint32.
          positions: [B, X] int32.
          tokens: [V'] int32, ids; what a token gets does not depend on the others.

        Returns:
          [B, X, V'] float32; when greedy a zero that broadcasts.
        """
        if not self.sampling:
            return jnp.zeros((1, 1, 1))
        key = (jnp.zeros((), jnp.uint32), seeds[:, None, None])
        key = threefry(key, _DRAFTS) if self.independent else key
        # one after the other: LLVM's time to compile both in one loop is exponential in the number of rounds
        key = lax.optimization_barrier(threefry(key, positions[..., None]))
        high, low = threefry(key, tokens)
        mantissa = (high ^ low) >> 9
        uniform = lax.bitcast_convert_type(mantissa | _EXPONENT, jnp.float32) - 1
        return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))

    def chances(self, seeds: jax.Array, positions: jax.Array, count: int) -> jax.Array:
        """Uniform numbers in [0, 1) that decide about drafts, [B, X, count], by seed [B] and position [B, X]."""

        def one(seed: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), _CHANCES)
            return jax.random.uniform(jax.random.fold_in(key, position), (count,))

        return jax.vmap(jax.vmap(one, (None, 0)))(seeds, positions)


def _top_k(logits: jax.Array, count: jax.Array) -> jax.Array:
    bits, count = _ordered_bits(logits), jnp.minimum(count, logits.shape[-1])
    return jnp.where(bits >= _threshold(bits, jnp.ones_like(logits), count), logits, _DROPPED)


def _top_p(logits: jax.Array, total: jax.Array) -> jax.Array:
    p = jax.nn.softmax(logits)
    bits = _ordered_bits(p)
    return jnp.where(bits >= _threshold(bits, p, total), logits, _DROPPED)


def _min_p(logits: jax.Array, share: jax.Array) -> jax.Array:
    most = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits >= most + jnp.log(share), logits, _DROPPED)


_FILTERS = (_top_k, _top_p, _min_p)


@flax.struct.dataclass
class RowSampler(Sampler):
    """A sampler with settings per batch row: arrays [B] in place of the scalars.

    A row with a temperature of 0 is greedy; 0, 1 and 0 switch its filters off. What no row asks for is not computed,
    and what the others ask for changes nothing of a row.
    """

    @property
    def drawn(self) -> jax.Array:
        """[B] bool, rows that are not greedy."""
        return self.temperature > 0

    def pick(self, sampled: PyTree, greedy: PyTree) -> PyTree:
        """The first value in rows that are drawn, the second in greedy ones: [B, ...] of arrays [B or 1, ...]."""
        if not self.sampling:
            return greedy
        return jax.tree.map(lambda x, y: jnp.where(_as_rows(self.drawn, x.ndim), x, y), sampled, greedy)

    def filtered(self, logits: jax.Array) -> jax.Array:
        """Logits [B, ..., V] over each row's temperature, its filters applied; unchanged in greedy rows."""
        if not self.sampling:
            return logits
        logits = logits / _as_rows(jnp.where(self.drawn, self.temperature, 1.0), logits.ndim)
        settings = ((self.top_k, self.top_k > 0), (self.top_p, self.top_p < 1), (self.min_p, self.min_p > 0))
        for keep, (setting, used) in zip(_FILTERS, settings, strict=True):
            logits = self._where_used(keep, logits, setting, used & self.drawn)
        return logits

    def _where_used(
        self, keep: Callable[..., jax.Array], logits: jax.Array, setting: jax.Array, used: jax.Array
    ) -> jax.Array:
        """Logits with one filter applied in the rows that use it."""

        def apply(logits: jax.Array) -> jax.Array:
            kept = keep(logits, _as_rows(setting, logits.ndim))
            return jnp.where(_as_rows(used, logits.ndim), kept, logits)

        return lax.cond(jnp.any(used), apply, lambda logits: logits, logits)

    def distribution(self, logits: jax.Array) -> jax.Array:
        """The distribution [B, ..., V] that a token is drawn from; in a greedy row the best token alone."""
        alone = jax.nn.one_hot(best(logits), logits.shape[-1], dtype=logits.dtype)
        return self.pick(super().distribution(logits), alone)

    def noise(self, seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
        """The noise of every sampler; 0 in greedy rows."""
        if not self.sampling:
            return super().noise(seeds, positions, tokens)
        draw = functools.partial(Sampler.noise, self, seeds, positions, tokens)
        nothing = jnp.zeros(jax.eval_shape(draw).shape)
        return self.pick(lax.cond(jnp.any(self.drawn), draw, lambda: nothing), nothing)


def _as_rows(x: jax.Array, ndim: int) -> jax.Array:
    """[B] with further axes of one, `ndim` in all."""
    return x.reshape(-1, *(1,) * (ndim - 1))


_COLDEST = 1e-6  # what is colder is greedy, and far below it logits overflow
_MOST = np.iinfo(np.int32).max
_MOST_REPETITION = 100  # far beyond what leaves text


def make_sampler(config: SamplingConfig) -> Sampler:
    """Check sampling settings and make them traced values.

    Raises:
      UserError: a value outside its range.
    """
    check_sampling(config)
    sampling = config.temperature > 0
    return Sampler(
        temperature=jnp.float32(config.temperature),
        top_k=jnp.int32(min(config.top_k, _MOST)),
        top_p=jnp.float32(config.top_p),
        min_p=jnp.float32(config.min_p),
        active=(sampling, sampling and config.top_k > 0, sampling and config.top_p < 1, sampling and config.min_p > 0),
        penalties=Penalties.of([config]) if config.penalises else None,
    )


def make_row_sampler(configs: Sequence[SamplingConfig], penalties: bool = False) -> RowSampler:
    """Sampling settings of every batch row, which were checked, as host arrays; with penalties only where asked for."""
    return RowSampler(
        temperature=np.array([config.temperature for config in configs], np.float32),
        top_k=np.array([min(config.top_k, _MOST) for config in configs], np.int32),
        top_p=np.array([config.top_p for config in configs], np.float32),
        min_p=np.array([config.min_p for config in configs], np.float32),
        active=(True, True, True, True),
        penalties=Penalties.of(configs) if penalties else None,
    )


def check_sampling(config: SamplingConfig) -> None:
    """Raise UserError for a value outside its range."""
    if config.temperature and not _COLDEST <= config.temperature < float("inf"):
        raise UserError(f"temperature must be 0 (greedy) or a number from {_COLDEST:g} on, got {config.temperature}")
    if not 0 < config.top_p <= 1:
        raise UserError(f"top-p must be above 0 and at most 1, got {config.top_p}")
    if not 0 <= config.min_p <= 1:
        raise UserError(f"min-p must be between 0 and 1, got {config.min_p}")
    if config.top_k < 0:
        raise UserError(f"top-k must be 0 (off) or positive, got {config.top_k}")
    if not 0 < config.repetition_penalty <= _MOST_REPETITION:
        raise UserError(
            f"repetition-penalty must be above 0 and at most {_MOST_REPETITION} (1 is off), "
            f"got {config.repetition_penalty}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (value := getattr(config, name)) <= 2:
            raise UserError(f"{name.replace('_', '-')} must be between -2 and 2 (0 is off), got {value}")


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 as int32 in the same order."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(bits: jax.Array, weights: jax.Array, amount: jax.Array) -> jax.Array:
    """The largest value t with sum(weights where bits >= t) >= amount, by bisection over the bits: exact, no sort.

    Args:
      bits: [..., V] int32.
      weights: [..., V] what each element counts.
      amount: scalar to reach.

    Returns:
      [..., 1] int32.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # low is enough, high is too much
        middle = (low & high) + ((low ^ high) >> 1)
        enough = jnp.sum(jnp.where(bits >= middle, weights, 0), axis=-1, keepdims=True) >= amount
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.min(bits, axis=-1, keepdims=True)
    high = jnp.max(bits, axis=-1, keepdims=True) + 1
    return lax.fori_loop(0, 32, halve, (low, high))[0]
