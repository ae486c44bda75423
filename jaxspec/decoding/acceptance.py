"""Acceptance: the rules that decide which candidates of a verified tree survive, and draw the bonus token."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.decoding.draft import Accepted, Draft
from jaxspec.decoding.paths import follow, longest, right, walk
from jaxspec.decoding.sampling import Sampler, best, step_seeds
from jaxspec.decoding.tree import Tree
from jaxspec.errors import UserError

_TINY = 1e-20


class Acceptance(abc.ABC):
    """A rule that decides which candidates survive; a frozen dataclass of static settings.

    Attributes:
      lossless: whether sampled text has the distribution of autoregressive decoding's. Greedy text is always the same.
      remark: what there is to say about a sampled text that is not autoregressive decoding's own; empty where it always
        is, which `same_text` relies on.
      draws: whether it asks for candidates that were drawn, which those of a fixed tree alone are.
      chains: whether it refuses trees that are no chains, and when sampling candidates that were not drawn.
    """

    lossless: ClassVar[bool] = True
    remark: ClassVar[str] = ""
    draws: ClassVar[bool] = False
    chains: ClassVar[bool] = False

    def same_text(self, temperature: float) -> bool:
        """Whether at a temperature the text is that of autoregressive decoding, token by token."""
        return not (self.remark and temperature)

    @abc.abstractmethod
    def choose(self, logits: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
        """The base's own token [...] from logits [..., V] and noise that broadcasts to them."""

    @abc.abstractmethod
    def __call__(
        self,
        draft: Draft,
        logits: jax.Array,
        sampler: Sampler,
        seeds: jax.Array,
        positions: jax.Array,
    ) -> Accepted:
        """Verify a draft.

        Args:
          draft: what to verify.
          logits: [B, N, V] float32, the base's logits at the nodes.
          sampler: how tokens are drawn.
          seeds: [B] uint32.
          positions: [B, P + 1] int32, the position that a node of each depth predicts.
        """

    def drafting(self, sampler: Sampler) -> Sampler:
        """The sampler that the method draws its candidates with."""
        return sampler

    def drafting_seeds(self, seeds: jax.Array, position: jax.Array) -> jax.Array:
        """The seeds [B] uint32 that candidates behind the token at `position` [B] are ranked or drawn with."""
        return seeds


