"""Fit what makes a source's scores chances to recorded offers."""

from __future__ import annotations

from collections.abc import Sequence

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
        for d, (reached, here, hits, log_p) in enumerate(recording.along_answer(source)):
            place = np.floor(-log_p * BINS_PER_NAT)
            counts = reached[:, None] & here & (place >= 0) & (place < bins)
            np.add.at(tried[d], place[counts].astype(int), 1)
            np.add.at(right[d], place[counts & hits].astype(int), 1)
    return fit(tried, right, otherwise)
