"""What makes a drafter's scores probabilities, fitted to what came true.

A drafter's log-probability x of a candidate at distance d becomes a x + b, but no certainty, with one a and one b each:
a tempers drafters that are too sure or not sure enough, b is what candidates have in common, such as a draft
vocabulary that lacks some tokens. It is the conditional chance that is fitted: only positions count where the token at
every smaller distance was among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

BINS_PER_NAT, NATS = 8, 8  # candidates of less than exp(-8) are hardly ever drafted
_FEWEST = 100  # candidates to fit to

IDENTITY = (1.0, 0.0)


def fit(tried: np.ndarray, right: np.ndarray, otherwise: Sequence[Sequence[float]] | None = None) -> list[list[float]]:
    """The most likely a and b of every distance, [M][2].

    Args:
      tried: [M, X], candidates by distance and by their log-probability x, from 0 down in X equal bins.
      right: [M, X], how many of them were right.
      otherwise: [M][2], for distances with too few candidates to tell; default 1 and 0.
    """
    known = otherwise or [IDENTITY] * len(tried)
    return [_fit(*counts) for counts in zip(tried, right, known, strict=True)]


def _fit(tried: np.ndarray, right: np.ndarray, otherwise: Sequence[float]) -> list[float]:
    x = -(np.arange(len(tried)) + 0.5) / BINS_PER_NAT
    if tried.sum() < _FEWEST or not right.any():
        return [*otherwise]

    def surprise(settings: np.ndarray) -> float:
        """-log of the chance of what came true, per candidate."""
        log_p = np.minimum(settings[0] * x + settings[1], -1e-3)
        return -(right * log_p + (tried - right) * np.log1p(-np.exp(log_p))).sum() / tried.sum()

    found = minimize(surprise, IDENTITY, method="Nelder-Mead", bounds=((0.1, 10.0), (-10.0, 2.0)))
    return np.round(found.x, 4).tolist()