@dataclasses.dataclass(frozen=True)
class Match(Acceptance):
    """Lossless: a candidate survives if it is the token the base draws there with that position's noise.

    Greedy decoding is the case without noise ("exact matching", PPD 4.5.2, Algorithm 3).
    """

    def choose(self, logits: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
        """The best token, noise included."""
        return best(sampler.filtered(logits) + noise)

    def __call__(
        self, draft: Draft, logits: jax.Array, sampler: Sampler, seeds: jax.Array, positions: jax.Array
    ) -> Accepted:
        """Verify a draft: of all its nodes at once, on CPUs only of those that survive.

        Noise and filters take as long there as there are nodes; elsewhere a loop takes longer.
        """
        tokens, rows = jnp.arange(logits.shape[-1]), jnp.arange(len(seeds))

        def at_once() -> Accepted:
            noise = _per_node(sampler.noise(seeds, positions, tokens), draft.tree)
            return follow(draft, self.choose(logits, noise, sampler))

        def target(node: jax.Array) -> jax.Array:
            position = positions[rows, draft.tree.depth[rows, node]]
            noise = sampler.noise(seeds, position[:, None], tokens)[:, 0]
            return self.choose(logits[rows, node], noise, sampler)

        return lax.platform_dependent(cpu=lambda: walk(draft, target), default=at_once)


@dataclasses.dataclass(frozen=True)
class Rejection(Match):
    """Lossless in distribution (Leviathan et al., 2023): a candidate x drawn from q survives with min(1, p(x) / q(x)).

    After a rejection the next token, or the next sibling's judge, is p's normalised excess over q, max(p - q, 0), and
    q loses the token that was refused. Drawing from all of p instead, as SPACE prints it, is not lossless. The text is
    another one than autoregressive decoding's with the same seed. Greedy decoding is the case of `Match`, and so are
    candidates that were not drawn: those of unions, and all that are chosen in every step; there the text is the same.
    """

    remark: ClassVar[str] = (
        "rejection sampling: the same distribution, but with a fixed tree another text than the seed's own"
    )
    draws: ClassVar[bool] = True

    def drafting(self, sampler: Sampler) -> Sampler:
        """Candidates are drawn from a stream of their own: the text's noise would bias them."""
        return sampler.replace(independent=sampler.sampling)

    def __call__(
        self, draft: Draft, logits: jax.Array, sampler: Sampler, seeds: jax.Array, positions: jax.Array
    ) -> Accepted:
        """Verify a draft, from the root down."""
        if draft.drawn is None:
            return super().__call__(draft, logits, sampler, seeds, positions)
        tree, rows = draft.tree, jnp.arange(len(seeds))
        chances = sampler.chances(seeds, positions, tree.max_rank)  # [B, P + 1, K]
        node, length, path = jnp.zeros_like(rows), jnp.zeros_like(rows), [jnp.zeros_like(rows)]
        rest = sampler.distribution(logits[:, 0])  # [B, V], what the next token is drawn from
        for depth in range(tree.max_depth):
            child, residual = self._choose_child(draft, rest, node, chances[:, depth])
            goes_on = (length == depth) & (child >= 0)
            node, length = jnp.where(goes_on, child, node), length + goes_on
            below = sampler.distribution(logits[rows, node])
            stays = length == depth  # stopped here; those that stopped above keep what they had
            rest = jnp.where(goes_on[:, None], below, jnp.where(stays[:, None], residual, rest))
            path.append(node)
        noise = sampler.noise(seeds, positions[rows, length][:, None], jnp.arange(logits.shape[-1]))[:, 0]
        bonus = best(jnp.log(rest) + noise)
        accepted = (jnp.stack(path, axis=1), length, node, bonus)
        return Accepted(*(x.astype(jnp.int32) for x in accepted))

    def _choose_child(
        self, draft: Draft, p: jax.Array, node: jax.Array, chances: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The child [B] that survives, or -1, and what is left of p [B, V] when none does. Siblings in turn."""
        tree, rows = draft.tree, jnp.arange(len(node))
        is_child = (tree.parent == node[:, None]) & (tree.depth > 0) & draft.valid  # [B, N]
        place = draft.drawn.place[rows, jnp.argmax(is_child, axis=1)]

        def judge(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rank, p, log_q, taken, waiting = state
            q = _normalised(log_q)
            has_rank = is_child & (tree.rank == rank)
            child = jnp.argmax(has_rank, axis=1)
            token = draft.tokens[rows, child]
            drawn = waiting & jnp.any(has_rank, axis=1) & (q[rows, token] > 0)
            survives = drawn & (chances[:, rank] * q[rows, token] < p[rows, token])
            refused = drawn & ~survives
            p = jnp.where(refused[:, None], self.residual(p, q), p)
            # As logarithms: what is left may be too small a share of q to be told from nothing.
            log_q = jnp.where(refused[:, None], log_q.at[rows, token].set(-jnp.inf), log_q)
            return rank + 1, p, log_q, jnp.where(survives, child, taken), refused

        def unsettled(state: tuple[jax.Array, ...]) -> jax.Array:
            return (state[0] < tree.max_rank) & jnp.any(state[-1])

        start = (jnp.int32(0), p, draft.drawn.log_q[rows, place], jnp.full_like(node, -1), jnp.any(is_child, axis=1))
        _, p, _, taken, _ = lax.while_loop(unsettled, judge, start)
        return taken, p

    def residual(self, p: jax.Array, q: jax.Array, share: jax.Array | float = 1.0) -> jax.Array:
        """The distribution left of a share of p [..., V] once a token drawn from q was refused."""
        excess = jnp.maximum(share * p - q, 0)
        total = jnp.sum(excess, axis=-1, keepdims=True)
        return jnp.where(total > _TINY, excess / jnp.maximum(total, _TINY), p)  # p = q refuses nothing but by rounding


@dataclasses.dataclass(frozen=True)
class Block(Rejection):
    """Lossless in distribution (Sun et al., 2024, Algorithm 2): a drawn chain is judged as a whole.

    Token by token a candidate that the base finds more probable than the drafter did wastes the excess; here it carries
    over to the next ones, c_i = min(1, c_i-1 p(x_i) / q(x_i)). The longest prefix survives that wins a draw of its own:
    it wins with h_i = e / (e + 1 - c_i), where e is the sum of max(0, c_i p - q) over the next tokens. The token behind
    it is drawn from that excess, normalised. Of all rules that keep the distribution and see no further this accepts
    most. At the end of a chain q is 0: h_i is c_i, and the token behind it is drawn from p.
    """

    remark: ClassVar[str] = "block verification: another text than the seed's own, of the same distribution"
    chains: ClassVar[bool] = True

    def drafting_seeds(self, seeds: jax.Array, position: jax.Array) -> jax.Array:
        """Others for every step: candidates and chances behind the end of the path have taken part in finding it."""
        return step_seeds(seeds, position)

    def __call__(
        self, draft: Draft, logits: jax.Array, sampler: Sampler, seeds: jax.Array, positions: jax.Array
    ) -> Accepted:
        """Verify a draft, from the root down to the end of the chain: a prefix may win behind one that has not."""
        if sampler.sampling and (draft.drawn is None or draft.tree.max_rank > 1):
            raise ValueError("block verification judges drawn chains")
        if draft.drawn is None:
            return super().__call__(draft, logits, sampler, seeds, positions)
        tree, rows = draft.tree, jnp.arange(len(seeds))
        chances = sampler.chances(seeds, positions[:, :1], tree.max_depth)[:, 0]  # [B, P]
        node, length, carried = jnp.zeros_like(rows), jnp.zeros_like(rows), jnp.ones(len(rows))
        child, p, q = self._next(draft, logits, sampler, node)
        remaining, path = self.residual(p, q), [node]
        for depth in range(tree.max_depth):
            continues, token = child >= 0, draft.tokens[rows, child]
            node = jnp.where(continues, child, node)
            carried = jnp.minimum(1.0, carried * p[rows, token] / jnp.maximum(q[rows, token], _TINY))
            child, p, q = self._next(draft, logits, sampler, node)
            child = jnp.where(continues, child, -1)
            excess = jnp.sum(jnp.maximum(carried[:, None] * p - q, 0), axis=-1)
            wins = chances[:, depth] < jnp.where(carried < 1, excess / (excess + 1 - carried), 1.0)
            wins &= continues
            length = jnp.where(wins, depth + 1, length)
            remaining = jnp.where(wins[:, None], self.residual(p, q, carried[:, None]), remaining)
            path.append(node)
        noise = sampler.noise(seeds, positions[rows, length][:, None], jnp.arange(logits.shape[-1]))[:, 0]
        bonus = best(jnp.log(remaining) + noise)
        until_end = jnp.minimum(jnp.arange(tree.max_depth + 1), length[:, None])
        path = jnp.take_along_axis(jnp.stack(path, axis=1), until_end, axis=1)
        accepted = (path, length, path[:, -1], bonus)
        return Accepted(*(x.astype(jnp.int32) for x in accepted))

    def _next(
        self, draft: Draft, logits: jax.Array, sampler: Sampler, node: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The candidate below a node [B], -1 for none; p and q of the token there [B, V], a q of 0 without one."""
        rows = jnp.arange(len(node))
        is_child = (draft.tree.parent == node[:, None]) & (draft.tree.depth > 0) & draft.valid  # [B, N]
        child = jnp.argmax(is_child, axis=1)
        q = _normalised(draft.drawn.log_q[rows, draft.drawn.place[rows, child]])
        there = jnp.any(is_child, axis=1) & (q[rows, draft.tokens[rows, child]] > 0)
        p = sampler.distribution(logits[rows, node])
        return jnp.where(there, child, -1), p, jnp.where(there[:, None], q, 0.0)


@dataclasses.dataclass(frozen=True)
class Typical(Acceptance):
    """Lossy: a candidate survives if the base finds it plausible (Medusa 2.3.1; PPD 4.5.2).

    p(candidate) > min(epsilon, delta * exp(-entropy)); the base's own tokens are greedy; the longest surviving path
    wins, and of several the likeliest, as in Medusa's released code. The defaults are that code's; PPD gives none. At
    temperature 0 nothing but the best token is plausible: greedy decoding is the case of `Match`.

    Attributes:
      epsilon: largest threshold, a probability.
      delta: factor of the entropy-dependent threshold.
    """

    lossless: ClassVar[bool] = False
    remark: ClassVar[str] = "typical acceptance: the text may differ from the base's own"

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and self.delta > 0):
            raise UserError(f"epsilon and delta must be positive, got {self.epsilon} and {self.delta}")

    def drafting(self, sampler: Sampler) -> Sampler:
        """The most likely candidates, whatever the temperature (PPD 5.1): no noise speaks for what is plausible."""
        return sampler.replace(active=(False, False, False, False))

    def choose(self, logits: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
        """The base's own token [...] from logits [..., V]: greedy, whatever the temperature."""
        return best(logits)

    def __call__(
        self, draft: Draft, logits: jax.Array, sampler: Sampler, seeds: jax.Array, positions: jax.Array
    ) -> Accepted:
        """Verify a draft."""
        tree, targets = draft.tree, self.choose(logits, jnp.zeros(()), sampler)
        if not sampler.sampling:
            return follow(draft, targets)
        log_p = jax.nn.log_softmax(sampler.filtered(logits))
        entropy = -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0), axis=-1)  # [B, N]
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        at_parent = jnp.take_along_axis(log_p, tree.parent[..., None], axis=1)  # [B, N, V]
        of_node = jnp.take_along_axis(at_parent, draft.tokens[..., None], axis=2)[..., 0]  # [B, N]
        plausible = jnp.exp(of_node) > jnp.take_along_axis(threshold, tree.parent, axis=1)
        survives = sampler.pick(plausible, right(draft, targets))
        return longest(tree, draft.valid & survives, targets, of_node)


AcceptanceName = Literal["match", "rejection", "block", "typical"]
ACCEPTANCES: dict[str, type[Acceptance]] = {"match": Match, "rejection": Rejection, "block": Block, "typical": Typical}


def _normalised(log_q: jax.Array) -> jax.Array:
    """Probabilities [..., V] from logarithms up to a constant; all 0 where nothing is left."""
    total = jax.nn.logsumexp(log_q, axis=-1, keepdims=True)
    return jnp.where(total > -jnp.inf, jnp.exp(log_q - total), 0.0)


def _per_node(noise: jax.Array, tree: Tree) -> jax.Array:
    """Noise of the position each node predicts: noise [B, P + 1, V] per depth to [B, N, V]."""
    return noise if noise.shape[1] == 1 else jnp.take_along_axis(noise, tree.depth[..., None], axis=1)
