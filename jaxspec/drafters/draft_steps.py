"""PPD inside a draft model (Chen, 2024, section 6.4.2): the draft model decodes its own draft with probes.

A draft model is a base, so a method with probes can draft for it. Its chain is token for token the one without probes,
in fewer passes: each pass verifies the guesses that the probes of the pass before have made.

    observe   |t0 t1 t2| r ? ?          the text, the newest token, and its probes: the first candidate and two guesses
    pass 1     t0 t1 t2  r | a b c ...  the candidate, the guesses, and probes behind each: b is right, c is not
    pass 2     t0 t1 t2  r  a b | d ... and so on, until the chain is as long as is wanted
"""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import Draft, DraftContext, Drawn, Offer, PyTree, rank
from jaxspec.decoding.method import Facts, ReadChunk
from jaxspec.decoding.tree import Tree, owned_probes
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError
from jaxspec.methods.draft_model import DraftModel
from jaxspec.methods.ppd import PPD
from jaxspec.methods.probes import ProbeMethod
from jaxspec.model.base import Base
from jaxspec.model.cache import Cache, commit
from jaxspec.model.rows import run_rows


@flax.struct.dataclass
class Chain:
    """An unfinished chain, with its siblings.

    Attributes:
      cache: of the draft model, with the candidates that it has verified.
      count: [B] int32, levels that are known.
      probes: what the inner method remembers of the last verified token's.
      tokens: [B, n + m + 1, K] int32, by level, the chain's own first; beyond the count garbage.
      log_p: [B, n + m + 1, K] float32, as `rank` has it.
      log_q: [B, n + m + 1, V] float32, what they were drawn from, where the sampler is independent, else None.
      passes: [B] int32.
    """

    cache: Cache
    count: jax.Array
    probes: PyTree
    tokens: jax.Array
    log_p: jax.Array
    log_q: jax.Array | None
    passes: jax.Array

    def write(self, at: jax.Array, ranked: tuple[jax.Array, jax.Array, jax.Array | None]) -> Chain:
        """The chain with new levels from `at` [B] on, as `rank` returns them."""
        put = jax.vmap(lambda buffer, new, at: lax.dynamic_update_slice(buffer, new, (at, 0)))
        levels = (self.tokens, self.log_p, self.log_q)
        tokens, log_p, log_q = (x if x is None else put(x, new, at) for x, new in zip(levels, ranked, strict=True))
        return self.replace(tokens=tokens, log_p=log_p, log_q=log_q)

    def follows(self, least: float) -> jax.Array:
        """[B, n + m + 1] bool, levels behind a chain that is more probable than `least`, a logarithm."""
        before = jnp.cumsum(self.log_p[..., 0], axis=1) - self.log_p[..., 0]
        return before > least


