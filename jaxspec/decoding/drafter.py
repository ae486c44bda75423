"""The device-side part of a drafter: sources, and the shape that makes drafts of their offers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import Draft, DraftContext, Offer, PyTree, calibrated, run_if
from jaxspec.decoding.method import Facts, ReadChunk, node_rows
from jaxspec.decoding.shape import Best, StaticTree
from jaxspec.decoding.source import DeviceSource
from jaxspec.model.base import Base
from jaxspec.model.rows import Rows

DRAFTING = "drafting"  # scope of operations, which compiled programs name
FEW_LAYERS = 8  # run one after the other take no longer than what a condition costs where rows are free


@flax.struct.dataclass
class DeviceDrafter:
    """The device-side part of a drafter, a pytree in the jitted loop; `drafters.Drafter` loads it on the host.

    Attributes:
      sources: what offers candidates; none in autoregressive decoding.
      shape: what makes a draft of them.
      free_rows: so many nodes, of all texts together, take a pass no longer than a single one: a condition that skips
        some of them, or a few layers, costs more than it spares (static). On a GPU it splits the graph of kernels.
    """

    sources: tuple[DeviceSource, ...]
    shape: StaticTree | Best
    free_rows: int = flax.struct.field(pytree_node=False, default=0)

    def facts(self, base: Base) -> list[Facts]:
        """The facts of every source on its base."""
        return [source.method.facts(base.decoder.config) for source in self.sources]

    def taps(self, base: Base) -> tuple[int, ...]:
        """Layers before which the sources read hidden states."""
        return tuple(sorted({layer for facts in self.facts(base) for layer in facts.taps}))

    def rows(
        self,
        base: Base,
        contexts: Sequence[DraftContext],
        draft: Draft,
        lengths: jax.Array,
        states: Sequence[PyTree],
    ) -> Rows:
        """The rows of a step: the nodes, and what the one source adds that adds rows."""
        rows = node_rows(base, draft, lengths)
        for source, facts, context, state in zip(self.sources, self.facts(base), contexts, states, strict=True):
            if facts.adds_rows:
                rows = source.method.rows(context, draft, state)
        return dataclasses.replace(rows, taps=(*rows.taps, *self.taps(base)))

    def reads_late(self, base: Base) -> list[bool]:
        """Which sources may read tokens late (`Facts.reads_late`): none where drafts never rest, or rows are free."""
        may_wait = self.shape.costs is not None and not self.free_rows
        return [facts.reads_late and may_wait for facts in self.facts(base)]

    def observe(
        self,
        contexts: Sequence[DraftContext],
        chunk: ReadChunk,
        states: Sequence[PyTree],
        chosen: Sequence[bool] | None = None,
    ) -> list[PyTree]:
        """The method state of every source after the base has read a chunk, which only the chosen ones observe."""
        chosen = [True] * len(self.sources) if chosen is None else chosen
        sources = zip(self.sources, contexts, states, chosen, strict=True)
        return [
            source.method.observe(context, chunk, state) if observes else state
            for source, context, state, observes in sources
        ]

    def follows_prediction(self, base: Base) -> bool:
        """Whether any source drafts from a predicted text."""
        return any(facts.follows_prediction for facts in self.facts(base))

    def expect(self, base: Base, states: Sequence[PyTree], predicted: jax.Array) -> list[PyTree]:
        """The method states of answers that are predicted (see `Method.expect`)."""
        each = zip(self.sources, self.facts(base), states, strict=True)
        return [
            source.method.expect(state, predicted) if facts.follows_prediction else state
            for source, facts, state in each
        ]

    def offer(self, contexts: Sequence[DraftContext], states: Sequence[PyTree]) -> list[Offer]:
        """The candidates of every source."""
        offers = []
        for source, context, state in zip(self.sources, contexts, states, strict=True):
            make = functools.partial(source.method.offer, context, state)
            facts = source.method.facts(context.base.decoder.config)
            may_be_skipped = facts.takes_time and len(context.active) > context.free_rows
            with jax.named_scope(DRAFTING):
                offer = run_if(jnp.any(context.active), make) if may_be_skipped else make()
                offers.append(calibrated(offer, source.calibrations.at(context.sampler)))
        return offers
