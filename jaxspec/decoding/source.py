"""The device-side part of a source."""

from __future__ import annotations

import flax.struct
import jax

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Method
from jaxspec.model.base import DraftVocabulary


@flax.struct.dataclass
class DeviceSource:
    """The device-side part of a source, a pytree in the jitted loop; `drafters.Source` holds files, weights and text.

    Attributes:
      trainable: the adapter's pytree, after `Method.prepare`; empty for methods without one.
      calibration: [2, M, 2] float32, what makes scores chances, in greedy decoding and in sampling; see `calibrated`.
      method: the static settings.
      draft_vocabulary: the tokens that may be drafted; None: all.
    """

    trainable: PyTree
    calibration: jax.Array
    method: Method = flax.struct.field(pytree_node=False)
    draft_vocabulary: DraftVocabulary | None = None
