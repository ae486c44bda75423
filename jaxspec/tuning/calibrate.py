"""Fit what makes a source's scores chances to recorded offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxspec.training.calibration import BINS_PER_NAT, NATS, fit
from jaxspec.tuning.record import Recording


def fit_calibration(
    recordings: Sequence[Recording], source: int, otherwise: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The a and b of every distance, [M][2] (see `calibrated`), for one of the recorded sources.

    Only candidates count whose parents are right.

    Args:
      recordings: of the base's own answers.
      source: the number of the source among those recorded.
      otherwise: [M][2], for distances with too few candidates to tell.
    """
    bins = NATS * BINS_PER_NAT
    tried, right = np.zeros((2, len(otherwise), bins), np.int64)
    for recording in recordings:
        for d, (log_p, hits) in enumerate(_outcomes(recording, source)):
            place = np.floor(-log_p * BINS_PER_NAT)
            inside = (place >= 0) & (place < bins)
            np.add.at(tried[d], place[inside].astype(int), 1)
            np.add.at(right[d], place[inside & hits].astype(int), 1)
    return fit(tried, right, otherwise)


def _outcomes(recording: Recording, source: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """By distance: the log-probabilities of candidates whose parents are right, and whether they are."""
    offer = recording.offers[source]
    T, M, _ = offer.tokens.shape
    known = np.broadcast_to(offer.known, offer.tokens.shape)
    answer = np.concatenate([recording.answer, np.full(M + 1, -1)])
    reached, above = np.ones(T, bool), np.zeros(T, int)  # whether all tokens so far are there; the place of the last
    for d in range(M):
        wanted = answer[1 + d : 1 + d + T]
        here = known[:, d] & (reached & (wanted >= 0))[:, None]
        if offer.parent is not None and d:
            here &= offer.parent[:, d] == above[:, None]
        hits = here & (offer.tokens[:, d] == wanted[:, None])
        yield offer.log_p[:, d][here], hits[here]
        reached, above = hits.any(axis=1), hits.argmax(axis=1)
