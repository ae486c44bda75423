"""Data of the decoding loop: constants, and the state that changes from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.draft import Draft, DraftContext, Offer, PyTree
from jaxspec.decoding.drafter import FEW_LAYERS, DeviceDrafter
from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.pace import Pace
from jaxspec.decoding.penalties import Seen
from jaxspec.decoding.sampling import Sampler
from jaxspec.decoding.scores import Scores
from jaxspec.decoding.shape import Best
from jaxspec.decoding.stats import Stats
from jaxspec.decoding.tree import Tree
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache
from jaxspec.parallel.sharding import divided


@flax.struct.dataclass
class Decoding:
    """Constants of a generation; always an argument, never closed over.

    Attributes:
      base: the frozen decoder.
      drafter: sources and the shape of their drafts.
      sampler: how tokens are drawn.
      eos: [E] int32, ids that end a text.
      acceptance: which candidates survive (static); chooses the first token too.
      drafts: [B] bool, rows that draft; None: all.
      scored: [B] bool, rows whose log-probabilities are kept; None: the state has no room for any.
      least: [B] int32, tokens that come before any that ends a text; None: 0.
      endless: [B] bool, rows that no token ends; None: none.
    """

    base: Base
    drafter: DeviceDrafter
    sampler: Sampler
    eos: jax.Array
    acceptance: Acceptance = flax.struct.field(pytree_node=False)
    drafts: jax.Array | None = None
    scored: jax.Array | None = None
    least: jax.Array | None = None
    endless: jax.Array | None = None

    def admitted(self, logits: jax.Array, emitted: jax.Array) -> jax.Array:
        """Logits [B, N, V] without the tokens that end a text, where too few tokens [B, N] come before."""
        if self.least is None:
            return logits
        early = emitted < self.least[:, None]
        return jnp.where(early[..., None] & jnp.isin(jnp.arange(logits.shape[-1]), self.eos), -jnp.inf, logits)

    def ends(self, tokens: jax.Array) -> jax.Array:
        """Whether tokens [B, X] end the texts of their rows."""
        ends = jnp.isin(tokens, self.eos)
        return ends if self.endless is None else ends & ~self.endless[:, None]

    @property
    def checks_logits(self) -> bool:
        """Whether rows end where logits are not finite: float16 overflows beyond 65,504, the other dtypes hardly do."""
        return self.base.dtype == jnp.float16

    @property
    def costs(self) -> jax.Array | None:
        """[B or 1, K] float32, of a step of each size; None where there is but one."""
        if self.drafter.shape.costs is None:
            return None
        greedy, sampled = self.drafter.shape.costs[:, None]
        return self.sampler.pick(sampled, greedy)

    def wanted(self, done: jax.Array) -> jax.Array:
        """[B] bool, rows that may have drafts and are not done [B]."""
        return ~done if self.drafts is None else self.drafts & ~done

    def rests(self, pace: Pace) -> jax.Array:
        """Bool scalar, whether methods whose drafts take time have none for the next step."""
        return pace.rests(pace.trial(self.costs, self.drafter.shape.trial_size))

    def first_token(self, logits: jax.Array, seeds: jax.Array, lengths: jax.Array, seen: Seen | None) -> jax.Array:
        """The token [B] after prompts of some lengths [B], from the base's logits there [B, V]."""
        noise = self.sampler.noise(seeds, lengths[:, None], jnp.arange(self.base.vocab_size))[:, 0]
        if seen is not None:
            logits = self.sampler.penalties(logits[:, None], seen, seen.counts[:, None])[:, 0]
        logits = self.admitted(logits[:, None], jnp.zeros((len(logits), 1), jnp.int32))[:, 0]
        return self.acceptance.choose(logits, noise, self.sampler)

    def offers(
        self, contexts: Sequence[DraftContext], states: Sequence[PyTree], done: jax.Array, pace: Pace | None
    ) -> list[Offer]:
        """The candidates of every source, in rows that draft and are not done [B].

        Methods whose drafts take time, by weights or passes of their own, rest where no draft has paid of late. They
        are tried again now and then, since only their offers show whether drafts pay; more rarely where trials are
        dear, and drafts have brought little. Probes offer nothing after a step without them.
        """
        if self.drafts is None and pace is None:
            return self.drafter.offer(contexts, states)
        wanted, resting = self.wanted(done), []
        for context, facts in zip(contexts, self.drafter.facts(self.base), strict=True):
            rests = False
            if pace is not None and facts.takes_time:
                rests = pace.blind if facts.adds_rows else self.rests(pace)
            resting.append(context.replace(active=wanted & ~jnp.asarray(rests)))
        offers = self.drafter.offer(resting, states)
        return [o.replace(known=o.known & c.active[:, None, None]) for o, c in zip(offers, resting, strict=True)]

    def draft_contexts(
        self, trees: Sequence[Tree], seeds: jax.Array, root: jax.Array, position: jax.Array, cache: Cache
    ) -> list[DraftContext]:
        """The context of every source; none without sources, whose tree is a root alone."""
        shape, sampler = self.drafter.shape, self.acceptance.drafting(self.sampler)
        fixed = not isinstance(shape, Best)
        if not fixed:  # candidates chosen among those drawn are no longer drawn: they are point masses
            sampler = sampler.replace(independent=False)
        return [
            DraftContext(
                trainable=source.trainable,
                base=self.base.replace(draft_vocabulary=source.draft_vocabulary),
                tree=tree,
                sampler=sampler,
                seeds=self.acceptance.drafting_seeds(seeds, position),
                root=root,
                position=position,
                active=jnp.ones(len(root), bool),
                width=shape.width,
                depth=shape.depth,
                fixed=fixed,
                cache=cache,
                free_rows=self.drafter.free_rows if facts.own_layers <= FEW_LAYERS else 0,
            )
            for source, facts, tree in zip(self.drafter.sources, self.drafter.facts(self.base), trees, strict=False)
        ]


