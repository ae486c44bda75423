"""What probes cost and what becomes of them: step times side by side, and pseudo states against real ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.draft import PyTree
from jaxspec.drafting.method import Batch
from jaxspec.methods.hidden_transfer import HiddenTransfer
from jaxspec.model.base import Base
from jaxspec.model.rows import read_layers
from jaxspec.training.batches import insertion_points, make_batch
from jaxspec.training.data import Answer


@dataclasses.dataclass(frozen=True)
class _Watched(HiddenTransfer):
    """Hidden Transfer whose states are watched after each of the last layers."""

    watched: int = 1

    @property
    def exits(self) -> int:
        """How many."""
        return self.watched


@functools.partial(jax.jit, static_argnames="method")
def _cosines(method: _Watched, trainable: PyTree, base: Base, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sums [watched] of the cosine between the last step's pseudo states and the real ones, and how many."""
    i, layers = method.distances, base.decoder.config.num_layers
    _, exits = method.probe(trainable, base, batch, i)
    first = layers - method.watched + 1
    final, _, read = read_layers(base, batch.tokens, tuple(range(first, layers)))
    at = batch.points + i  # the token that a pseudo state stands for
    counted = (batch.points >= 0) & (at < batch.lengths[:, None])
    rows, at = jnp.arange(at.shape[0])[:, None], jnp.minimum(at, batch.tokens.shape[1] - 1)
    sums = []
    for pseudo, real in zip(exits, [*read.values(), final], strict=True):
        a, b = pseudo[:, :, -1, 0], real[rows, at]
        cosine = jnp.sum(a * b, axis=-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))
        sums.append(jnp.sum(cosine * counted))
    return jnp.stack(sums), jnp.sum(counted)


def similarity(
    method: HiddenTransfer, trainable: PyTree, base: Base, answers: Sequence[Answer]
) -> list[dict[int, float]]:
    """Cosine similarity of pseudo to real hidden states through the layers (Hidden Transfer Figure 4).

    Args:
      method: settings.
      trainable: its maps.
      base: the frozen decoder.
      answers: held-out answers.

    Returns:
      Per step i, {layers passed: mean similarity}, from the first layer that the pseudo state passes on.
    """
    length = max(len(a.prompt_tokens) + len(a.answer_tokens) for a in answers)
    curves = []
    for i, layer in enumerate(method.layers, 1):
        settings = dataclasses.asdict(method) | {"distances": i, "layers": method.layers[:i]}
        watched = _Watched(**settings, watched=base.decoder.config.num_layers - layer)
        total, count = 0.0, 0.0
        for answer in answers:
            batch = make_batch([answer], [insertion_points(answer, length)], length, length)
            sums, counted = _cosines(watched, trainable, base, batch)
            total, count = total + np.asarray(sums), count + float(counted)
        curves.append({layer + 1 + n: float(value) for n, value in enumerate(total / count)})
    return curves
