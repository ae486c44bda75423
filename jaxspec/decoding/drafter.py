"""The device-side part of a drafter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import Draft, DraftContext, Offer, PyTree, calibrated, run_if
from jaxspec.decoding.method import Method, ReadChunk
from jaxspec.decoding.shape import Best, StaticTree
from jaxspec.decoding.source import DeviceSource
from jaxspec.model.base import Base
from jaxspec.model.rows import Rows


@flax.struct.dataclass
class DeviceDrafter:
    """The device-side part of a drafter, a pytree in the jitted loop; `drafters.Drafter` loads it on the host.

    Attributes:
      sources: what offers candidates; none in autoregressive decoding.
      shape: what makes a draft of them.
    """

    sources: tuple[DeviceSource, ...]
    shape: StaticTree | Best

    def taps(self, layers: int) -> tuple[int, ...]:
        """Before which layers of a base of so many the sources read hidden states."""
        return tuple(sorted({layer for source in self.sources for layer in source.method.taps(layers)}))

    def rows(self, base: Base, draft: Draft, lengths: jax.Array, states: Sequence[PyTree]) -> Rows:
        """The rows of a step: the nodes, and what the source adds that adds rows, from what it remembers."""
        each = zip(self.sources, states, strict=True)
        adding = [(source.method, source.trainable, state) for source, state in each if source.method.adds_rows]
        method, trainable, state = adding[0] if adding else (Method(), {}, {})
        rows = method.rows(trainable, base, draft, lengths, state)
        return dataclasses.replace(rows, taps=(*rows.taps, *self.taps(base.decoder.config.num_layers)))

    def observe(self, contexts: Sequence[DraftContext], chunk: ReadChunk, states: Sequence[PyTree]) -> list[PyTree]:
        """What every source remembers once it has seen what the base has read."""
        each = zip(self.sources, contexts, states, strict=True)
        return [source.method.observe(context, chunk, state) for source, context, state in each]

    def offer(self, contexts: Sequence[DraftContext], states: Sequence[PyTree]) -> list[Offer]:
        """What every source says may come."""
        offers = []
        for source, context, state in zip(self.sources, contexts, states, strict=True):
            greedy, sampled = source.calibration[:, None]
            calibration = context.sampler.pick(sampled, greedy)
            offer = functools.partial(source.method.offer, context, state)
            found = run_if(jnp.any(context.active), offer) if source.method.own_passes else offer()
            offers.append(calibrated(found, calibration))
        return offers
