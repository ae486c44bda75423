"""The device-side part of a source, and the calibrations that make its scores chances."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Method
from jaxspec.decoding.sampling import Sampler
from jaxspec.model.base import DraftVocabulary


@flax.struct.dataclass
class Calibrations:
    """What makes the scores of a source chances, by the temperature that it was fitted at; see `calibrated`.

    Attributes:
      temperatures: [T] float32, ascending; the first is 0, greedy decoding.
      tables: [T, M, 2] float32, a and b by distance.
    """

    temperatures: jax.Array
    tables: jax.Array

    def at(self, sampler: Sampler) -> jax.Array:
        """The table for a sampler's temperature, [1, M, 2], or for those of its rows, [B, M, 2].

        Between the temperatures above 0 it is interpolated linearly, outside of them it is the nearest one's. Greedy
        tokens take the first table, others only if it is the only one: their scores include noise, greedy ones do not.
        """
        greedy, *sampled = self.tables[:, None]
        if not sampled:
            return greedy
        known, (table, *above) = self.temperatures[1:], sampled
        temperature = jnp.reshape(sampler.temperature, (-1, 1, 1))
        for low, high, upper in zip(known[:-1], known[1:], above, strict=True):
            share = jnp.clip((temperature - low) / (high - low), 0, 1)
            table = (1 - share) * table + share * upper
        return sampler.pick(table, greedy)


@flax.struct.dataclass
class DeviceSource:
    """The device-side part of a source, a pytree in the jitted loop; `drafters.Source` holds files, weights and text.

    Attributes:
      trainable: the adapter's pytree, after `Method.prepare`; empty for methods without one.
      calibrations: what makes its scores chances.
      method: the static settings.
      draft_vocabulary: the tokens that may be drafted; None: all.
    """

    trainable: PyTree
    calibrations: Calibrations
    method: Method = flax.struct.field(pytree_node=False)
    draft_vocabulary: DraftVocabulary | None = None