@dataclasses.dataclass(frozen=True)
class SteppedDraftModel(DraftModel):
    """A draft model that drafts a chain in steps of a method with probes; see `DraftModel`.

    Attributes:
      inner: that method, whose pytree, as `Method.prepare` returned it, is the entry `inner`.
    """

    inner: ProbeMethod = PPD()

    def as_draft_model(self, trainable: PyTree, base: Base) -> Base:
        """The draft model, without what drafts for it."""
        return super().as_draft_model({name: part for name, part in trainable.items() if name != "inner"}, base)

    def facts(self, config: ModelConfig) -> Facts:
        """The facts of a draft model, whose fixed drafts are chains."""
        return dataclasses.replace(super().facts(config), chain_only=True)

    def prepare(self, trainable: PyTree, base: Base) -> PyTree:
        """The pytrees of the draft model and of the method inside it."""
        params = super().prepare({name: part for name, part in trainable.items() if name != "inner"}, base)
        return params | {"inner": self.inner.prepare(trainable["inner"], self.as_draft_model(params, base))}

    def init_state(self, base: Base, batch: int, capacity: int) -> PyTree:
        """The draft model's state with the newest token's probes, and room for a draft and its last pass's rows."""
        state = super().init_state(base, batch, capacity + self.length + self.inner.distances + 1)
        own = base.replace(decoder=base.decoder.clone(config=self.config(base)))
        return state | {"probes": self.inner.init_state(own, batch, capacity)}

    def observe(self, context: DraftContext, chunk: ReadChunk, method_state: PyTree) -> PyTree:
        """Read what the base has read, and the token after it with probes behind it."""
        model = self.as_draft_model(context.trainable, context.base)
        tree, cache = _chain(chunk.tokens.shape[1], chunk.length[:, None], self.inner.distances), method_state["cache"]
        states, rows = self._run(context, model, _draft(tree, self.readable(model, chunk.tokens)), cache, chunk.first)
        last = states[model.decoder.config.num_layers]
        new = {
            "newest": last[jnp.arange(len(chunk.length)), chunk.length],
            "probes": self.inner.behind(model, tree, states, chunk.length),
        }
        kept = chunk.updated(new, {name: method_state[name] for name in new})
        return {"cache": commit(cache, rows, chunk.first)} | kept

    def _run(
        self, context: DraftContext, model: Base, draft: Draft, cache: Cache, lengths: jax.Array
    ) -> tuple[dict[int, jax.Array], Cache]:
        """Run a chain with its probes. Returns states [B, R, D] by layer, and the chain's own keys and values."""
        inner = context.replace(trainable=context.trainable["inner"], base=model, position=lengths)
        rows = self.inner.rows(inner, draft, {})
        states, kv = run_rows(model, rows, cache, lengths[:, None, None])
        own = jax.tree.map(lambda x: x[:, :, : draft.tokens.shape[1]], kv)
        return {layer: x[:, 0] for layer, x in states.items()}, own

    def offer(self, context: DraftContext, method_state: PyTree) -> Offer:
        """A chain and what is ranked beside it, in as few passes as the probes allow."""
        n, m = min(context.depth, self.length), self.inner.distances
        least = -math.inf if context.fixed else math.log(self.confidence)
        model = self.as_draft_model(context.trainable, context.base)
        position, B, last = context.position, len(context.root), model.decoder.config.num_layers
        tree = _chain(m + 1, jnp.broadcast_to(jnp.arange(m + 1), (B, m + 1)), m)

        def ranked(hidden: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
            positions = first[:, None] + jnp.arange(hidden.shape[1])
            return rank(context, self.draft_logits(model, context.base, hidden), positions)

        def guesses(probes: PyTree, at: jax.Array) -> tuple[jax.Array, jax.Array]:
            own = {"trainable": context.trainable["inner"], "base": model, "position": at, "width": 1, "depth": m}
            offer = self.inner.offer(context.replace(**own), probes)
            return offer.tokens[..., 0], offer.known[..., 0]

        def active(chain: Chain) -> jax.Array:
            at = jnp.minimum(chain.count, n)[:, None]
            return context.active & (chain.count < n) & jnp.take_along_axis(chain.follows(least), at, axis=1)[:, 0]

        def verify(chain: Chain) -> Chain:
            going, at = active(chain), jnp.minimum(chain.count, n)
            newest = jnp.take_along_axis(chain.tokens[..., 0], at[:, None] - 1, axis=1)
            guessed, known = guesses(chain.probes, position + at)
            draft = _draft(tree, jnp.concatenate([newest, guessed], axis=1))
            states, rows = self._run(context, model, draft, chain.cache, position + at)
            levels = ranked(states[last][:, : m + 1], position + at + 1)
            right = known & (guessed == levels[0][:, :m, 0])
            taken = jnp.sum(jnp.cumprod(right, axis=1, dtype=jnp.int32), axis=1)
            return chain.write(at, levels).replace(
                cache=commit(chain.cache, rows, position + at),
                count=jnp.where(going, chain.count + taken + 1, chain.count),
                probes=self.inner.behind(model, tree, states, taken),
                passes=chain.passes + jnp.any(going),
            )

        first = ranked(method_state["newest"][:, None], position + 1)
        empty = (None if x is None else jnp.zeros((B, n + m + 1, x.shape[-1]), x.dtype) for x in first)
        one = jnp.ones(B, jnp.int32)
        chain = Chain(method_state["cache"], one, method_state["probes"], *empty, one)
        chain = chain.write(jnp.zeros(B, jnp.int32), first)
        chain = lax.while_loop(lambda chain: jnp.any(active(chain)), verify, chain)
        tokens, log_p = chain.tokens[:, :n], chain.log_p[:, :n]
        known = (jnp.arange(n) < chain.count[:, None]) & chain.follows(least)[:, :n]
        drawn = None
        if chain.log_q is not None:
            drawn = Drawn(chain.log_q[:, :n], jnp.broadcast_to(jnp.arange(n)[:, None], tokens.shape))
        return Offer(tokens, known[..., None], log_p, jnp.zeros_like(tokens), drawn, chain.passes)


def _draft(tree: Tree, tokens: jax.Array) -> Draft:
    return Draft(tree, tokens, tree.live, jnp.zeros_like(tokens))


def _chain(length: int, owners: jax.Array, distances: int) -> Tree:
    """A batch of chains of so many nodes, the first one included, with all probes behind `owners` [B, O]."""
    (B, count), nodes = owners.shape, jnp.arange(length)

    def every(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (B, *x.shape))

    return Tree(
        parent=every(jnp.maximum(nodes - 1, 0)),
        depth=every(nodes),
        rank=every(jnp.zeros_like(nodes)),
        live=every(nodes >= 0),
        ancestors=every(jnp.tri(length, dtype=bool)),
        probe_live=jnp.ones((B, count * distances), bool),
        next_state=every(jnp.zeros_like(nodes)),
        max_depth=length - 1,
        max_rank=1,
        inner=(),
        **owned_probes(owners, distances, length),
    )


def with_steps(source: Source, adapter: Adapter) -> Source:
    """A draft model that drafts in steps of an adapter's method, which must be one with probes."""
    if not isinstance(adapter.method, ProbeMethod):
        raise UserError(f"draft-adapter: {adapter.method.name} has no probes; PPD has, and every method like it")
    settings = {field.name: getattr(source.method, field.name) for field in dataclasses.fields(DraftModel)}
    method = SteppedDraftModel(**settings, inner=adapter.method)
    weights = "+".join(filter(None, (source.weights, adapter.digest)))
    return dataclasses.replace(
        source, method=method, trainable=source.trainable | {"inner": adapter.trainable}, weights=weights
    )