@flax.struct.dataclass
class DecodeState:
    """Everything that changes from step to step; donated to the loop.

    Attributes:
      cache: keys and values of all tokens but the newest; capacity S.
      lengths: [B] int32, valid slots of the cache: the position of the root.
      tokens: [B, W] int32, tokens emitted, the prompt not included; W leaves room for one step too many.
      drafted_by: [B, W] int32, the sources that offered a token, a bit each as in `Draft.sources`; 0 where the base
        emitted it itself.
      counts: [B] int32, tokens emitted.
      limits: [B] int32, tokens to emit at most.
      done: [B] bool: the limit or an end-of-text token was reached.
      draft: what the next step verifies.
      method_states: what each source remembers.
      unread: tokens that some sources have still to read; None where every source reads them at once.
      seeds: [B] uint32, of sampling.
      stats: counters.
      pace: how fast rows have been of late; None where steps have but one size.
      scores: log-probabilities of what was emitted, [B, W]; None where nobody may ask for them.
      finite: [B] bool: all logits that tokens were chosen by were finite; None where they are not checked.
      seen: the tokens of prompt and answer; None where the sampler has no penalties for them.
    """

    cache: Cache
    lengths: jax.Array
    tokens: jax.Array
    drafted_by: jax.Array
    counts: jax.Array
    limits: jax.Array
    done: jax.Array
    draft: Draft
    method_states: list[PyTree]
    unread: ReadChunk | None
    seeds: jax.Array
    stats: Stats
    pace: Pace | None
    scores: Scores | None = None
    finite: jax.Array | None = None
    seen: Seen | None = None

    @property
    def text_lengths(self) -> jax.Array:
        """[B] int32, tokens of prompt and answer together, once the answer is as long as its limit."""
        return self.lengths - self.counts + 1 + self.limits


def state_names(x: jax.Array) -> tuple[str, ...]:
    """Logical axes of a leaf of the state: batch, and heads for caches, the only leaves of four dimensions."""
    return ("batch", "heads") if x.ndim == 4 else ("batch",)


def divided_state(state: PyTree) -> PyTree:
    """The state, each leaf laid over the mesh."""
    return jax.tree.map(lambda x: divided(x, *state_names(x)), state)
